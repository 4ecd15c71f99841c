"""A Fencepost worker that uses only Python's standard library. See docs/worker-guide.md."""

import http.client
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
import uuid

URL = os.environ.get("FENCEPOST_URL", "http://127.0.0.1:7070")
KEY = os.environ["FENCEPOST_KEY"]
LEASE_SECONDS = int(os.environ.get("FENCEPOST_LEASE_SECONDS", "30"))
GRACE_SECONDS = 25
NAME = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"

stopping = threading.Event()  # SIGTERM or SIGINT: take no more jobs
grace_over = threading.Event()  # release running jobs


class Cancelled(Exception):
    """The job was cancelled, or its lease is lost."""


class Released(Exception):
    """The grace period has ended: the job is released."""


def call(path, body):
    """Retries transient errors (network, 408, 429, 5xx) after a pause; raises on other 4xx."""
    request = urllib.request.Request(
        f"{URL}/v1/workers/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    pause = 0.5
    while True:
        try:
            with urllib.request.urlopen(request, timeout=40) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(pause)
        pause = min(pause * 2, 10)


def handle(job, stop):
    """Your work. Call `stop` regularly: it raises when the job must stop."""
    payload = job["payload"] or {}
    for _ in range(int(payload.get("sleep_seconds", 0) * 20)):
        stop()
        time.sleep(0.05)
    if payload.get("fail"):
        raise ValueError("asked to fail")
    return {"greeting": f"Hello, {payload.get('name', 'world')}!"}


def wanted():
    return {
        "queues": ["default"],
        "job_types": ["greet"],
        "lease_seconds": LEASE_SECONDS,
        # A short wait, so that SIGTERM takes effect soon. A repeat with the same poll_id gets the
        # same jobs.
        "wait_seconds": 2,
        "poll_id": str(uuid.uuid4()),
    }


def work(job):
    """Works on a job. Returns the jobs that come with the answer to its ack."""
    fence = {
        "job_id": job["id"],
        "worker_id": NAME,
        "attempt": job["attempt"],
        "lease_id": job["lease_id"],
    }
    done, cancelled, lost = threading.Event(), threading.Event(), threading.Event()

    def beat():
        while not done.wait(job["heartbeat_interval_seconds"]):
            try:
                if call("heartbeat", fence)["status"] == "cancel":
                    cancelled.set()
            except urllib.error.HTTPError:  # 409: this worker no longer holds the job
                lost.set()
                return

    def stop():
        if cancelled.is_set() or lost.is_set():
            raise Cancelled("the job was cancelled")
        if grace_over.is_set():
            raise Released

    threading.Thread(target=beat, daemon=True).start()
    try:
        ack = {"status": "succeeded", "result": handle(job, stop)}
    except Released:
        ack = {"status": "released"}
    except Exception as error:
        ack = {"status": "failed", "error": {"type": type(error).__name__, "message": str(error)}}
    done.set()
    if lost.is_set():
        return []
    then = {} if stopping.is_set() else {"then_poll": wanted()}
    try:
        reply = call("ack", {**fence, **ack, **then})
    except urllib.error.HTTPError as refused:  # 409: this worker no longer holds the job
        print(job["id"], refused.read().decode(), flush=True)
        return []
    return reply.get("poll", {}).get("jobs", [])


def stop(*_):
    if not stopping.is_set():
        stopping.set()
        timer = threading.Timer(GRACE_SECONDS, grace_over.set)
        timer.daemon = True
        timer.start()


def poll_and_work():
    jobs = []
    while jobs or not stopping.is_set():
        if not jobs:
            jobs = call("poll", {"worker_id": NAME, **wanted()})["jobs"]
        if jobs:
            jobs += work(jobs.pop(0))


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
registration = {"worker_id": NAME, "queues": ["default"], "job_types": ["greet"], "concurrency": 1}
# After three times that without a call its job returns, without a failure.
call("register", {**registration, "beat_seconds": max(5, LEASE_SECONDS // 3)})
print("ready", flush=True)
# Python runs signal handlers in the main thread, so the work runs in another one.
working = threading.Thread(target=poll_and_work)
working.start()
while working.is_alive():
    working.join(0.2)
call("deregister", {"worker_id": NAME})
