#!/bin/sh
# A worker that uses the Open Job Spec protocol: register, fetch, heartbeat, ack, deregister.
# Requires curl and jq.
#   OJS_URL=http://127.0.0.1:7070/ojs/v1 OJS_KEY=fp_live_… sh open_job_spec.sh
set -eu

post() {
    curl -sS --fail-with-body -X POST "$OJS_URL/$1" -H "Authorization: Bearer $OJS_KEY" \
        -H 'Content-Type: application/openjobspec+json' -d "$2"
}

post workers/register '{"worker_id": "worker-abc-123", "hostname": "web-01.example.com", "pid": 12345,
    "queues": ["default", "emails"], "concurrency": 10, "labels": ["region:us-east-1"]}' >/dev/null
jobs=$(post jobs/fetch '{"queues": ["critical", "default"], "count": 5}')
ids=$(echo "$jobs" | jq -c '[.jobs[].id]')
state=$(post workers/heartbeat "{\"worker_id\": \"worker-abc-123\", \"state\": \"running\", \"active_job_ids\": $ids}" | jq -r .state)
echo "$state: $(echo "$ids" | jq length) jobs"
for id in $(echo "$ids" | jq -r '.[]'); do
    post "jobs/$id/ack" '{"result": {"done": true}}' >/dev/null
done
post workers/deregister '{"worker_id": "worker-abc-123"}' >/dev/null
echo "gone"
