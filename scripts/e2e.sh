#!/bin/sh
# Tests the console in a real browser: tests/e2e/. Requires target/debug/fencepost and the packages
# that `scripts/setup.sh test` installs. With the argument `pictures`, takes the screenshots of the
# console in docs/pictures/ instead.
set -eu
cd "$(dirname "$0")/../tests/e2e"
PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD=1 npm ci --no-audit --no-fund --loglevel=error >/dev/null
if [ "${1:-}" = pictures ]; then
    exec node pictures.mjs
fi
exec node --test --test-reporter=spec console.test.mjs
