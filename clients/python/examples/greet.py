"""A worker that greets, and a producer: `greet.py`, `greet.py enqueue 10`."""

import os
import sys
import time

from fencepost import Client, Snooze, Worker

client = Client()
if sys.argv[1:2] == ["enqueue"]:
    patience = os.environ.get("RETRY_SECONDS")
    retry_seconds = None if patience is None else float(patience)
    for number in range(int(sys.argv[2])):
        client.enqueue("greet", {"name": f"number {number}"}, retry_seconds=retry_seconds)
    sys.exit()

if sys.argv[1:2] == ["many"]:
    stored = client.enqueue_many([{"job_type": "many"}] * int(sys.argv[2]))
    print(len(stored), len(list(client.items("/v1/jobs?q=type:many&limit=2"))))
    sys.exit()

worker = Worker(
    queues=["default"],
    concurrency=int(os.environ.get("CONCURRENCY", "1")),
    lease_seconds=int(os.environ.get("FENCEPOST_LEASE_SECONDS", "30")),
)


def in_steps(job, steps, hangs_at):
    ran = []

    def square(number):
        if number == hangs_at and job.attempt == 1:
            time.sleep(60)
        ran.append(number)
        return number * number

    squares = [job.step(f"square {it}", lambda: square(it)) for it in range(1, steps + 1)]
    return {"ran": ran, "sum": sum(squares)}


@worker.job("greet")
def greet(job):
    payload = job.payload or {}
    if "steps" in payload:
        return in_steps(job, payload["steps"], payload.get("hangs_at"))
    for _ in range(int(payload.get("sleep_seconds", 0) * 20)):
        job.check()
        time.sleep(0.05)
    for _ in range(payload.get("children", 0)):
        client.enqueue("child", {"of": "greet"})
    if "later" in payload and job.attempt == 1:
        raise Snooze(payload["later"])
    if payload.get("fail") or (payload.get("fails_first") and job.attempt == 1):
        raise ValueError("asked to fail")
    return {"greeting": f"Hello, {payload.get('name', 'world')}!"}


worker.run(on_ready=lambda: print("ready", flush=True))
