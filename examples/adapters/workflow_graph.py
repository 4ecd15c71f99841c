"""A workflow-graph worker: runs each job's command in a shell.

    pip install requests
    WG_SERVER=http://:fp_live_…@127.0.0.1:7070/workflow-graph python3 workflow_graph.py

The key is part of the URL. With WG_JOBS=3 the worker exits after three jobs.
"""
import os
import subprocess
import threading
import time
import uuid

import requests

SERVER = os.environ["WG_SERVER"]
WORKER_ID = f"py-{uuid.uuid4().hex[:8]}"
LABELS = os.environ.get("WG_LABELS", "python").split(",")
HEARTBEAT_SECONDS = float(os.environ.get("WG_HEARTBEAT_SECONDS", "10"))
JOBS = int(os.environ.get("WG_JOBS", "0"))


def post(path, body=None):
    return requests.post(f"{SERVER}/api/{path}", json=body, timeout=30)


def beat(lease_id, process, stop):
    while not stop.wait(HEARTBEAT_SECONDS):
        if post(f"jobs/{lease_id}/heartbeat").status_code == 409:
            process.kill()
            return


def watch(job, process, stop):
    cancelled = f"{SERVER}/api/jobs/{job['workflow_id']}/{job['job_id']}/cancelled"
    while not stop.wait(2):
        if requests.get(cancelled, timeout=30).json():
            process.kill()
            return


def run(job, lease_id):
    try:
        process = subprocess.Popen(
            ["sh", "-c", job["command"]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except ValueError as error:
        # No shell accepts a NUL byte.
        return post(f"jobs/{lease_id}/fail", {"error": str(error), "retryable": False})
    stop = threading.Event()
    threading.Thread(target=beat, args=(lease_id, process, stop), daemon=True).start()
    threading.Thread(target=watch, args=(job, process, stop), daemon=True).start()
    out, err = process.communicate()
    stop.set()
    chunks = [
        {"workflow_id": job["workflow_id"], "job_id": job["job_id"], "sequence": 0,
         "data": text, "timestamp_ms": int(time.time() * 1000), "stream": stream}
        for stream, text in (("stdout", out), ("stderr", err))
    ]
    post(f"jobs/{lease_id}/logs", {"chunks": chunks})
    if process.returncode == 0:
        return post(f"jobs/{lease_id}/complete", {"outputs": {"stdout": out.strip()}})
    return post(f"jobs/{lease_id}/fail", {"error": err[:4096], "retryable": True})


post("workers/register", {"worker_id": WORKER_ID, "labels": LABELS}).raise_for_status()
print("ready", flush=True)
done = 0
while JOBS == 0 or done < JOBS:
    wanted = {"worker_id": WORKER_ID, "labels": LABELS, "lease_ttl_secs": 60}
    claim = post("jobs/claim", wanted).json()
    if claim is None:
        time.sleep(0.2)
        continue
    answer = run(claim["job"], claim["lease"]["lease_id"])
    print(claim["job"]["job_id"], answer.status_code, flush=True)
    done += 1
