#!/bin/sh
# Makes the passwords that docker-compose.yml reads, in ops/secrets/. What is there already stays.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
# Nobody but their owner gets at them here; each is mounted into the containers that need it, and read there by users of their own.
chmod 700 secrets

password() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
keep() {
    [ -s "secrets/$1" ] || printf '%s' "$2" >"secrets/$1"
    chmod 644 "secrets/$1"
}

keep postgres "$(password)"
keep redis "$(password)"
keep grafana "$(password)"
keep database_url "postgres://fencepost:$(cat secrets/postgres)@postgres/fencepost"
keep redis_url "redis://:$(cat secrets/redis)@redis"
echo "passwords are in ops/secrets/"
