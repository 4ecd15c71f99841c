#!/bin/sh
# Builds the Debian package: target/debian/fencepost_*.deb. With the argument `install`, installs it
# and runs it once.
set -eu
cd "$(dirname "$0")/.."
command -v cargo-deb >/dev/null || cargo install --locked cargo-deb --version 3.8.0
cargo build --locked --release
fencepost=target/release/fencepost
mkdir -p target/package
"$fencepost" man target/package/man
"$fencepost" completions bash >target/package/fencepost.bash
"$fencepost" completions zsh >target/package/_fencepost
"$fencepost" completions fish >target/package/fencepost.fish
cargo deb --no-build
if [ "${1:-}" = install ]; then
    dpkg --install target/debian/fencepost_*.deb
    /usr/bin/fencepost --version
fi
