#!/bin/sh
# Checks the OpenAPI documents with Redocly and Spectral; any warning is an error. Their rules, with
# the reason for each that is off, are in openapi/lint/.
set -eu
cd "$(dirname "$0")/.."
rules=openapi/lint
log=$(mktemp)
trap 'rm -f "$log"' EXIT

say() { printf 'openapi: %s\n' "$*" >&2; }

# Outside of the clone, by version: they are the same for each.
version=$(sha256sum "$rules/package-lock.json" | cut -c1-16)
cache=${FENCEPOST_CACHE:-$HOME/.cache/fencepost}
tools=$cache/openapi-$version
if [ ! -e "$tools" ]; then
    say "installing Redocly and Spectral"
    rm -rf "$cache"/openapi-*
    mkdir -p "$cache"
    part=$(mktemp -d "$cache/openapi-XXXXXX")
    cp "$rules/package.json" "$rules/package-lock.json" "$part"
    npm --prefix "$part" ci --no-audit --no-fund --ignore-scripts >"$log" 2>&1 ||
        { cat "$log" >&2; exit 1; }
    mv -T "$part" "$tools"
fi
# The document of the last release was checked then.
documents=$(ls openapi/*.json | grep -v /released.json)
export REDOCLY_TELEMETRY=off REDOCLY_SUPPRESS_UPDATE_NOTICE=true NO_COLOR=1 FORCE_COLOR=0
"$tools/node_modules/.bin/redocly" lint --config "$rules/redocly.yaml" --max-problems 20 \
    $documents >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
if grep -q '^You have .* warning' "$log"; then
    cat "$log" >&2
    exit 1
fi
"$tools/node_modules/.bin/spectral" lint --ruleset "$rules/spectral.yaml" --fail-severity hint \
    --quiet $documents >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
say "the documents are sound"
