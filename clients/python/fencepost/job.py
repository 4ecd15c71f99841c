"""A leased job, and what its handler may raise."""

from __future__ import annotations

import collections
import hashlib
import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Optional

from .client import ApiError, Fields

if TYPE_CHECKING:
    from .worker import Worker

#: One chunk of logs, in bytes: the server's limit is 64 KiB.
MAX_LOG_BYTES = 60 * 1024

log = logging.getLogger("fencepost")


class Cancelled(Exception):
    """The job was cancelled, or its lease is lost: stop working on it."""


class Released(Exception):
    """The worker stops: the job goes back to its queue without a failure."""


class Snooze(Exception):
    """Raise it to put the job off: it is ready again after that time. No failure is
    counted."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"put off for {seconds} s")
        self.seconds = seconds


class NotSaved(Exception):
    """A checkpoint was not stored: the project is full, or a later one is there."""


class NotRetryable(Exception):
    """Raise it when the job cannot succeed: it becomes a dead letter at once."""


class RetryAfter(Exception):
    """Raise it to choose when the job is retried."""

    def __init__(self, seconds: float, message: str = "") -> None:
        super().__init__(message or f"again in {seconds} s")
        self.seconds = seconds


class RateLimited(Exception):
    """Raise it when what you call asks for fewer requests: the job's group waits, or its queue if
    the job has no group or `scope` is "queue". With "shared_limit:NAME" all wait that this limit
    counts. No failure is counted."""

    def __init__(self, retry_after: float = 5, scope: Optional[str] = None) -> None:
        super().__init__(f"asked to wait {retry_after} s")
        self.retry_after, self.scope = retry_after, scope


class Job:
    """A leased job. `data` is the job as the server sent it."""

    def __init__(self, data: Fields, worker: Worker) -> None:
        self.data = data
        self.id: str = data["id"]
        self.job_type: str = data["job_type"]
        self.payload: Any = data["payload"]
        self.attempt: int = data["attempt"]
        self.tags: Fields = data["tags"]
        self.parent_results: list[Fields] = data["parent_results"]
        self.traceparent: Optional[str] = data["traceparent"]
        #: How far earlier attempts have come, as `save` stored it. None: nowhere.
        self.checkpoint: Any = data.get("checkpoint")
        #: From 0 to 1; set it while you work.
        self.progress: Optional[float] = None
        self.is_cancelled = self.is_lost = self.is_released = False
        #: Its handler has ended.
        self.is_done = False
        #: The lease was not renewed for its whole length: another worker may have the job.
        self.is_overdue = False
        #: When the lease was last renewed, and how long it lasts.
        self.renewed, self.lease_seconds = time.monotonic(), float(data["lease_seconds"])
        self._begun = self.renewed
        self._worker, self._sequence = worker, 0
        self._saved: int = data.get("checkpoint_sequence", 0)
        #: The number of the last checkpoint that was stored: where another attempt begins.
        self._stored = self._saved
        self._saving = threading.Lock()
        #: How often this attempt has enqueued the same since a checkpoint.
        self._children: collections.Counter[str] = collections.Counter()
        self._counting = threading.Lock()

    def child_key(self, body: Any) -> str:
        """The idempotency key of what its handler enqueues next: the same in each attempt that
        begins at the same checkpoint."""
        digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()[:32]
        place = f"{self.id}:{self._stored}:{digest}"
        with self._counting:
            self._children[place] += 1
            return f"{place}:{self._children[place]}"

    def fence(self) -> Fields:
        """What proves that this is the current attempt. Show `attempt` to other systems too."""
        return {"job_id": self.id, "attempt": self.attempt, "lease_id": self.data["lease_id"]}

    def lose(self) -> None:
        """Another worker may have it."""
        self.is_lost = True
        if self.is_done:  # its ack is on the way
            return
        seconds = time.monotonic() - self._begun
        limit: int = self.data["timeout_seconds"]
        why = "has lost its lease" if seconds < limit else f"has outlived its timeout of {limit} s"
        log.warning("job %s %s: its outcome will not count", self.id, why)

    def check(self) -> None:
        """Raises `Cancelled` or `Released` when the job must stop. Call it often."""
        if self.is_cancelled or self.is_lost:
            raise Cancelled("its lease is lost" if self.is_lost else "it was cancelled")
        if self.is_overdue:
            raise Cancelled("its lease was not renewed")
        if self.is_released:
            raise Released

    def log(self, text: str) -> None:
        """Adds a line to the job's logs."""
        data = text.encode(errors="replace")[:MAX_LOG_BYTES].decode(errors="ignore") + "\n"
        chunk = {"job_id": self.id, "attempt": self.attempt, "sequence": self._sequence}
        chunk |= {"data": data, "timestamp_ms": int(time.time() * 1000)}
        self._sequence += 1
        self._worker.client.request(
            "POST", "/v1/workers/logs", {"worker_id": self._worker.id, "chunks": [chunk]}
        )

    def save(self, checkpoint: Any) -> None:
        """Stores how far the job has come: JSON of at most 64 KiB, for the next attempt."""
        with self._saving:
            self._save(checkpoint)

    def _save(self, checkpoint: Any) -> None:
        self._saved += 1
        kept = {"checkpoint": checkpoint, "checkpoint_sequence": self._saved}
        body = {"worker_id": self._worker.id} | self.fence() | kept
        try:
            answer = self._worker.client.request("POST", "/v1/workers/heartbeat", body)
        except ApiError as error:
            if error.status == 409:
                self.is_lost = True
                raise Cancelled("its lease is lost") from error
            if not error.refuses("checkpoint") or "unknown" not in str(error):
                raise
            answer = {}
        self.is_cancelled |= answer.get("status") == "cancel"
        saved = answer.get("checkpoint")
        if saved is None:  # version 0.2.0 or older
            log.warning("the server is too old for checkpoints")
        elif saved != "stored":
            raise NotSaved(f"the checkpoint is {saved}")
        self.checkpoint, self._stored = checkpoint, self._saved

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """Runs `work` if no attempt has done so, and returns its result: the checkpoint has it."""
        steps = self._with_steps()["steps"]
        if name in steps:
            return steps[name]
        self.check()
        result = work()
        with self._saving:  # other steps may have ended meanwhile
            after = self._with_steps()
            self._save(after | {"steps": after["steps"] | {name: result}})
        return result

    def _with_steps(self) -> Fields:
        checkpoint = {} if self.checkpoint is None else self.checkpoint
        if not isinstance(checkpoint, dict):
            raise ValueError("the checkpoint of a job with steps must be an object")
        return checkpoint | {"steps": checkpoint.get("steps") or {}}
