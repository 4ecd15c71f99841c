#!/bin/sh
# Checks the OpenAPI documents with Redocly and Spectral; any warning is an error. Their rules, with
# the reason for each that is off, are in openapi/lint/.
set -eu
cd "$(dirname "$0")/.."
rules=openapi/lint
log=$(mktemp)
trap 'rm -f "$log"' EXIT

say() { printf 'openapi: %s\n' "$*" >&2; }

installed=$rules/node_modules/.installed
if [ ! -e "$installed" ] || [ "$rules/package-lock.json" -nt "$installed" ]; then
    say "installing Redocly and Spectral"
    npm --prefix "$rules" ci --no-audit --no-fund --ignore-scripts >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
    touch "$installed"
fi
export REDOCLY_TELEMETRY=off REDOCLY_SUPPRESS_UPDATE_NOTICE=true NO_COLOR=1 FORCE_COLOR=0
"$rules/node_modules/.bin/redocly" lint --config "$rules/redocly.yaml" --max-problems 20 \
    openapi/*.json >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
if grep -q '^You have .* warning' "$log"; then
    cat "$log" >&2
    exit 1
fi
"$rules/node_modules/.bin/spectral" lint --ruleset "$rules/spectral.yaml" --fail-severity hint \
    --quiet openapi/*.json >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
say "the documents are sound"
