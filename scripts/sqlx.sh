#!/bin/sh
# Checks every statement against the migrations on a private PostgreSQL, and regenerates .sqlx/.
set -eu
cd "$(dirname "$0")/.."

bin=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1)
[ -n "$bin" ] || bin=$(dirname "$(command -v initdb)")
dir=$(mktemp -d /tmp/fencepost-sqlx-XXXXXX)
as_owner=
if [ "$(id -u)" = 0 ]; then
    chown postgres "$dir"
    as_owner="setpriv --reuid=postgres --regid=postgres --clear-groups --"
fi
stop() {
    $as_owner "$bin/pg_ctl" -D "$dir/data" -m immediate stop >/dev/null 2>&1 || true
    rm -rf "$dir"
}
trap stop EXIT INT TERM

$as_owner "$bin/initdb" -D "$dir/data" -U fencepost -A trust -E UTF8 --locale=C --no-sync >/dev/null
$as_owner "$bin/pg_ctl" -D "$dir/data" -o "-k $dir -c listen_addresses= -c fsync=off" -w -l "$dir/log" start >/dev/null
for migration in migrations/*.sql; do
    "$bin/psql" -q -v ON_ERROR_STOP=1 -h "$dir" -U fencepost -d postgres -f "$migration"
done
rm -rf .sqlx
mkdir .sqlx
# The macros run only when the crate is compiled: force a compilation.
touch src/store/lib.rs
SQLX_OFFLINE=false SQLX_OFFLINE_DIR="$PWD/.sqlx" \
    DATABASE_URL="postgres://fencepost@localhost/postgres?host=$dir" cargo check --locked -p fencepost-store
