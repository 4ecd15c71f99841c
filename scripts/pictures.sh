#!/bin/bash
# Starts a server under load and a Prometheus that scrapes it, and draws the dashboards:
# docs/pictures/.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-120}
folder=$(mktemp -d /tmp/fencepost-pictures-XXXXXX)
chmod 755 "$folder"
pids=
stop() {
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    wait
    rm -rf "$folder"
}
trap stop EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q matplotlib==3.10.7
cargo build --locked --release
fencepost=target/release/fencepost
$fencepost dev --data-dir "$folder/data" --listen 127.0.0.1:7480 --metrics-listen 127.0.0.1:7481 \
    --ready-file "$folder/ready" >"$folder/log" 2>&1 &
pids="$pids $!"
while [ ! -s "$folder/ready" ]; do sleep 0.1; done
key=$(sed -n 's/.*"api_key": *"\([^"]*\)".*/\1/p' "$folder/ready")
cat >"$folder/prometheus.json" <<END
{"global": {"scrape_interval": "2s"}, "scrape_configs": [
  {"job_name": "fencepost", "static_configs": [{"targets": ["127.0.0.1:7481"]}]}]}
END
prometheus --config.file="$folder/prometheus.json" --storage.tsdb.path="$folder/tsdb" \
    --web.listen-address=127.0.0.1:7490 >>"$folder/log" 2>&1 &
pids="$pids $!"

# Jobs that succeed, fail and become dead letters, schedules, workers that time out, wrong fences.
FENCEPOST_URL=http://127.0.0.1:7480 FENCEPOST_KEY=$key python3 scripts/load.py "$seconds" &
load=$!
pids="$pids $load"
wait "$load"
"$folder/venv/bin/python" scripts/pictures.py http://127.0.0.1:7490 "$seconds"
