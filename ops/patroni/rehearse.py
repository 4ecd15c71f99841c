#!/usr/bin/env python3
"""Enqueues jobs without a pause while you kill the database's leader, and counts what was lost.

  FENCEPOST_URL=… FENCEPOST_KEY=… rehearse.py [--kill COMMAND]

After ten seconds it runs COMMAND, which kills the leader; without one it asks you to do so. It ends
once jobs are accepted again. Each job that was accepted must exist afterwards, and the longest time
without an accepted job must stay below --bound. It needs nothing but Python.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

QUEUE = "rehearsal"
# Before the kill.
QUIET_SECONDS = 10
# Jobs must have been accepted for as long again, once the kill was felt.
STEADY_SECONDS = 10
FELT_SECONDS = 1
# A kill that is not felt for as long has hit nothing.
UNFELT_SECONDS = 120
MAX_SECONDS = 300
CALL_TIMEOUT_SECONDS = 5
# Below the rate of the smallest plan.
PAUSE_SECONDS = 0.1


class Api:
    def __init__(self, url, key):
        self.url, self.key = url.rstrip("/"), key

    def call(self, method, path, body=None):
        """The status and the answer; None while there is no answer, or the server cannot give one."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_SECONDS) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 429 or error.code >= 500:
                return None
            return error.code, error.read().decode()
        except (OSError, ValueError):
            return None

    def enqueue(self, number):
        """The id of the job that was accepted, or None."""
        job = {"queue": QUEUE, "job_type": "rehearsal", "payload": {"number": number}}
        answer = self.call("POST", "/v1/jobs", job)
        if answer and answer[0] >= 300:
            sys.exit(f"the job is refused: {answer}")
        return answer and answer[1]["id"]

    def lost_of(self, accepted):
        """Jobs of these that are not stored. The newest are listed first."""
        lost, cursor = set(accepted), ""
        while lost:
            page = f"/v1/jobs?queue={QUEUE}&payloads=false&limit=200{cursor}"
            while (answer := self.call("GET", page)) is None:
                time.sleep(PAUSE_SECONDS)
            if answer[0] != 200:
                sys.exit(f"the jobs cannot be listed: {answer}")
            lost -= {job["id"] for job in answer[1]["jobs"]}
            if not answer[1].get("next_cursor"):
                break
            cursor = "&cursor=" + answer[1]["next_cursor"]
        return sorted(lost)


def kill_leader(command):
    if not command:
        print("kill the leader now", flush=True)
        return
    print("killing the leader", flush=True)
    status = subprocess.run(command, shell=True).returncode
    if status != 0:
        sys.exit(f"the command ended with {status}")


def rehearse(api, command):
    """The ids of accepted jobs, and the longest time between two of them after the kill."""
    accepted, longest = [], 0.0
    began = last = time.monotonic()
    killed_at = steady_since = None
    while True:
        time.sleep(PAUSE_SECONDS)
        job = api.enqueue(len(accepted))
        now = time.monotonic()
        if now - began > MAX_SECONDS:
            sys.exit(f"{len(accepted)} jobs were accepted, the last one {now - last:.0f} s ago")
        if job is None:
            steady_since = None
            continue
        accepted.append(job)
        longest, last = max(longest, now - last), now
        steady_since = steady_since or now
        if killed_at is None and now - began >= QUIET_SECONDS:
            kill_leader(command)
            killed_at, longest = now, 0.0
            steady_since = last = time.monotonic()
        elif killed_at is None:
            continue
        elif longest >= FELT_SECONDS and now - steady_since >= STEADY_SECONDS:
            return accepted, longest
        elif longest < FELT_SECONDS and now - killed_at >= UNFELT_SECONDS:
            sys.exit(f"no pause was felt for {UNFELT_SECONDS} s: was the leader killed?")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kill", help="a command that kills the leader")
    parser.add_argument("--bound", type=float, default=30, help="seconds without a job, at most")
    args = parser.parse_args()
    api = Api(os.environ["FENCEPOST_URL"], os.environ["FENCEPOST_KEY"])
    accepted, longest = rehearse(api, args.kill)
    lost = api.lost_of(accepted)
    print(f"{len(accepted)} jobs were accepted, {len(lost)} of them are lost")
    print(f"for {longest:.1f} s no job was accepted; the bound is {args.bound:g} s")
    if lost:
        sys.exit("lost: " + " ".join(lost[:10]))
    if longest > args.bound:
        sys.exit("the failover took too long")


if __name__ == "__main__":
    main()
