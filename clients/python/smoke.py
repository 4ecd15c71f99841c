"""A job from enqueue to ack, through the client that openapi-python-client makes."""

import os

from fencepost_client import AuthenticatedClient
from fencepost_client.api.jobs import jobs_create, jobs_get
from fencepost_client.api.workers import workers_ack, workers_heartbeat, workers_poll
from fencepost_client.models import AckRequest, AckStatus, EnqueueRequest, HeartbeatRequest, PollRequest

queue, worker = "client-python", "python"
client = AuthenticatedClient(base_url=os.environ["FENCEPOST_URL"], token=os.environ["FENCEPOST_KEY"])

job = jobs_create.sync(client=client, body=EnqueueRequest(job_type="greet", payload={"name": "Ada"}, queue=queue))
polled = workers_poll.sync(client=client, body=PollRequest(worker_id=worker, queues=[queue], wait_seconds=5))
[leased] = polled.jobs
assert leased.id == job.id and leased.attempt == 1, leased
assert leased.payload == {"name": "Ada"}, leased.payload
fence = {"job_id": leased.id, "worker_id": worker, "attempt": leased.attempt, "lease_id": leased.lease_id}
beat = workers_heartbeat.sync(client=client, body=HeartbeatRequest(**fence, progress=0.5))
assert beat.status == "ok", beat
acked = workers_ack.sync(
    client=client, body=AckRequest(**fence, status=AckStatus.SUCCEEDED, result={"greeting": "Hello, Ada!"})
)
assert acked.action == "done", acked
done = jobs_get.sync(job.id, client=client)
assert done.state == "succeeded" and done.result == {"greeting": "Hello, Ada!"}, done
missing = jobs_get.sync("job_01m7w3ha3aextt8pkwwdmxsmqw", client=client)
assert missing.error.code == "job_not_found", missing
print("worked", job.id)
