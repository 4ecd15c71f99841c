"""A worker that uses the published client of Mobius.

    pip install deepnoodle-mobius==0.0.18
    MOBIUS_URL=http://127.0.0.1:7070/mobius MOBIUS_API_KEY=fp_live_… PROJECT=demo python3 mobius.py

Works JOBS jobs of the types `summarize` and `fail`, and prints one line per job. Older versions
work, too. Newer ones cannot report failures, have another fence, or need a socket.
"""
import dataclasses
import os
import threading

from deepnoodle.mobius import Client, ClientOptions, Worker, WorkerConfig

client = Client(
    ClientOptions(
        api_key=os.environ["MOBIUS_API_KEY"],
        base_url=os.environ["MOBIUS_URL"],
        project=os.environ["PROJECT"],
    )
)
fields = {field.name for field in dataclasses.fields(WorkerConfig)}
# Older versions have another name for it.
name = "worker_instance_id" if "worker_instance_id" in fields else "worker_id"
config = WorkerConfig(
    **{name: "summaries"}, concurrency=2, version="1.2.3", queues=["default"], poll_wait_seconds=1
)
worker = Worker(client, config)
left = threading.Semaphore(0)


def summarize(ctx, parameters):
    ctx.emit_event("summary.begun", {"page": parameters["page"]})
    print("summarized", parameters["page"], ctx.attempt, flush=True)
    left.release()
    return {"summary": f"page {parameters['page']}"}


def fail(parameters):
    left.release()
    raise ValueError(parameters["why"])


worker.register("summarize", summarize)
worker.register("fail", fail)
working = threading.Thread(target=worker.run)
working.start()
print("ready", flush=True)
for _ in range(int(os.environ["JOBS"])):
    left.acquire()
worker.stop()
working.join()
print("stopped", flush=True)
