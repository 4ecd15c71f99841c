#!/bin/sh
# Checks the crates with cargo-deny, as deny.toml says. Works without a network: what needs one is then left out, and
# that is said.
set -eu
cd "$(dirname "$0")/.."

VERSION=0.20.2
FETCH_SECONDS=60

say() { printf 'deny: %s\n' "$*"; }

if ! command -v cargo-deny >/dev/null 2>&1; then
    say "installing cargo-deny $VERSION"
    cargo install --locked --quiet "cargo-deny@$VERSION" || {
        say "NOT CHECKED: cargo-deny is not installed, and could not be"
        exit 0
    }
fi
# Also those of other platforms, which a build here does not need.
cargo fetch --locked --quiet || {
    say "NOT CHECKED: not all crates are here, and they could not be fetched"
    exit 0
}
cargo deny --offline check bans licenses sources
if timeout "$FETCH_SECONDS" cargo deny fetch db >/dev/null 2>&1; then
    cargo deny --offline check advisories
else
    say "NOT CHECKED: the database of advisories could not be fetched"
fi
