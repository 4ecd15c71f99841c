#!/bin/bash
# Generates clients from the OpenAPI files with six generators, compiles them, and runs a job with
# each on a private server: enqueue, poll, heartbeat, ack. Then runs a published worker of another
# protocol that the tests do not build. Prints the table of docs/clients.md, and writes it there.
#
# With names of clients as arguments (python, fetch, hey), only these, on the server at FENCEPOST_URL
# with the key in FENCEPOST_KEY: they also enqueue until they are refused.
set -euo pipefail
cd "$(dirname "$0")/.."
made=$PWD/target/clients
mkdir -p "$made"
log=$made/log
PUBLISHED_WORKER=1.2.11
: >"$log"

say() { printf 'clients: %s\n' "$*" >&2; }
quietly() { "$@" >>"$log" 2>&1 || { tail -n 40 "$log" >&2; say "failed: $*"; exit 1; }; }

say "installing the generators"
[ -x "$made/venv/bin/python" ] || quietly python3 -m venv "$made/venv"
quietly "$made/venv/bin/pip" install -q -r clients/generated/python/requirements.txt
quietly npm --prefix clients/generated/typescript ci --no-audit --no-fund

folder=$(mktemp -d /tmp/fencepost-clients-XXXXXX)
chmod 755 "$folder"
server=
worker=
stop() { kill $server $worker 2>/dev/null || true; wait $server 2>/dev/null || true; rm -rf "$folder"; }
trap stop EXIT
start_server() {
    say "starting a server"
    quietly cargo build --locked
    ./target/debug/fencepost dev --default-plan free --data-dir "$folder/data" --listen 127.0.0.1:0 \
        --metrics-listen 127.0.0.1:0 --ready-file "$folder/ready" >>"$log" 2>&1 &
    server=$!
    while [ ! -s "$folder/ready" ]; do
        kill -0 "$server" || { tail "$log" >&2; exit 1; }
        sleep 0.1
    done
    FENCEPOST_URL=$(sed -n 's/.*"url": *"\([^"]*\)".*/\1/p' "$folder/ready")
    FENCEPOST_KEY=$(sed -n 's/.*"api_key": *"\([^"]*\)".*/\1/p' "$folder/ready")
    export FENCEPOST_URL FENCEPOST_KEY
}
export PATH=$made/venv/bin:$PATH

rows=
# worked GENERATOR LANGUAGE DOCUMENT COMMAND...: the command must print that it has worked a job.
worked() {
    local generator=$1 language=$2 document=$3
    shift 3
    say "$generator ($language)"
    local said
    said=$("$@" 2>>"$log") || { tail -n 40 "$log" >&2; say "$generator: failed"; exit 1; }
    case "$said" in *"worked job_"*) ;; *) say "$generator: unexpected output: $said"; exit 1 ;; esac
    rows="$rows| $language | $generator | \`$document\` | made, compiled, worked a job |
"
}

