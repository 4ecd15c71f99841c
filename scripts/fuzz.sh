#!/bin/sh
# Sends valid and invalid requests, generated from the OpenAPI file, to a private server. Fails on
# every answer that is a server error or does not match the file. FENCEPOST_FUZZ_EXAMPLES sets the
# number of requests per operation.
set -eu
cd "$(dirname "$0")/.."

VERSION=4.32.5
EXAMPLES=${FENCEPOST_FUZZ_EXAMPLES:-190}
place=$(mktemp -d /tmp/fencepost-fuzz-XXXXXX)
root=$PWD
tools=$root/target/fuzz
server=

stop() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    [ -z "$server" ] || wait "$server" 2>/dev/null || true
    rm -rf "$place"
}
trap stop EXIT INT TERM

if [ ! -x "$tools/bin/st" ]; then
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet "schemathesis==$VERSION"
fi
cargo build --locked --quiet
# The database's user must be able to enter the directory.
chmod 755 "$place"
FENCEPOST_LOG=error ./target/debug/fencepost dev --data-dir "$place/data" --listen 127.0.0.1:0 \
    --metrics-listen 127.0.0.1:0 --ready-file "$place/ready" >"$place/out" 2>"$place/log" &
server=$!
while [ ! -s "$place/ready" ]; do
    kill -0 "$server" 2>/dev/null || { cat "$place/log" "$place/out"; exit 1; }
    sleep 0.2
done
field() { python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$place/ready" "$1"; }
url=$(field url)
key=$(field api_key)

# Excludes streams, which do not end, and operations that would revoke this run's credential.
fuzz() {
    # It keeps notes where it runs. Jobs with callbacks of callbacks are large, and meant; making
    # them takes long, and many are dropped on the way. One worker, because Python 3.11 loses
    # count when two threads parse at once: https://github.com/python/cpython/issues/106905
    cd "$place"
    "$tools/bin/st" run "$root/openapi/openapi.json" --url "$url" --header "Authorization: Bearer $1" \
        --max-examples "$2" --workers 1 --request-timeout 60 --no-color \
        --suppress-health-check large_base_example,data_too_large,too_slow,filter_too_much \
        --exclude-path-regex '/stream$' --exclude-operation-id keys_revoke --exclude-operation-id keys_rotate \
        --exclude-operation-id auth_logout --exclude-operation-id me_end_session \
        --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance \
        $3
}

# A session calls the routes of accounts and projects. They reach their rate limits soon, which is a
# valid answer, too. The password is none of the document's examples, which would end the account.
post() { curl -sS "$url$1" -H 'Content-Type: application/json' -d "$2"; }
person='{"email": "fuzz@example.com", "password": "seven yellow submarines sing"}'
post /v1/auth/signup "$person" >/dev/null
token=$(post /v1/auth/login "$person" | python3 -c 'import json,sys; print(json.load(sys.stdin)["access_token"])')
fuzz "$token" 20 '--include-tag accounts --include-tag projects'
fuzz "$key" "$EXAMPLES" ''
if grep -q '"level":"ERROR"' "$place/log"; then
    cat "$place/log"
    exit 1
fi
