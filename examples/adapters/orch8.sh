#!/bin/sh
# Runs one task over the Orch8 protocol: poll, send heartbeats, complete. Requires curl and jq.
# The key is part of the URL, so no header is needed:
#   ORCH8_URL=http://:fp_live_…@127.0.0.1:7070/orch8 sh orch8.sh
set -eu

task=$(curl -sS --fail-with-body -X POST "$ORCH8_URL/workers/tasks/poll" \
    -H "Content-Type: application/json" \
    -d '{ "handler_names": ["process_image"], "worker_id": "img-worker-1" }')
[ -n "$task" ] || { echo "no task available"; exit 0; }
id=$(echo "$task" | jq -r .id)
echo "polled $id, attempt $(echo "$task" | jq .metadata.attempt)"

# A heartbeat has no body.
while true; do
    curl -sS -o /dev/null -X POST "$ORCH8_URL/workers/tasks/$id/heartbeat"
    sleep 20
done &
beating=$!
trap 'kill $beating 2>/dev/null || true' EXIT

if [ "$(echo "$task" | jq -r '.params.image_url // empty')" = "" ]; then
    curl -sS --fail-with-body -X POST "$ORCH8_URL/workers/tasks/$id/fail" \
        -H "Content-Type: application/json" -d '{ "error": "no image_url", "retryable": false }'
    echo "failed"
    exit 0
fi
curl -sS --fail-with-body -X POST "$ORCH8_URL/workers/tasks/$id/complete" \
    -H "Content-Type: application/json" \
    -d "$(echo "$task" | jq -c '{output: {url: (.params.image_url + "?w=\(.params.width)")}}')"
echo "completed"
