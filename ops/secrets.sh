#!/bin/sh
# Generates the passwords that docker-compose.yml reads, in ops/secrets/. Keeps existing files.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
# On this machine only the owner can enter the directory. Each file is mounted into the containers
# that need it, where other users must be able to read it.
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
keep master_key "$(head -c 32 /dev/urandom | base64)"
keep role_hot "$(password)"
keep role_console "$(password)"
keep role_people "$(password)"
keep role_maint "$(password)"
keep redis_url "redis://:$(cat secrets/redis)@redis"
echo "passwords are in ops/secrets/"
