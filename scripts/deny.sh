#!/bin/sh
# Checks the crates with cargo-deny, as configured in deny.toml. It fails when a check cannot run.
#   deny.sh          with the advisories in ops/advisories, whose age it prints
#   deny.sh release  the same; it fails when they are more than RELEASE_DAYS old
#   deny.sh audit    with the newest advisories, at most MAX_DAYS old; needs github.com
#   deny.sh vendor   replaces the advisories in ops/advisories by the newest ones
set -eu
cd "$(dirname "$0")/.."

VERSION=0.20.2
FETCH_SECONDS=60
MAX_DAYS=7
RELEASE_DAYS=30
SOURCE=https://github.com/RustSec/advisory-db
VENDORED=ops/advisories

say() { printf 'deny: %s\n' "$*"; }
fail() {
    say "NOT CHECKED: $*" >&2
    exit 1
}
# Days since a commit of this repository.
age_days() { echo $((($(date +%s) - $(git -C "$1" log -1 --format=%ct)) / 86400)); }

# A repository of the vendored advisories: cargo-deny reads them from no other place.
unpack() {
    rm -rf "$work/source"
    mkdir -p "$work/source"
    tar -xzf "$VENDORED/advisories.tar.gz" -C "$work/source"
    at=$(cut -d' ' -f2 "$VENDORED/commit")
    (
        cd "$work/source"
        export GIT_AUTHOR_DATE="$at" GIT_COMMITTER_DATE="$at"
        git init -q -b main .
        git add --all
        git -c user.name=fencepost -c user.email=fencepost@localhost -c commit.gpgsign=false \
            commit -q -m advisories
    )
}

# Checks with the advisories of this repository or URL.
check_advisories() {
    sed "s#^\[advisories\]#[advisories]\ndb-path = \"$work/db\"#" deny.toml >"$work/deny.toml"
    rm -rf "$work/db"
    GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0="url.$1.insteadOf" GIT_CONFIG_VALUE_0="$SOURCE" \
        timeout "$FETCH_SECONDS" cargo deny --config "$work/deny.toml" fetch db >"$work/log" 2>&1 ||
        { cat "$work/log" >&2; fail "the advisories could not be read from $1"; }
    cargo deny --offline --config "$work/deny.toml" check advisories
}

work=$PWD/target/advisories
mkdir -p "$work"
# Outside of the clone, by version. Not optimised, since it runs for seconds.
cache=${FENCEPOST_CACHE:-$HOME/.cache/fencepost}
tools=$cache/cargo-deny-$VERSION
if [ ! -x "$tools/bin/cargo-deny" ]; then
    say "installing cargo-deny $VERSION"
    rm -rf "$cache"/cargo-deny-*
    cargo install --locked --quiet --debug --root "$tools" "cargo-deny@$VERSION" ||
        fail "cargo-deny could not be installed"
fi
PATH=$tools/bin:$PATH
# Also crates of other platforms, which a build here does not need.
cargo fetch --locked --quiet || fail "some crates are missing and could not be fetched"
case ${1-} in
    "" | release)
        cargo deny --offline check bans licenses sources
        unpack
        check_advisories "file://$work/source"
        days=$(age_days "$work/source")
        [ -z "${1-}" ] || [ "$days" -le "$RELEASE_DAYS" ] ||
            fail "the advisories are $days days old: \`make advisories\` replaces them"
        say "advisories are $days days old; \`make audit\` reads the newest"
        ;;
    audit | vendor)
        rm -rf "$work/newest"
        timeout "$FETCH_SECONDS" git clone -q --depth 1 "$SOURCE" "$work/newest" ||
            fail "$SOURCE could not be read"
        days=$(age_days "$work/newest")
        [ "$days" -le "$MAX_DAYS" ] || fail "the newest advisories are $days days old"
        [ "$1" = audit ] || {
            git -C "$work/newest" archive --format=tar.gz HEAD crates >"$VENDORED/advisories.tar.gz"
            git -C "$work/newest" log -1 --format='%H %cI' >"$VENDORED/commit"
        }
        check_advisories "file://$work/newest"
        say "advisories are $days days old"
        ;;
    *) fail "unknown: $1" ;;
esac
