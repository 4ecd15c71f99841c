#!/bin/sh
# Runs clients and faults for two minutes against nodes of the last release and of this code, which
# share one database. The last release is the commit that last changed migrations/released.
# Requires target/debug/fencepost and target/debug/fencepost-chaos, built with the workspace. With the
# argument `build`, only builds the last release.
set -eu
cd "$(dirname "$0")/.."
SECONDS_OF_FAULTS=120

[ "$(git rev-parse --is-shallow-repository)" = false ] || {
    echo "upgrade: the last release is not in this shallow clone" >&2
    exit 1
}
commit=$(git log -1 --format=%H -- migrations/released)
place=$PWD/target/previous
if [ "$(cat "$place/commit" 2>/dev/null)" != "$commit" ]; then
    echo "upgrade: building the last release, $commit"
    rm -rf "$place"
    mkdir -p "$place/source"
    git archive "$commit" | tar -x -C "$place/source"
    # With the fail points that its nodes need in the run.
    (cd "$place/source" && CARGO_TARGET_DIR="$place/target" \
        cargo build --locked -p fencepost -p fencepost-chaos)
    mv "$place/target/debug/fencepost" "$place/fencepost"
    rm -rf "$place/target" "$place/source"
    echo "$commit" >"$place/commit"
fi
[ "${1:-}" != build ] || exit 0
exec target/debug/fencepost-chaos run --previous "$place/fencepost" --seconds "$SECONDS_OF_FAULTS"
