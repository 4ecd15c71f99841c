#!/bin/sh
# Installs the missing dependencies of Fencepost, and prints each step. With the argument `test`,
# also installs the dependencies of the tests: Go, Node, Java, pip, jq, Prometheus, HAProxy, nginx,
# faketime and Chromium; with `chaos` or `patroni`, those of `make chaos` or `make chaos-patroni`.
# Requires Debian or Ubuntu, and root or sudo. On other systems it prints what to install.
set -eu

MIN_POSTGRES=15
MIN_RUST_MINOR=94
# Approximate disk space for a build and a run of all tests, in KiB.
TESTS_TAKE_KIB=7000000

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

command -v cargo >/dev/null 2>&1 ||
    fail "Rust is missing. Install it from https://rustup.rs and try again."

rust=$(cargo --version | sed 's/cargo 1\.\([0-9]*\).*/\1/')
[ "$rust" -ge "$MIN_RUST_MINOR" ] 2>/dev/null ||
    fail "Rust 1.$MIN_RUST_MINOR or newer is required; installed: $(cargo --version). Run: rustup update"

# The newest installed version of the PostgreSQL server; empty if there is none.
postgres_version() {
    for postgres in /usr/lib/postgresql/*/bin/postgres /usr/pgsql-*/bin/postgres \
        /opt/homebrew/opt/postgresql@*/bin/postgres /usr/local/opt/postgresql@*/bin/postgres \
        "$(command -v postgres 2>/dev/null || true)"; do
        [ -x "$postgres" ] || continue
        "$postgres" --version | sed 's/[^0-9]*\([0-9]*\).*/\1/'
    done | sort -n | tail -n 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

have=$(postgres_version)
missing=
[ -n "$have" ] && [ "$have" -ge "$MIN_POSTGRES" ] || missing="$missing postgresql"
command -v redis-server >/dev/null 2>&1 || missing="$missing redis-server"
command -v setpriv >/dev/null 2>&1 || [ "$(uname)" = Darwin ] || missing="$missing util-linux"
command -v cc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
command -v curl >/dev/null 2>&1 || missing="$missing curl"
command -v python3 >/dev/null 2>&1 || missing="$missing python3"
if [ "${1:-}" = clients ]; then
    # Generated Go code imports it.
    [ -d /usr/share/gocode/src/gopkg.in/validator.v2 ] ||
        missing="$missing golang-gopkg-validator.v2-dev"
    [ -f /usr/share/java/jackson-databind.jar ] || missing="$missing libjackson2-databind-java"
    # A published worker links to it.
    [ -f /usr/include/openssl/ssl.h ] || missing="$missing libssl-dev pkg-config"
fi
if [ "${1:-}" = test ] || [ "${1:-}" = chaos ]; then
    ls /usr/lib/*/faketime/libfaketimeMT.so.1 >/dev/null 2>&1 || missing="$missing faketime"
    command -v node >/dev/null 2>&1 || missing="$missing nodejs"
fi
if [ "${1:-}" = patroni ]; then
    command -v patroni >/dev/null 2>&1 || missing="$missing patroni python3-psycopg2"
    command -v etcd >/dev/null 2>&1 || missing="$missing etcd-server"
    [ -x /usr/sbin/haproxy ] || command -v haproxy >/dev/null 2>&1 || missing="$missing haproxy"
fi
if [ "${1:-}" = test ]; then
    command -v go >/dev/null 2>&1 || missing="$missing golang-go"
    command -v openssl >/dev/null 2>&1 || missing="$missing openssl"
    command -v jq >/dev/null 2>&1 || missing="$missing jq"
    command -v npm >/dev/null 2>&1 || missing="$missing nodejs npm"
    python3 -m pip --version >/dev/null 2>&1 || missing="$missing python3-pip"
    python3 -c 'import ensurepip' >/dev/null 2>&1 || missing="$missing python3-venv"
    command -v promtool >/dev/null 2>&1 || missing="$missing prometheus"
    command -v haproxy >/dev/null 2>&1 || missing="$missing haproxy"
    command -v nginx >/dev/null 2>&1 || missing="$missing nginx-light"
    command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 ||
        command -v google-chrome >/dev/null 2>&1 || missing="$missing chromium"
    command -v javac >/dev/null 2>&1 || missing="$missing openjdk-17-jdk-headless"
fi
if [ "${1:-}" = test ]; then
    free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free_kib" -gt "$TESTS_TAKE_KIB" ] ||
        say "$((free_kib / 1000000)) GB are free here; the tests take about $((TESTS_TAKE_KIB / 1000000)) GB, or less if they were built before"
fi
[ -n "$missing" ] || exit 0

# Another installation may be under way.
command="apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends$missing"
command -v apt-get >/dev/null 2>&1 ||
    fail "missing:$missing (PostgreSQL $MIN_POSTGRES or newer). Install them and try again."
[ "$(id -u)" = 0 ] || command -v sudo >/dev/null 2>&1 ||
    fail "missing:$missing. As root, run: apt-get update && $command"

say "installing$missing: $command"
export DEBIAN_FRONTEND=noninteractive
# Only the programs are needed, not system-wide servers.
if [ ! -e /etc/postgresql-common/createcluster.conf ]; then
    as_root mkdir -p /etc/postgresql-common
    printf 'create_main_cluster = false\n' | as_root tee /etc/postgresql-common/createcluster.conf >/dev/null
fi
as_root apt-get update -q >/dev/null || say "apt-get update failed; continuing with the existing package lists"
as_root $command >/dev/null || fail "the installation failed. Run it by hand: apt-get update && $command"
for service in redis-server prometheus haproxy patroni etcd; do
    case " $missing " in *" $service"*)
        command -v systemctl >/dev/null 2>&1 && as_root systemctl disable --now "$service" >/dev/null 2>&1 || true ;;
    esac
done
have=$(postgres_version)
[ -n "$have" ] && [ "$have" -ge "$MIN_POSTGRES" ] ||
    fail "this system's packages provide PostgreSQL ${have:-none}, but $MIN_POSTGRES or newer is required. As root, run:
  apt-get install -y postgresql-common && /usr/share/postgresql-common/pgdg/apt.postgresql.org.sh -y && apt-get install -y postgresql-17"
say "done"
