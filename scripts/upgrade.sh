#!/bin/sh
# Runs clients and faults for two minutes against nodes of each earlier release and of this code,
# which share one database. A release is a commit that changed migrations/released. Requires
# target/debug/fencepost and target/debug/fencepost-chaos, built with the workspace. With the argument
# `build`, only builds the releases.
set -eu
cd "$(dirname "$0")/.."
SECONDS_OF_FAULTS=120

[ "$(git rev-parse --is-shallow-repository)" = false ] || {
    echo "upgrade: the earlier releases are not in this shallow clone" >&2
    exit 1
}
place=$PWD/target/previous
commits=$(git log --reverse --format=%H -- migrations/released)

for commit in $commits; do
    [ ! -x "$place/$commit/fencepost" ] || continue
    echo "upgrade: building the release $commit"
    rm -rf "$place/source"
    mkdir -p "$place/source" "$place/$commit"
    git archive "$commit" | tar -x -C "$place/source"
    # With the fail points that its nodes need in the run.
    (cd "$place/source" && CARGO_TARGET_DIR="$place/target" \
        cargo build --locked -p fencepost -p fencepost-chaos)
    mv "$place/target/debug/fencepost" "$place/$commit/fencepost"
done
rm -rf "$place/target" "$place/source"
[ "${1:-}" != build ] || exit 0
for commit in $commits; do
    echo "upgrade: from the release $commit"
    target/debug/fencepost-chaos run --previous "$place/$commit/fencepost" --seconds "$SECONDS_OF_FAULTS"
done
