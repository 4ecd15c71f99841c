"""A worker and a producer that use the published client of Zeridion Flare. The native API derives
from its protocol.

    pip install zeridion-flare==0.2.0
    FLARE_URL=http://127.0.0.1:7070/v1 FLARE_API_KEY=fp_live_… python3 flare.py

Registers with a schedule, enqueues, runs, fails and retries jobs, sends heartbeats, and prints one
line per result.
"""
import os
import threading
import time

from zeridion_flare import AuthError, ConflictError, FlareClient, FlareError, NotFoundError
from zeridion_flare.worker import FlareWorker

URL = os.environ["FLARE_URL"]
client = FlareClient(base_url=URL)
worker = FlareWorker(base_url=URL, concurrency=4, poll_interval_s=0.05, heartbeat_interval_s=0.2)
ticked, began = threading.Event(), threading.Event()


@worker.job("mail.send", queue="mail", timeout=60)
def send(payload, ctx):
    ctx.report_progress(0.5)
    time.sleep(0.5)
    print("sent", payload["to"], ctx.attempt, flush=True)


@worker.job("mail.fail", queue="mail", max_attempts=3)
def fail(payload, ctx):
    raise ValueError(f"attempt {ctx.attempt}")


@worker.job("mail.endless", queue="mail")
def endless(payload, ctx):
    began.set()
    while not ctx.cancellation.is_cancelled():
        time.sleep(0.02)
    raise RuntimeError("asked to stop")


@worker.recurring("Demo.Jobs.Tick", cron="* * * * * *", queue="mail")
def tick(ctx):
    ticked.set()


def ends(job_id, *states):
    """Waits until a job is in one of these states."""
    while True:
        job = client.get_job(job_id)
        if job["state"] in states:
            return job
        time.sleep(0.02)


def refusal(call, *arguments):
    try:
        call(*arguments)
    except FlareError as error:
        return f"{type(error).__name__} {error.code} {bool(error.request_id)}"
    return "not refused"


later = client.create_job({"job_type": "mail.send", "queue": "mail", "payload": {}, "run_at": "2027-01-01T00:00:00Z"})
print("scheduled", later["state"], client.cancel_job(later["id"])["state"], flush=True)
once = [client.create_job({"job_type": "mail.send", "queue": "mail", "payload": {"to": "ada"}}, idempotency_key="once") for _ in "ab"]
print("once", once[0]["id"] == once[1]["id"], flush=True)

worker.start()
done = ends(once[0]["id"], "succeeded")
print("succeeded", done["attempt"], flush=True)
retry = {"strategy": "constant", "initial_seconds": 0, "jitter_seconds": 0}
failing = client.create_job({"job_type": "mail.fail", "queue": "mail", "payload": {}, "max_attempts": 2, "retry": retry})
dead = ends(failing["id"], "dead_letter")
print("dead", dead["attempt"], dead["last_error"]["type"], dead["last_error"]["message"], flush=True)
print("again", client.retry_job(failing["id"])["state"] in ("pending", "processing"), flush=True)
print("kept", client.cancel_job(once[0]["id"]), flush=True)
stopped = client.create_job({"job_type": "mail.endless", "queue": "mail", "payload": {}, "timeout_seconds": 3})
began.wait()
client.cancel_job(stopped["id"])
print("stopped", ends(stopped["id"], "cancelled")["state"], flush=True)
ticked.wait()
print("ticked", flush=True)
page = client.list_jobs(queue="mail", limit=1)
print("listed", len(page["jobs"]), page["has_more"], page["cursor"] == page["next_cursor"], flush=True)
worker.stop(timeout=5)

print("missing", client.get_job("job_00000000000000000000000000"), flush=True)
print(refusal(client.heartbeat_worker, {"job_id": once[0]["id"], "worker_id": "w"}), flush=True)
print(refusal(client.ack_worker, {"job_id": "job_x", "worker_id": "w", "status": "succeeded"}), flush=True)
print(refusal(FlareClient(api_key="wrong", base_url=URL).list_jobs), flush=True)
print(refusal(client.create_job, {"job_type": ""}), flush=True)
assert {AuthError, ConflictError, NotFoundError} < set(FlareError.__subclasses__())