python_client() {
    openapi-python-client generate --path openapi/openapi.json --output-path "$made/python" --overwrite \
        >"$made/python.log" 2>&1 || { cat "$made/python.log" >&2; exit 1; }
    # NDJSON has no type in Python: the export is read with an HTTP client.
    if grep '^WARNING' "$made/python.log" | grep -v 'GET /v1/audit-log/export' >&2; then
        say "the generator left something out"
        exit 1
    fi
    quietly pip install -q --force-reinstall --no-deps "$made/python"
    quietly pip install -q "$made/python"
    quietly mypy "$made/python/fencepost_client" clients/generated/python/smoke.py
    python clients/generated/python/smoke.py "$@"
}
make_typescript_clients() {
    cd clients/generated/typescript
    quietly npx openapi-typescript ../../../openapi/openapi.json -o made/schema.d.ts
    quietly npx openapi-ts -i ../../../openapi/openapi.json -o made/hey
    quietly npx tsc -p .
    quietly npx esbuild fetch.ts hey.ts --bundle --platform=node --format=esm --out-extension:.js=.mjs --outdir=made/out
}
fetch_client() {
    make_typescript_clients
    node made/out/fetch.mjs "$@"
}
hey_client() {
    make_typescript_clients
    node made/out/hey.mjs "$@"
}
rust_client() {
    CARGO_TARGET_DIR=$made/rust quietly cargo build --locked --manifest-path clients/generated/rust/Cargo.toml
    "$made/rust/debug/fencepost-client-smoke"
}
go_client() {
    quietly openapi-generator-cli generate -i openapi/openapi.json -g go -o "$made/go" \
        --additional-properties=packageName=fencepost,withGoMod=true
    # Replaces the generated go.mod: an old Go must accept it, and clients/generated/go imports this name.
    printf 'module fencepost.example/client\n\ngo 1.19\n' >"$made/go/go.mod"
    rm -f "$made/go/go.sum"
    # The generated code imports it for fields of several types; Debian has it without a go.mod.
    rm -rf "$made/validator"
    cp -r /usr/share/gocode/src/gopkg.in/validator.v2 "$made/validator"
    printf 'module gopkg.in/validator.v2\n\ngo 1.19\n' >"$made/validator/go.mod"
    cd clients/generated/go
    GOFLAGS=-mod=mod GOPROXY=off go run .
}
java_client() {
    local jackson=/usr/share/java/jackson-annotations.jar:/usr/share/java/jackson-core.jar
    jackson=$jackson:/usr/share/java/jackson-databind.jar
    rm -rf "$made/java"
    # Debian has Jackson without its module for java.time: times stay texts here.
    quietly openapi-generator-cli generate -i openapi/openapi.json -g java --library native \
        -o "$made/java" --type-mappings=DateTime=String,OffsetDateTime=String \
        --additional-properties=openApiNullable=false,invokerPackage=fencepost \
        --additional-properties=apiPackage=fencepost.api,modelPackage=fencepost.model
    cd "$made/java"
    rm -f src/main/java/fencepost/RFC3339*.java
    # So it is with the annotations that Java itself no longer has.
    find src/main -name '*.java' -exec sed -i '/RFC3339/d; /JavaTimeModule/d
        /javax.annotation.Generated/d; /import ja[a-z]*.annotation/d
        s/@ja[a-z]*.annotation.N[a-z]*//g' {} +
    mkdir classes
    find src/main -name '*.java' >sources
    quietly javac -nowarn -proc:none -cp "$jackson" -d classes @sources "$OLDPWD/clients/generated/java/Smoke.java"
    java -cp "$jackson:classes" Smoke
}
# C# is generated; it is compiled where there is a .NET SDK.
generate_csharp() {
    rm -rf "$made/csharp"
    openapi-generator-cli generate -i openapi/openapi-3.0.json -g csharp -o "$made/csharp" \
        --additional-properties=packageName=Fencepost >"$made/csharp.log" 2>&1 ||
        { cat "$made/csharp.log" >&2; exit 1; }
    if grep -E ' (WARN|ERROR) ' "$made/csharp.log" | grep -v 'schema name: null' >&2; then
        say "the generator left something out"
        exit 1
    fi
    if command -v dotnet >/dev/null; then
        quietly dotnet build "$made/csharp"
    fi
}
# The worker that workflow-graph publishes for Rust, built as people install it: it gets the key in
# its URL, and works a command.
published_worker() {
    quietly cargo install --quiet --locked --root "$made/worker" --version "=$PUBLISHED_WORKER" \
        workflow-graph-worker-sdk
    local job
    job=$("$PWD/target/debug/fencepost" enqueue --job-type shell --payload '"echo from Rust"')
    SERVER_URL=http://:$FENCEPOST_KEY@${FENCEPOST_URL#http://}/workflow-graph \
        "$made/worker/bin/workflow-graph-worker-sdk" >>"$log" 2>&1 &
    worker=$!
    "$PWD/target/debug/fencepost" jobs get "$job" --wait-seconds 20 >>"$log" 2>&1 || {
        tail -n 40 "$log" >&2
        exit 1
    }
}
pinned() { sed -n "s|.*\"$1\": *\"\([^\"]*\)\".*|\1|p" clients/generated/typescript/package.json; }
in_python() { sed -n "s/^$1==//p" clients/generated/python/requirements.txt; }
in_rust() { sed -n "s/^$1 = \"=\(.*\)\"/\1/p" clients/generated/rust/Cargo.toml; }

run_python() {
    worked "openapi-python-client $(in_python openapi-python-client)" Python openapi.json python_client "$@"
}
run_fetch() {
    local generator
    generator="openapi-typescript $(pinned openapi-typescript) with openapi-fetch $(pinned openapi-fetch)"
    worked "$generator" TypeScript openapi.json fetch_client "$@"
}
run_hey() {
    worked "@hey-api/openapi-ts $(pinned @hey-api/openapi-ts)" TypeScript openapi.json hey_client "$@"
}

if [ $# != 0 ]; then
    for name in "$@"; do "run_$name" refused; done
    printf '%s' "$rows"
    exit
fi
start_server
run_python
run_fetch
run_hey
worked "progenitor $(in_rust progenitor)" Rust openapi-3.0.json rust_client
worked "openapi-generator $(in_python openapi-generator-cli), \`-g go\`" Go openapi.json go_client
worked "openapi-generator $(in_python openapi-generator-cli), \`-g java --library native\`" Java openapi.json java_client
say "openapi-generator (C#)"
generate_csharp

say "workflow-graph-worker-sdk $PUBLISHED_WORKER (Rust)"
published_worker

printf '| language | generator | document | result |\n|---|---|---|---|\n%s' "$rows" >"$made/table"
cat "$made/table"
if [ -f docs/clients.md ]; then
    sed -e "/<!-- table -->/,/<!-- end -->/{/<!-- table -->/{p;r $made/table
};/<!-- end -->/p;d}" docs/clients.md >"$made/page"
    cmp -s "$made/page" docs/clients.md || cp "$made/page" docs/clients.md
fi
