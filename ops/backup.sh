#!/bin/sh
# Keeps what a restore of PostgreSQL to any moment of a week needs: a copy of each day, and the WAL
# since the oldest of them. Run it where PostgreSQL runs, as its user. It needs gzip, tar, and
# programs that come with PostgreSQL, and connects as libpq's variables say (PGHOST, PGUSER).
#   backup.sh store FILE NAME ARCHIVE          archive_command = 'sh backup.sh store %p %f ARCHIVE'
#   backup.sh copy ARCHIVE                     makes a copy, and deletes what is too old
#   backup.sh daily ARCHIVE                    the same each day, until it is stopped
#   backup.sh restore ARCHIVE FOLDER [TIME]    makes an empty folder one from which PostgreSQL starts
#                                              as it was at that time ('2026-11-02 10:04:00+00'), or
#                                              at the end of the archive
set -eu

KEPT_COPIES=7
COPY_EVERY_MINUTES=1440
LOOK_SECONDS=300

say() { printf 'backup: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}
# As names of copies: text in the order of time.
moment() { date --utc --date="$1" +%Y%m%dT%H%M%SZ; }
copies() { ls "$1/copies" 2>/dev/null | grep 'Z$' | sort; }

# PostgreSQL deletes a file once this succeeds, so it is on disk then. It may be sent again.
store() {
    to=$3/wal/$2.gz
    mkdir -p "$3/wal"
    if [ -e "$to" ]; then
        gzip -dc "$to" | cmp -s - "$1" && return
        fail "$to is of another server"
    fi
    gzip -1 -c "$1" >"$to.part"
    sync "$to.part"
    mv "$to.part" "$to"
    sync "$3/wal"
}

# Each copy is named by its end: a restore can reach any later moment from it.
copy() {
    rm -rf "$1"/copies/*.part
    mkdir -p "$1/copies"
    part=$1/copies/$(moment now).part
    pg_basebackup --pgdata="$part" --format=tar --gzip --checkpoint=fast --wal-method=stream
    sync
    made=$(moment now)
    mv "$part" "$1/copies/$made"
    copies "$1" | head -n "-$KEPT_COPIES" | while read -r old; do rm -rf "$1/copies/${old:?}"; done
    oldest=$(copies "$1" | head -n 1)
    first=$(tar -xzOf "$1/copies/$oldest/base.tar.gz" backup_label |
        sed -n 's/^START WAL LOCATION: .*(file \(.*\))$/\1/p')
    pg_archivecleanup -x .gz "$1/wal" "$first"
    say "made the copy $made; the oldest is $oldest, which needs WAL from $first on"
}

daily() {
    pause=
    trap '[ -z "$pause" ] || kill "$pause"; exit 0' TERM INT
    while :; do
        [ -n "$(find "$1/copies" -name '*Z' -mmin "-$COPY_EVERY_MINUTES" 2>/dev/null)" ] ||
            # A shell of its own: in this one, `||` would let a failed copy go on.
            sh "$0" copy "$1" || say "no copy was made, the next try is in $LOOK_SECONDS s"
        sleep "$LOOK_SECONDS" &
        pause=$!
        wait "$pause"
    done
}

restore() {
    [ -z "$(ls -A "$2" 2>/dev/null)" ] || fail "$2 is not empty"
    until=$(moment "${3:-now}")
    from=$(copies "$1" | awk -v until="$until" '$1 < until' | tail -n 1)
    [ -n "$from" ] || fail "no copy is older than $until"
    mkdir -p "$2"
    chmod 700 "$2"
    tar -xzf "$1/copies/$from/base.tar.gz" -C "$2"
    tar -xzf "$1/copies/$from/pg_wal.tar.gz" -C "$2/pg_wal"
    {
        echo "restore_command = 'gzip -dc \"$1/wal/%f.gz\" > \"%p\"'"
        [ -z "${3:-}" ] || echo "recovery_target_time = '$3'"
        echo "recovery_target_action = 'promote'"
        # A restore that is only a test must not write into the archive.
        echo "archive_mode = off"
    } >>"$2/postgresql.auto.conf"
    touch "$2/recovery.signal"
    say "made $2 from the copy $from; PostgreSQL starts on it with archive_mode = off"
}

case "${1:-} $#" in
"store 4" | "copy 2" | "daily 2" | "restore 3" | "restore 4") "$@" ;;
*) fail "unknown: $*; the head of this file lists what there is" ;;
esac
