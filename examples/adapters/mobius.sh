#!/bin/sh
# Runs one job over the Mobius protocol: claim, heartbeat, complete. Requires curl and jq.
#   API_BASE=http://127.0.0.1:7070/mobius PROJECT=demo MOBIUS_API_KEY=fp_live_… sh mobius.sh
set -eu

jobs="$API_BASE/v1/projects/$PROJECT/jobs"
call() {
    curl -sS --fail-with-body -X POST "$1" \
        -H "Authorization: Bearer $MOBIUS_API_KEY" -H "Content-Type: application/json" -d "$2"
}

job=$(call "$jobs/claim" '{"worker_id": "worker-1", "queues": ["default"], "wait_seconds": 10}')
[ -n "$job" ] || { echo "no job available"; exit 0; }
id=$(echo "$job" | jq -r .job_id)
attempt=$(echo "$job" | jq -r .attempt)
echo "claimed $id: $(echo "$job" | jq -r '"\(.step_name) \(.action), heartbeat every \(.heartbeat_interval_seconds) s"')"

beat=$(call "$jobs/$id/heartbeat" "{\"worker_id\": \"worker-1\", \"attempt\": $attempt}")
if [ "$(echo "$beat" | jq .directives.should_cancel)" = true ]; then
    call "$jobs/$id/complete" "{\"worker_id\": \"worker-1\", \"attempt\": $attempt, \"status\": \"failed\"}"
    echo "cancelled"
    exit 0
fi

result=$(printf '{"summary": "done"}' | base64 | tr -d "\n")
call "$jobs/$id/complete" \
    "{\"worker_id\": \"worker-1\", \"attempt\": $attempt, \"status\": \"completed\", \"result_b64\": \"$result\"}"
echo "completed"
