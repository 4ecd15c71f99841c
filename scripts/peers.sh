#!/bin/sh
# The bulk lifecycle of other queues on this machine, with the PostgreSQL and Redis that `fencepost
# dev` starts: compare it with `fencepost-bench --only bulk` of the same hour. Needs Node, npm's
# registry, psql and a release build. Versions: bench/peers/package.json and river/Cargo.lock.
set -eu
cd "$(dirname "$0")/.."

bin=${FENCEPOST_BIN:-target/release/fencepost}
[ -x "$bin" ] || { echo "$bin is missing: cargo build --release -p fencepost -p fencepost-bench" >&2; exit 1; }
dir=$(mktemp -d /var/tmp/fencepost-peers-XXXXXX)
# As root, PostgreSQL runs as a user of its own.
chmod 755 "$dir"
"$bin" dev --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 --log warn --data-dir "$dir" \
    --ready-file "$dir/ready.json" >/dev/null &
dev=$!
stop() {
    kill "$dev" 2>/dev/null || true
    wait "$dev" 2>/dev/null || true
    rm -rf "$dir"
}
trap stop EXIT INT TERM
tries=0
while [ ! -e "$dir/ready.json" ]; do
    kill -0 "$dev"
    tries=$((tries + 1))
    [ "$tries" -le 600 ] || { echo "the server did not start within a minute" >&2; exit 1; }
    sleep 0.1
done
field() { node -p "JSON.parse(require('fs').readFileSync('$dir/dev.json'))['$1'] ?? ''"; }
database=$(field database_url)
socket=$(field redis_url | sed 's|^redis+unix://||')
# A database of their own: their tables are not ours.
admin=$(printf '%s' "$database" | sed 's|/fencepost?|/postgres?|')
psql -q "$admin" -c 'create database peers'
mkdir -p target/peers
cp bench/peers/package.json bench/peers/package-lock.json bench/peers/peers.mjs target/peers/
(cd target/peers && npm ci --silent --no-audit --no-fund --ignore-scripts)
PEER_DATABASE_URL=$(printf '%s' "$database" | sed 's|/fencepost?|/peers?|')
export PEER_DATABASE_URL PEER_REDIS_SOCKET="$socket"
node target/peers/peers.mjs
CARGO_TARGET_DIR=target/peers/river cargo run --release --locked --quiet \
    --manifest-path bench/peers/river/Cargo.toml
