#!/bin/sh
# Builds the server with all bugs of chaos/bugs.toml as target/planted/fencepost, from a copy of the
# source. Which bug a node has is chosen when it starts. Requires target/debug/fencepost-chaos.
set -eu
cd "$(dirname "$0")/.."
place=$PWD/target/planted

source=$(git ls-files -z | xargs -0 sha256sum | sha256sum)
if [ "$(cat "$place/source.sha256" 2>/dev/null)" = "$source" ]; then
    exit
fi
rm -rf "$place/source" "$place/source.sha256"
mkdir -p "$place/source"
git ls-files -z | tar --create --null --files-from=- | tar --extract --directory="$place/source"
target/debug/fencepost-chaos plant "$place/source"
(cd "$place/source" && CARGO_TARGET_DIR="$place/target" CARGO_INCREMENTAL=0 \
    cargo build --locked --package fencepost)
ln -f "$place/target/debug/fencepost" "$place/fencepost"
echo "$source" >"$place/source.sha256"
