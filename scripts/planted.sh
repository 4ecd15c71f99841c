#!/bin/sh
# Builds the server with all bugs of chaos/bugs.toml as target/planted/fencepost, from a copy of the
# source. Which bug a node has is chosen when it starts. The argument is a built `fencepost-chaos`.
set -eu
cd "$(dirname "$0")/.."
chaos=${1:-target/debug/fencepost-chaos}
place=$PWD/target/planted

files() { git ls-files -z --cached --others --exclude-standard; }
source=$(files | xargs -0 sha256sum | sha256sum)
if [ -x "$place/fencepost" ] && [ "$(cat "$place/source.sha256" 2>/dev/null)" = "$source" ]; then
    exit
fi
rm -rf "$place/source" "$place/source.sha256"
mkdir -p "$place/source"
files | tar --create --null --files-from=- | tar --extract --directory="$place/source"
"$chaos" plant "$place/source"
(cd "$place/source" && CARGO_TARGET_DIR="$place/target" CARGO_INCREMENTAL=0 \
    cargo build --locked --package fencepost)
ln -f "$place/target/debug/fencepost" "$place/fencepost"
echo "$source" >"$place/source.sha256"
