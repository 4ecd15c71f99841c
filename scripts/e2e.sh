#!/bin/sh
# Tests the console in a real browser: tests/e2e/. Requires target/debug/fencepost, or the program
# in FENCEPOST_BINARY, and the packages that `scripts/setup.sh test` installs. With the argument
# `pictures`, takes the screenshots of the console in docs/pictures/ instead; with `vitals`, measures
# how soon its pages are there; with `install`, only installs what the others need.
set -eu
cd "$(dirname "$0")/../tests/e2e"
installed=node_modules/.installed
if [ ! -e "$installed" ] || [ package-lock.json -nt "$installed" ]; then
    PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD=1 npm ci --no-audit --no-fund --loglevel=error >/dev/null
    touch "$installed"
fi
case "${1:-}" in
install) exit 0 ;;
pictures | vitals) exec node "$1.mjs" ;;
esac
exec node --test --test-reporter=spec console.test.mjs
