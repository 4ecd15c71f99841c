#!/usr/bin/env bash
# A Fencepost worker that uses only bash, curl and jq. See docs/worker-guide.md.
# (`fencepost worker --exec` does all of this for any command.)
set -uo pipefail

url=${FENCEPOST_URL:-http://127.0.0.1:7070}
key=${FENCEPOST_KEY:?}
lease_seconds=${FENCEPOST_LEASE_SECONDS:-30}
grace_seconds=25
name="bash-$$-$RANDOM"
stopping=
running=
dir=$(mktemp -d)
# On a command line, other users of this machine could read the key.
(umask 077; printf 'Authorization: Bearer %s\n' "$key" >"$dir/header")
# A subshell that is stopped right after its start runs this trap, too.
trap '[ "$BASHPID" != "$$" ] || rm -rf "$dir"' EXIT

# Retries transient errors (network, 408, 429, 5xx) after a pause; fails on other 4xx.
call() {
    local path=$1 body=$2 pause=1 reply status
    while :; do
        reply=$(curl -sS -m 40 -w '\n%{http_code}' "$url/v1/workers/$path" -H @"$dir/header" \
            -H 'Content-Type: application/json' -d "$body" 2>/dev/null)
        status=${reply##*$'\n'}
        case $status in
            2*) printf '%s' "${reply%$'\n'*}"; return 0 ;;
            408 | 429) ;;
            4*) printf '%s' "${reply%$'\n'*}" >&2; return 1 ;;
        esac
        sleep "$pause"
        pause=$((pause < 8 ? pause * 2 : 10))
    done
}

# Your work. Reads the payload from standard input and writes the result to standard output.
handle() {
    local payload
    payload=$(cat)
    sleep "$(jq -r '.sleep_seconds? // 0' <<<"$payload")"
    if [ "$(jq -r '.fail? // false' <<<"$payload")" = true ]; then
        echo 'asked to fail' >&2
        return 1
    fi
    jq -c '{greeting: "Hello, \(.name? // "world")!"}' <<<"$payload"
}

# Sends heartbeats until it is stopped. When the job must stop, writes the reason to a file and
# stops the job.
beat() {
    local fence=$1 interval=$2 pid=$3
    while sleep "$interval"; do
        if ! reply=$(call heartbeat "$fence" 2>/dev/null); then
            echo lost >"$dir/stopped" # 409: this worker no longer holds the job
        elif [ "$(jq -r .status <<<"$reply")" = cancel ]; then
            echo cancelled >"$dir/stopped"
        else
            continue
        fi
        kill -TERM -- "-$pid" 2>/dev/null
        return
    done
}

# What a poll asks for.
wanted() {
    # A short wait, so that SIGTERM takes effect soon. A repeat with the same poll_id gets the same
    # jobs.
    jq -nc --argjson lease "$lease_seconds" --arg id "$(cat /proc/sys/kernel/random/uuid)" \
        '{queues: ["default"], job_types: ["greet"], lease_seconds: $lease, wait_seconds: 2,
          poll_id: $id}'
}

# Works on a job. Leaves the jobs that come with the answer to its ack in `jobs`.
work() {
    local job=$1 fence pid beating watching status ack
    fence=$(jq -c --arg name "$name" '{job_id: .id, worker_id: $name, attempt, lease_id}' <<<"$job")
    rm -f "$dir/stopped"
    # The job gets its own process group, so that all of its processes can be stopped.
    set -m
    handle <<<"$(jq -c .payload <<<"$job")" >"$dir/out" 2>"$dir/err" &
    pid=$! running=$!
    beat "$fence" "$(jq -r .heartbeat_interval_seconds <<<"$job")" "$pid" &
    beating=$!
    set +m
    # A signal interrupts `wait`.
    while :; do
        wait "$pid"
        status=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    running=
    # It may still hold this shell's traps, which catch every signal but KILL.
    kill -KILL -- "-$beating" 2>/dev/null
    wait "$beating" 2>/dev/null
    case $(cat "$dir/stopped" 2>/dev/null) in
        lost) return ;;
        released) ack='{"status": "released"}' ;;
        *) if [ "$status" = 0 ]; then
            ack=$(jq -c '{status: "succeeded", result: .}' "$dir/out")
        else
            ack=$(jq -Rsc --arg type "exit.$status" '{status: "failed", error: {type: $type, message: .}}' "$dir/err")
        fi ;;
    esac
    [ -n "$stopping" ] || ack=$(jq -c --argjson poll "$(wanted)" '. + {then_poll: $poll}' <<<"$ack")
    # 409: this worker no longer holds the job.
    reply=$(call ack "$(jq -c --argjson ack "$ack" '. + $ack' <<<"$fence")") || { echo; return; }
    jobs=$(jq -c '.poll.jobs // [] | .[]' <<<"$reply")
}

# Takes no more jobs. After the grace period, releases the running job.
stop() {
    [ -z "$stopping" ] || return
    stopping=yes
    [ -z "$running" ] || (
        sleep "$grace_seconds"
        kill -0 "$running" 2>/dev/null && echo released >"$dir/stopped" && kill -TERM -- "-$running"
    ) >/dev/null 2>&1 &
}
trap stop TERM INT

# After three times `beat_seconds` without a call its job returns, without a failure.
registration=$(jq -nc --arg name "$name" --argjson beat "$((lease_seconds / 3 > 5 ? lease_seconds / 3 : 5))" \
    '{worker_id: $name, queues: ["default"], job_types: ["greet"], concurrency: 1,
      beat_seconds: $beat}')
call register "$registration" >/dev/null || exit 1
echo ready
jobs=
# A poll of one job: there is at most one.
while [ -n "$jobs" ] || [ -z "$stopping" ]; do
    if [ -n "$jobs" ]; then
        job=$jobs jobs=
        work "$job"
        continue
    fi
    # Ctrl-C also ends the call.
    reply=$(call poll "$(jq -c --arg name "$name" '. + {worker_id: $name}' <<<"$(wanted)")") ||
        { [ -n "$stopping" ] && break; exit 1; }
    jobs=$(jq -c '.jobs[]' <<<"$reply")
done
call deregister "$(jq -nc --arg name "$name" '{worker_id: $name}')" >/dev/null
exit 0
