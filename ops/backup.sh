#!/bin/sh
# Keeps what a restore of PostgreSQL to any moment of the last week needs: a copy of each day, and
# the WAL since the oldest of them. Run it where PostgreSQL runs, as its user. It needs gzip, tar,
# flock, and programs that come with PostgreSQL, and connects as libpq's variables say (PGHOST,
# PGUSER).
#   backup.sh init ARCHIVE              makes the folders of an archive, once
#   backup.sh store FILE NAME ARCHIVE   archive_command = 'sh backup.sh store %p %f ARCHIVE'
#   backup.sh copy ARCHIVE              makes a copy, and deletes what is too old
#   backup.sh daily ARCHIVE             the same each day and after a restore, until it is stopped
#   backup.sh set-aside FOLDER          moves a stopped PostgreSQL's files into FOLDER/before
#   backup.sh restore ARCHIVE FOLDER [TIME [TIMELINE]]
#       makes an empty folder one from which PostgreSQL starts as it was at that time ('2026-11-02
#       10:04:00+00') of the timeline of the copy before it, or of another one; without a time, as
#       it was at the end of the archive
#   backup.sh rehearse ARCHIVE FOLDER [TIME [TIMELINE]]
#       the same for a test: that PostgreSQL does not write into the archive
set -eu

KEPT_DAYS=7
COPY_EVERY_MINUTES=1440
LOOK_SECONDS=300
# A copy is made when this much of the size of the last one is free.
FREE_PERCENT=120

say() { printf 'backup: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}
# As names of copies: text in the order of time.
moment() { date --utc --date="$1" +%Y%m%dT%H%M%SZ; }
copies() { ls "$1/copies" | grep 'Z$' | sort; }
timeline_of() { sed -n 's/^START TIMELINE: //p' "$1/label"; }

init() { mkdir -p "$1/wal" "$1/copies"; }

# A missing mount must not look like an empty archive.
need_archive() {
    [ -d "$1/wal" ] && [ -d "$1/copies" ] ||
        fail "$1 is no archive: is it mounted? \`init\` makes a new one"
}

# PostgreSQL deletes a file once this succeeds, so it is on disk then. It may be sent again.
store() {
    need_archive "$3"
    to=$3/wal/$2.gz
    if [ -e "$to" ]; then
        gzip -dc "$to" | cmp -s - "$1" ||
            fail "$to is of another server: move the archive away, and make a new one"
    else
        gzip -1 -c "$1" >"$to.part"
        sync "$to.part"
        mv "$to.part" "$to"
    fi
    sync "$to" "$3/wal"
}

# Each copy is named by its end: a restore can reach any later moment from it.
copy() {
    need_archive "$1"
    exec 9>"$1/lock"
    flock -n 9 || fail "another copy is being made"
    rm -rf "$1"/copies/*.part
    last=$(copies "$1" | tail -n 1)
    if [ -n "$last" ]; then
        size=$(du -sk "$1/copies/$last" | cut -f1)
        free=$(df -Pk "$1" | awk 'NR == 2 { print $4 }')
        [ "$free" -gt $((size * FREE_PERCENT / 100)) ] ||
            fail "$free KiB are free, too few for another copy like the last one of $size KiB"
    fi
    part=$1/copies/$(moment now).part
    pg_basebackup --pgdata="$part" --format=tar --gzip --checkpoint=fast --wal-method=stream
    tar --occurrence=1 -xzOf "$part/base.tar.gz" backup_label >"$part/label"
    sync
    made=$(moment now)
    mv "$part" "$1/copies/$made"
    say "made the copy $made"
    prune "$1"
}

# Keeps the newest copy that is older than a week, and all later ones with their WAL. Files of WAL
# are compared without their timeline: a copy of an earlier one may begin later.
prune() {
    week_ago=$(moment "$KEPT_DAYS days ago")
    oldest=$(copies "$1" | awk -v than="$week_ago" '$1 < than' | tail -n 1)
    for copy in $(copies "$1" | awk -v than="$oldest" '$1 < than'); do
        rm -rf "$1/copies/${copy:?}"
    done
    first=$(sed -n 's/^START WAL LOCATION: .*(file \(.*\))$/\1/p' "$1"/copies/*Z/label |
        sort -k1.9 | head -n 1)
    pg_archivecleanup -x .gz "$1/wal" "$first"
}

# A copy of another timeline is from before a restore.
is_due() {
    [ -n "$(find "$1/copies" -name '*Z' -mmin "-$COPY_EVERY_MINUTES")" ] || return 0
    last=$(timeline_of "$1/copies/$(copies "$1" | tail -n 1)")
    [ "$last" != "$(psql -XAtc 'select timeline_id from pg_control_checkpoint()' postgres)" ]
}

daily() {
    pause=
    trap '[ -z "$pause" ] || kill "$pause" || :; exit 0' TERM INT
    while :; do
        # A shell of its own: in this one, `||` would let a failed copy go on.
        ! is_due "$1" || sh "$0" copy "$1" || say "that failed; the next try is in $LOOK_SECONDS s"
        sleep "$LOOK_SECONDS" &
        pause=$!
        wait "$pause"
        pause=
    done
}

set_aside() {
    [ ! -e "$1/postmaster.pid" ] || fail "$1/postmaster.pid is there: stop PostgreSQL"
    mkdir "$1/before"
    find "$1" -mindepth 1 -maxdepth 1 ! -name before -exec mv {} "$1/before/" \;
}

restore() {
    need_archive "$1"
    archive=$(cd "$1" && pwd)
    [ -z "$(ls -A "$2" 2>/dev/null | grep -vx before)" ] || fail "$2 is not empty"
    until=$(moment "${3:-now}")
    from=
    for copy in $(copies "$1" | awk -v than="$until" '$1 < than'); do
        [ "$(timeline_of "$1/copies/$copy")" -gt "${4:-99999999}" ] || from=$copy
    done
    [ -n "$from" ] || fail "no copy is older than $until"
    mkdir -p "$2"
    chmod 700 "$2"
    tar -xzf "$1/copies/$from/base.tar.gz" -C "$2"
    tar -xzf "$1/copies/$from/pg_wal.tar.gz" -C "$2/pg_wal"
    time= timeline=latest
    if [ -n "${3:-}" ]; then
        time=$(date --utc --date="$3" '+%Y-%m-%d %H:%M:%S.%6N+00')
        # A later timeline may have begun before this time, by an earlier restore.
        timeline=${4:-current}
    fi
    # The copy may have other values, of an earlier restore: the last ones count.
    cat >>"$2/postgresql.auto.conf" <<END
restore_command = 'gzip -dc "$archive/wal/%f.gz" > "%p"'
recovery_target_time = '$time'
recovery_target_timeline = '$timeline'
recovery_target_action = 'promote'
END
    touch "$2/recovery.signal"
    say "made $2 from the copy $from"
}

rehearse() {
    restore "$@"
    echo 'archive_mode = off' >>"$2/postgresql.auto.conf"
}

case "${1:-} $#" in
"init 2" | "store 4" | "copy 2" | "daily 2" | "restore 3" | "restore 4" | "restore 5" | \
"rehearse 3" | "rehearse 4" | "rehearse 5") "$@" ;;
"set-aside 2") set_aside "$2" ;;
*) fail "unknown: $*; the head of this file lists what there is" ;;
esac
