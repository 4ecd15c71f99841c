"""The fields of `POST /v1/jobs`, so that type checkers refuse others."""

from __future__ import annotations

from typing import Any, TypedDict

__all__ = ["EnqueueFields", "NewJob"]


class EnqueueFields(TypedDict, total=False):
    """What `enqueue` takes beside the job type and its payload."""

    queue: str
    priority: int
    delay_seconds: int
    run_at: str
    expires_at: str
    max_attempts: int
    max_losses: int
    timeout_seconds: int
    retry: dict[str, Any]
    tags: dict[str, str]
    labels: list[str]
    depends_on: list[Any]
    parent_job_id: str
    unique: dict[str, Any]
    concurrency_key: str
    concurrency_limit: int
    group: str
    batch_id: str
    callback_url: str
    check_payload: bool
    on_success: dict[str, Any]
    on_failure: dict[str, Any]
    on_complete: dict[str, Any]


class NewJob(EnqueueFields, total=False):
    """A job of `enqueue_many`. It needs its `job_type`."""

    job_type: str
    payload: Any
