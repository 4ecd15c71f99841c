#!/bin/sh
# Runs the configurations of ops/patroni with other addresses, folders and passwords: three members
# of etcd and of PostgreSQL, and HAProxy, all on this machine. Then kills the leader under load: no
# accepted job may be lost, and jobs must be accepted again within 30 s. As root, it then restores
# the cluster to a moment. Requires target/debug/fencepost.
set -eu
cd "$(dirname "$0")/.."
sh scripts/setup.sh patroni

PROGRAM=$PWD/target/debug/fencepost
# A member's number is the last digit of each of its ports.
ETCD=2917 PEER=2918 REST=2919 POSTGRES=2920
PROXY=29100 API=29101 METRICS=29102
MAX_WAIT_SECONDS=120

dir=$(mktemp -d /tmp/fencepost-rehearsal-XXXXXX)
as_postgres=
if [ "$(id -u)" = 0 ]; then
    chown postgres: "$dir"
    as_postgres="setpriv --reuid=postgres --regid=postgres --init-groups --"
    install -d -o postgres -g postgres /var/run/postgresql
fi
bin=$(ls -d /usr/lib/postgresql/*/bin | sort -V | tail -n 1)

kill_member() {
    kill -9 "$(cat "$dir/patroni-$1.pid" 2>/dev/null)" 2>/dev/null || true
    kill -9 "$(head -n 1 "$dir/data-$1/postmaster.pid" 2>/dev/null)" 2>/dev/null || true
}
stop() {
    for member in 1 2 3; do
        kill_member $member
        kill -9 "$(cat "$dir/etcd-$member.pid" 2>/dev/null)" 2>/dev/null || true
    done
    for name in haproxy node; do kill -9 "$(cat "$dir/$name.pid" 2>/dev/null)" 2>/dev/null || true; done
    [ -n "${keep:-}" ] && echo "rehearsal: logs are in $dir" || rm -rf "$dir"
}
trap stop EXIT
trap 'exit 1' INT TERM

# Until a command succeeds.
await() {
    for _ in $(seq $MAX_WAIT_SECONDS); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 1
    done
    echo "rehearsal: in vain for $MAX_WAIT_SECONDS s: $*" >&2
    keep=1
    exit 1
}
# A file of ops/patroni with the addresses of this machine.
here() {
    sed -e "s/10\.0\.0\.\([123]\):5432 check port 8008/127.0.0.1:$POSTGRES\1 check port $REST\1/" \
        -e "s/,http:\/\/127\.0\.0\.1:2379//" \
        -e "s/10\.0\.0\.\([123]\):2379/127.0.0.1:$ETCD\1/g" \
        -e "s/10\.0\.0\.\([123]\):2380/127.0.0.1:$PEER\1/g" \
        -e "s/10\.0\.0\.\([123]\):8008/127.0.0.1:$REST\1/g" \
        -e "s/10\.0\.0\.\([123]\):5432/127.0.0.1:$POSTGRES\1/g" \
        -e "s/127\.0\.0\.1:5432/127.0.0.1:$PROXY/" "ops/patroni/$1"
}
# The same of one member: the files have the first one.
of_member() {
    here "$1" | sed -e "/INITIAL_CLUSTER=/!{/HOSTS=/!s/\(127\.0\.0\.1:29[0-9]*\)1\b/\1$2/g}" \
        -e "/INITIAL_CLUSTER=/!s/=db1\$/=db$2/" -e "s/_PASSWORD=\$/_PASSWORD=rehearsal/" \
        -e "s|/var/lib/etcd/fencepost|$dir/etcd-$2|" \
        -e "s|/var/lib/postgresql/fencepost|$dir/data-$2|" \
        -e "s|/usr/lib/postgresql/15/bin|$bin|" -e "s/# \(archive_\)/\1/" \
        -e "s|/usr/local/lib/fencepost/backup.sh|$dir/backup.sh|" -e "s|/archive\$|$dir/archive|" \
        -e "s|/etc/fencepost-postgres/restore|$dir/restore|"
}
# start NAME VARIABLES COMMAND…, with its log and its process id in the folder
start() {
    name=$1 variables=$2
    shift 2
    # A service's user has a home, in which Patroni keeps passwords.
    mkdir -p "$dir/home-$name"
    [ -z "$as_postgres" ] || chown postgres: "$dir/home-$name"
    (
        export HOME="$dir/home-$name"
        set -a
        [ -z "$variables" ] || . "$variables"
        set +a
        exec $as_postgres "$@"
    ) >"$dir/$name.log" 2>&1 &
    echo $! >"$dir/$name.pid"
}
has_ended() { ! kill -0 "$1" 2>/dev/null; }
leads() { curl -fsS "http://127.0.0.1:$REST$1/primary"; }
leader() {
    for member in 1 2 3; do
        if leads $member >/dev/null 2>&1; then echo $member; fi
    done
}
is_whole() {
    curl -fsS "http://127.0.0.1:$REST$(leader)/cluster" |
        python3 -c 'import json, sys
members = json.load(sys.stdin)["members"]
run = [it["role"] for it in members if it["state"] in ("running", "streaming")]
sys.exit(len(run) < 3 or "sync_standby" not in run)'
}

cp ops/backup.sh "$dir"
$as_postgres sh "$dir/backup.sh" init "$dir/archive"
for member in 1 2 3; do
    of_member etcd.env $member >"$dir/etcd-$member.env"
    of_member member.env $member >"$dir/member-$member.env"
    of_member patroni.yml $member >"$dir/patroni-$member.yml"
    start etcd-$member "$dir/etcd-$member.env" etcd
done
await curl -fsS "http://127.0.0.1:${ETCD}1/health"
for member in 1 2 3; do
    start patroni-$member "$dir/member-$member.env" patroni "$dir/patroni-$member.yml"
done
here haproxy.cfg >"$dir/haproxy.cfg"
start haproxy "" haproxy -db -f "$dir/haproxy.cfg"
await is_whole
(
    set -a
    . "$dir/member-1.env"
    patronictl --config-file "$dir/patroni-1.yml" list
) | grep -q "Sync Standby"

admin() { PGPASSWORD=rehearsal psql -qtA -v ON_ERROR_STOP=1 -h 127.0.0.1 -p $PROXY -U postgres "$@"; }
await admin -c "select 1"
admin -c "create role owner login createrole password 'rehearsal'" -c "create database fencepost owner owner"
admin -c "grant pg_read_all_stats, pg_monitor to owner with admin option"
admin -c "grant pg_signal_backend to owner"
install -d -m 700 "$dir/roles"
for role in hot console people maint; do openssl rand -hex 24 >"$dir/roles/$role"; done
owner=postgres://owner:rehearsal@127.0.0.1:$PROXY/fencepost
"$PROGRAM" migrate --database-url "$owner" --database-roles "$dir/roles" >"$dir/migrate.log"
start_node() {
    "$PROGRAM" serve --database-url "postgres://127.0.0.1:$PROXY/fencepost" \
        --database-roles "$dir/roles" --listen 127.0.0.1:$API --metrics-listen 127.0.0.1:$METRICS \
        >"$dir/node.log" 2>&1 &
    echo $! >"$dir/node.pid"
    await curl -fsS "http://127.0.0.1:$API/readyz"
}
start_node
key=$("$PROGRAM" keys create --new-project rehearsal --database-url "$owner" | grep -o 'fp_[a-z]*_[A-Za-z0-9]*' | head -n 1)

member=$(leader)
cat >"$dir/kill-leader" <<END
kill -9 $(cat "$dir/patroni-$member.pid") $(head -n 1 "$dir/data-$member/postmaster.pid")
END
keep=1
FENCEPOST_URL=http://127.0.0.1:$API FENCEPOST_KEY=$key \
    python3 ops/patroni/rehearse.py --kill "sh $dir/kill-leader"
start patroni-$member "$dir/member-$member.env" patroni "$dir/patroni-$member.yml"
await is_whole
"$PROGRAM" doctor --database-url "$owner" | grep -q "standbys .* confirm each commit"
echo "rehearsal: the killed member is a standby again"

if [ -z "$as_postgres" ]; then
    keep=
    echo "rehearsal: a restore needs root"
    exit
fi
enqueue() {
    curl -fsS -H "Authorization: Bearer $key" -H "Content-Type: application/json" \
        -d "{\"job_type\": \"$1\"}" "http://127.0.0.1:$API/v1/jobs" >/dev/null
}
$as_postgres env PGHOST=/var/run/postgresql "PGPORT=$POSTGRES$(leader)" sh "$dir/backup.sh" \
    copy "$dir/archive"
enqueue kept
# The copy must be of an earlier second.
sleep 2
moment=$(admin -c "select now()")
enqueue undone
last=$(admin -c "select pg_walfile_name(pg_switch_wal())")
await test -e "$dir/archive/wal/$last.gz"
kill "$(cat "$dir/node.pid")"
for member in 1 2 3; do kill "$(cat "$dir/patroni-$member.pid")"; done
for member in 1 2 3; do
    # Patroni holds its port until it has ended, which is after its PostgreSQL.
    await has_ended "$(cat "$dir/patroni-$member.pid")"
    await test ! -e "$dir/data-$member/postmaster.pid"
    mv "$dir/data-$member" "$dir/before-$member"
done
(
    set -a
    . "$dir/member-1.env"
    printf 'fencepost\nYes I am aware\n' |
        patronictl --config-file "$dir/patroni-1.yml" remove fencepost
)
echo "exec sh $dir/backup.sh restore $dir/archive $dir/data-1 '$moment'" >"$dir/restore"
sed -i 's/^bootstrap:/&\n  method: archive/' "$dir/patroni-1.yml"
start patroni-1 "$dir/member-1.env" patroni "$dir/patroni-1.yml"
await leads 1
for member in 2 3; do
    start patroni-$member "$dir/member-$member.env" patroni "$dir/patroni-$member.yml"
done
await is_whole
start_node
jobs=$(admin -d fencepost -c \
    "select string_agg(job_type, ' ') from jobs where job_type in ('kept', 'undone')")
[ "$jobs" = kept ] || {
    echo "rehearsal: after the restore there are the jobs: $jobs" >&2
    exit 1
}
keep=
echo "rehearsal: the cluster is as it was at $moment"
