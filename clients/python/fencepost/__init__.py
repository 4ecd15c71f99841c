"""Client and worker for Fencepost, a job queue with an HTTP API.

    from fencepost import Worker

    worker = Worker(queues=["default"])

    @worker.job("greet")
    def greet(job):
        return {"greeting": f"Hello, {job.payload['name']}!"}

    worker.run()

`FENCEPOST_URL` and `FENCEPOST_KEY` name the server and the API key, unless arguments do.
"""

from .client import ApiError, Client, ErrorCode
from .job import (
    Cancelled,
    Job,
    NotRetryable,
    NotSaved,
    RateLimited,
    Released,
    RetryAfter,
    Snooze,
)
from .webhooks import InvalidWebhook, verify_webhook
from .worker import Worker

__all__ = [
    "ApiError",
    "Cancelled",
    "Client",
    "ErrorCode",
    "InvalidWebhook",
    "Job",
    "NotRetryable",
    "NotSaved",
    "RateLimited",
    "Released",
    "RetryAfter",
    "Snooze",
    "Worker",
    "verify_webhook",
]
