"""A job from enqueue to ack, and bulk work, through the client that openapi-python-client makes.

With the argument `refused` it also enqueues until it is refused, and again when it may.
"""

import os
import sys
import time
from typing import Optional, TypeVar, Union

from fencepost_client import AuthenticatedClient
from fencepost_client.api.dead_letters import dead_letters_bulk_retry
from fencepost_client.api.jobs import jobs_create, jobs_create_batch, jobs_get
from fencepost_client.api.operations import operations_get, operations_list
from fencepost_client.api.queues import queues_purge
from fencepost_client.api.workers import workers_ack, workers_heartbeat, workers_poll
from fencepost_client.models import (
    AckRequest,
    AckStatus,
    DeadLettersFilter,
    EnqueueBatchRequest,
    EnqueueRequest,
    ErrorBody,
    JobHeartbeatRequest,
    OperationState,
    PollRequest,
    PurgeRequest,
    RetryDeadLettersRequest,
)

T = TypeVar("T")


def ok(answer: Optional[Union[T, ErrorBody]]) -> T:
    """The answer, which must not be an error."""
    assert answer is not None and not isinstance(answer, ErrorBody), answer
    return answer


queue, worker = "client-python", "python"
# Together more than the plan `free` allows in a minute, with what comes back meanwhile.
BATCHES, BATCH_JOBS = 20, 500
client = AuthenticatedClient(base_url=os.environ["FENCEPOST_URL"], token=os.environ["FENCEPOST_KEY"])


def enqueue() -> str:
    body = EnqueueRequest(job_type="greet", payload={"name": "Ada"}, queue=queue, max_attempts=1)
    return ok(jobs_create.sync(client=client, body=body)).id


def ack_next(status: AckStatus) -> str:
    poll = PollRequest(worker_id=worker, queues=[queue], wait_seconds=5)
    [leased] = ok(workers_poll.sync(client=client, body=poll)).jobs
    assert leased.payload == {"name": "Ada"} and leased.attempt >= 1, leased
    beat = JobHeartbeatRequest(
        worker_id=worker, job_id=leased.id, attempt=leased.attempt, lease_id=leased.lease_id, progress=0.5
    )
    assert ok(workers_heartbeat.sync(client=client, body=beat)).status == "ok"
    ack = AckRequest(
        job_id=leased.id, worker_id=worker, attempt=leased.attempt, lease_id=leased.lease_id, status=status
    )
    if status == AckStatus.ACK_STATUS_SUCCEEDED:
        ack.result = {"greeting": "Hello, Ada!"}
    assert ok(workers_ack.sync(client=client, body=ack)).action == "done"
    return leased.id


def obeys_a_refusal() -> None:
    job = EnqueueRequest(job_type="other", queue="other")
    body = EnqueueBatchRequest(jobs=[job] * BATCH_JOBS)
    for _ in range(BATCHES):
        reply = jobs_create_batch.sync_detailed(client=client, body=body)
        if reply.status_code != 201:
            break
    assert reply.status_code == 429, reply
    assert isinstance(reply.parsed, ErrorBody) and reply.parsed.error.code == "rate_limit_exceeded", reply
    time.sleep(int(reply.headers["Retry-After"]))
    assert len(ok(jobs_create_batch.sync(client=client, body=body)).jobs) == BATCH_JOBS


def ends(operation_id: str) -> None:
    while (state := ok(operations_get.sync(operation_id, client=client)).state) == OperationState.OPERATION_STATE_RUNNING:
        time.sleep(0.05)
    assert state == OperationState.OPERATION_STATE_SUCCEEDED, state


job = enqueue()
assert ack_next(AckStatus.ACK_STATUS_SUCCEEDED) == job
done = ok(jobs_get.sync(job, client=client))
assert done.state == "succeeded" and done.result == {"greeting": "Hello, Ada!"}, done
missing = jobs_get.sync("job_01m7w3ha3aextt8pkwwdmxsmqw", client=client)
assert isinstance(missing, ErrorBody) and missing.error.code == "job_not_found", missing

dead = enqueue()
assert ack_next(AckStatus.ACK_STATUS_FAILED) == dead
retry = RetryDeadLettersRequest(filter_=DeadLettersFilter(queue=queue))
retried = ok(dead_letters_bulk_retry.sync(client=client, body=retry))
assert retried.count == 1 and retried.operation, retried
ends(retried.operation.id)
assert ack_next(AckStatus.ACK_STATUS_SUCCEEDED) == dead
enqueue()
purged = ok(queues_purge.sync(queue, client=client, body=PurgeRequest(confirm=queue)))
ends(purged.id)
listed = ok(operations_list.sync(client=client)).operations
assert {it.id for it in listed} >= {retried.operation.id, purged.id}, listed
if "refused" in sys.argv:
    obeys_a_refusal()
print("worked", job)
