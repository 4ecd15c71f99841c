"""A worker of a run: it fails or works too long now and then, and says what it does."""

import json
import os
import random
import threading

from fencepost import Worker

worker = Worker(queues=["python"], concurrency=2, lease_seconds=2)


@worker.job("chaos")
def work(job):
    def say(**more):
        said = {**job.fence(), "tenant": job.payload["tenant"], **more}
        # In one write: two jobs run at a time.
        os.write(1, f"{json.dumps(said)}\n".encode())

    say()
    # `time.sleep` fails while faketime sets the clock.
    threading.Event().wait(3.5 if random.random() < 0.02 else random.random() * 0.04)
    if random.random() < 0.15 and not os.path.exists(os.environ["CHAOS_HEALING"]):
        say(end="failed")
        raise RuntimeError("a failure")
    say(end="succeeded")
    return {"attempt": job.attempt}


worker.run()
