"""A worker of a run: it fails or works too long now and then, and says what it was given."""

import json
import os
import random
import time

from fencepost import Worker

worker = Worker(queues=["python"], concurrency=2, lease_seconds=2)


@worker.job("chaos")
def work(job):
    given = {**job.fence(), "tenant": job.payload["tenant"]}
    print(json.dumps(given), flush=True)
    time.sleep(3.5 if random.random() < 0.02 else random.random() * 0.04)
    if random.random() < 0.15 and not os.path.exists(os.environ["CHAOS_HEALING"]):
        raise RuntimeError("a failure")
    return {"attempt": job.attempt}


worker.run()
