#!/bin/sh
# Tests the console in a real browser: tests/e2e/. Requires target/debug/fencepost, or the program
# in FENCEPOST_BINARY, and the packages that `scripts/setup.sh test` installs. With the argument
# `pictures`, takes the screenshots of the console in docs/pictures/ instead; with `vitals`, measures
# how soon its pages are there.
set -eu
cd "$(dirname "$0")/../tests/e2e"
PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD=1 npm ci --no-audit --no-fund --loglevel=error >/dev/null
case "${1:-}" in
pictures | vitals) exec node "$1.mjs" ;;
esac
exec node --test --test-reporter=spec console.test.mjs
