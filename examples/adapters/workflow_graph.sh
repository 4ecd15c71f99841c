#!/bin/sh
# Runs one job over the workflow-graph protocol: register, claim, heartbeat, logs, complete.
# Requires curl and jq.
#   WG_SERVER=http://:fp_live_…@127.0.0.1:7070/workflow-graph sh workflow_graph.sh
set -eu

post() { curl -sS --fail-with-body -X POST "$WG_SERVER/api/$1" -H 'Content-Type: application/json' -d "$2"; }

post workers/register '{"worker_id": "w1", "labels": ["docker"]}'
claim=$(post jobs/claim '{"worker_id": "w1", "labels": ["docker"], "lease_ttl_secs": 30}')
[ "$claim" != null ] || { echo "no job"; exit 0; }
lease=$(echo "$claim" | jq -r .lease.lease_id)
workflow=$(echo "$claim" | jq -r .job.workflow_id)
job=$(echo "$claim" | jq -r .job.job_id)

post "jobs/$lease/heartbeat" ''
output=$(sh -c "$(echo "$claim" | jq -r .job.command)")
chunks=$(jq -nc --arg w "$workflow" --arg j "$job" --arg data "$output" \
    '{chunks: [{workflow_id: $w, job_id: $j, sequence: 0, data: $data, timestamp_ms: 1710000001000, stream: "stdout"}]}')
post "jobs/$lease/logs" "$chunks"
if [ "$(curl -sS "$WG_SERVER/api/jobs/$workflow/$job/cancelled")" = true ]; then
    post "jobs/$lease/fail" '{"error": "cancelled", "retryable": false}'
    echo "cancelled"
    exit 0
fi
post "jobs/$lease/complete" "$(jq -nc --arg it "$output" '{outputs: {stdout: $it}}')"
echo "completed"
