#!/usr/bin/env python3
"""Generates a mixed load for a number of seconds, on the server of FENCEPOST_URL and FENCEPOST_KEY:
producers, recurring schedules, and workers. Some workers fail jobs, abandon them, or send wrong
fences. Halfway through, a queue without workers fills up."""

import json
import os
import random
import sys
import threading
import time
import urllib.error
import urllib.request

URL, KEY = os.environ["FENCEPOST_URL"], os.environ["FENCEPOST_KEY"]
TYPES = ["mail.send", "report.make", "image.scale"]


def call(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(URL + path, data, headers, method=method), timeout=40) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


def until(end, step):
    while time.time() < end:
        step()


def produce():
    queue = random.choice(["default", "mail"])
    call("POST", "/v1/jobs", {"job_type": random.choice(TYPES), "queue": queue, "max_attempts": 2,
                              "retry": {"strategy": "constant", "initial_seconds": 2, "jitter_seconds": 1}})
    time.sleep(random.uniform(0, 0.02))


def work(name):
    poll = {"worker_id": name, "queues": ["default", "mail"], "capacity": 5, "wait_seconds": 2, "lease_seconds": 5}
    for job in call("POST", "/v1/workers/poll", poll).get("jobs", []):
        time.sleep(random.uniform(0, 0.03))
        fence = {"job_id": job["id"], "worker_id": name, "attempt": job["attempt"], "lease_id": job["lease_id"]}
        luck = random.random()
        if luck < 0.005:
            continue  # No ack: the lease expires.
        if luck < 0.02:
            call("POST", "/v1/workers/heartbeat", fence | {"worker_id": "another-worker"})
        status = "failed" if luck > 0.93 else "released" if luck > 0.91 else "succeeded"
        call("POST", "/v1/workers/ack", fence | {"status": status})


def main():
    end = time.time() + float(sys.argv[1])
    for number in range(5):
        call("PUT", f"/v1/recurring/every-{number}", {"job_type": "tick", "cron_expression": "*/2 * * * * *"})
    steps = [produce] * 6 + [lambda name=f"worker-{number}": work(name) for number in range(10)]
    threads = [threading.Thread(target=until, args=(end, step)) for step in steps]
    for thread in threads:
        thread.start()
    time.sleep(max(0, end - time.time()) / 2)
    for _ in range(50):
        call("POST", "/v1/jobs", {"job_type": "lonely", "queue": "unattended"})
    for thread in threads:
        thread.join()


main()
