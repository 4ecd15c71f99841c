"""A worker: polls for jobs, keeps their leases, shows their fences, and drains on SIGTERM."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from typing import Any, Callable, Optional

from .client import (
    Aborted,
    ApiError,
    Client,
    Connection,
    Fields,
    current_child_key,
    current_traceparent,
)
from .job import (
    Cancelled,
    Job,
    NotRetryable,
    RateLimited,
    Released,
    RetryAfter,
    Snooze,
)

#: How long a poll waits for a job, in seconds. Shorter than the 30 s after which a silent worker
#: counts as lost.
POLL_WAIT_SECONDS = 20
#: Jobs that one poll asks for at most: the server's limit.
MAX_CAPACITY = 50
#: Between two heartbeats at most, in seconds.
BEAT_SECONDS = 5.0
#: The longest time between two calls while jobs run, as the worker registers it. After three times
#: that without a call its jobs return.
MAX_CALL_SECONDS = 10
#: How soon the jobs of a worker that has died are run again; heartbeats keep the leases of others.
LEASE_SECONDS = 30
#: Heartbeats that may fail before a lease ends.
BEATS_A_LEASE = 3
#: Jobs that one worker runs at the same time at most.
MAX_CONCURRENCY = 100
#: How long the ack of a job is sent again while the server does not answer, in seconds.
ACK_RETRY_SECONDS = 600.0
#: What a handler's slot may still take after the grace period, in seconds.
LAST_SECONDS = 2.0
#: How long the last call may take, in seconds.
DEREGISTER_SECONDS = 3.0

#: Longest pause that a handler may choose, in seconds: the server's limit.
MAX_RETRY_PAUSE_SECONDS = 30 * 86_400
#: The same for `RateLimited`.
MAX_RATE_LIMITED_SECONDS = 86_400

log = logging.getLogger("fencepost")


def clean(text: str) -> str:
    """The text without halves of characters, which no JSON has."""
    return text.encode(errors="replace").decode()


class Worker:
    """Runs handlers for the jobs of some queues, `concurrency` at a time, each in a thread."""

    def __init__(
        self,
        queues: Optional[list[str]] = None,
        concurrency: int = 10,
        *,
        client: Optional[Client] = None,
        lease_seconds: int = LEASE_SECONDS,
        labels: Optional[list[str]] = None,
        grace_seconds: float = 25.0,
    ) -> None:
        if not 1 <= concurrency <= MAX_CONCURRENCY:
            raise ValueError(f"concurrency must be between 1 and {MAX_CONCURRENCY}")
        self.client = client or Client()
        self.queues, self.concurrency, self.grace_seconds = (
            queues or ["default"],
            concurrency,
            grace_seconds,
        )
        self.id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._wanted = {"queues": self.queues} | ({"labels": labels} if labels else {})
        self._lease = {"lease_seconds": lease_seconds}
        self._beat_seconds = min(BEAT_SECONDS, lease_seconds / BEATS_A_LEASE)
        self._handlers: dict[str, Callable[[Job], Any]] = {}
        self._slots = [Connection(self.client.url, self.client.key) for _ in range(concurrency)]
        self._active: dict[str, Job] = {}
        self._lock = threading.Lock()
        #: Held by the slot that polls for all that have no job.
        self._asking = threading.Lock()
        #: Slots without a job, and jobs that no slot has taken.
        self._idle = 0
        self._given: list[Fields] = []
        self._unanswered: Optional[Fields] = None
        self._stopping, self._done, self._running = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._running.set()
        self._failure: Optional[ApiError] = None
        #: Quiet by SIGTSTP, not by a directive of the server.
        self._is_suspended = False

    def job(self, job_type: str) -> Callable[[Callable[[Job], Any]], Callable[[Job], Any]]:
        """Makes a function the handler of a job type. What it returns is the job's result."""

        def register(handler: Callable[[Job], Any]) -> Callable[[Job], Any]:
            self._handlers[job_type] = handler
            return handler

        return register

    def _stop_or_exit(self, *_: Any) -> None:
        if self._stopping.is_set():  # the second signal
            os._exit(1)
        self.stop()

    def stop(self) -> None:
        """Takes no more jobs, and lets `run` return when those that run have ended."""
        self._stopping.set()
        self._running.set()
        for slot in self._slots:
            slot.abort()

    def _suspend(self, *_: Any) -> None:
        self._is_suspended = True
        self._rest()

    def _resume(self, *_: Any) -> None:
        self._is_suspended = False
        self._running.set()

    def _rest(self) -> None:
        self._running.clear()
        for slot in self._slots:
            slot.abort()

    def run(self, on_ready: Callable[[], Any] = lambda: None) -> None:
        """Works until SIGTERM, SIGINT or `stop`. Running jobs have `grace_seconds` to end.

        `on_ready` is called when the worker has registered.
        """
        if not self._handlers:
            raise ValueError("the worker has no handlers: it would take jobs of every type")
        types = sorted(self._handlers)
        self._wanted["job_types"] = types
        about = {"worker_id": self.id, "hostname": socket.gethostname(), "pid": os.getpid()}
        about |= {"sdk_version": "fencepost-python/0.2.0", "concurrency": self.concurrency}
        self._register(about | self._wanted)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._stop_or_exit)
            signal.signal(signal.SIGINT, self._stop_or_exit)
            signal.signal(signal.SIGTSTP, self._suspend)
            signal.signal(signal.SIGCONT, self._resume)
        threads = [
            threading.Thread(target=self._serve, args=(it,), daemon=True) for it in self._slots
        ]
        beats = threading.Thread(target=self._beat, daemon=True)
        for thread in [*threads, beats]:
            thread.start()
        on_ready()
        while any(it.is_alive() for it in threads) and not self._stopping.wait(0.2):
            pass
        deadline = time.monotonic() + self.grace_seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for job in self._running_jobs():
            job.is_released = True
        deadline = time.monotonic() + LAST_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._done.set()
        # It releases what still runs.
        limits = {"timeout_seconds": DEREGISTER_SECONDS, "retry_seconds": DEREGISTER_SECONDS}
        try:
            self.client.request("POST", "/v1/workers/deregister", {"worker_id": self.id}, **limits)
        except Exception as error:  # its leases expire instead
            log.warning("the worker was not deregistered: %s", error)
        if self._failure:
            raise self._failure

    def _register(self, about: Fields) -> None:
        path = "/v1/workers/register"
        try:
            self.client.request("POST", path, about | {"beat_seconds": MAX_CALL_SECONDS})
        except ApiError as error:
            # A server of version 0.2.0 or older: a lost worker's jobs wait for their leases.
            if not error.refuses("beat_seconds"):
                raise
            self.client.request("POST", path, about)

    def _running_jobs(self) -> list[Job]:
        with self._lock:
            return list(self._active.values())

    def _obey(self, state: Optional[str]) -> None:
        if state == "terminate" and not self._stopping.is_set():
            self.stop()
        elif state == "quiet" and self._running.is_set() and not self._stopping.is_set():
            self._rest()
        elif state == "running" and not self._is_suspended:
            self._running.set()

    def _beat(self) -> None:
        connection = Connection(self.client.url, self.client.key)
        while not self._done.wait(self._beat_seconds):
            jobs = {it.id: it for it in self._running_jobs() if not it.is_lost}
            if not jobs and self._running.is_set():
                continue  # the polls show that the worker lives
            active = [
                it.fence() | ({} if it.progress is None else {"progress": it.progress})
                for it in jobs.values()
            ]
            state = "quiet" if self._is_suspended else "running"
            body = {"worker_id": self.id, "state": state, "active_jobs": active}
            begun = time.monotonic()
            try:
                # One that hangs must not take the time of the next ones.
                answer = connection.call(
                    "POST",
                    "/v1/workers/heartbeat",
                    body,
                    timeout_seconds=self._beat_seconds,
                    retry_seconds=0,
                )
                for it in answer.get("jobs", []):
                    job = jobs.get(it["job_id"])
                    if job:
                        job.renewed = begun
                        job.is_cancelled |= it["status"] == "cancel"
                        if it["status"] == "lost":
                            job.lose()
                self._obey(answer.get("state"))
            except Exception as error:  # whatever it is, the next one must be sent
                log.warning("a heartbeat failed: %s", error)
            for job in jobs.values():
                job.is_overdue = time.monotonic() - job.renewed > job.lease_seconds

    def _poll(self, wait_seconds: int) -> Fields:
        # In the order of time, so that the server's index stays small.
        poll_id = uuid.UUID(int=int(time.time() * 1000) << 80 | uuid.uuid4().int & ((1 << 80) - 1))
        wait = {"wait_seconds": wait_seconds, "poll_id": str(poll_id)}
        return self._wanted | self._lease | wait

    def _serve(self, slot: Connection) -> None:
        job = self._next(slot)
        while job:
            # Whatever happens, no job is worked on twice.
            jobs = [job]
            while jobs:
                first, *jobs = jobs
                jobs = self._work(slot, Job(first, self)) + jobs
            job = self._next(slot)

    def _next(self, slot: Connection) -> Optional[Fields]:
        """The next job of a slot; none: the worker stops. One poll asks for all idle slots."""
        with self._lock:
            self._idle += 1
        with self._asking:
            try:
                while not self._given:
                    self._running.wait()
                    slot.resume()
                    if self._stopping.is_set():
                        return None
                    self._ask(slot)
                return self._given.pop(0)
            finally:  # before the next slot asks, for itself and the others
                with self._lock:
                    self._idle -= 1

    def _ask(self, slot: Connection) -> None:
        # A poll without an answer is repeated with its id: it gets the same jobs.
        if not self._unanswered:
            capacity = {"capacity": min(self._idle, MAX_CAPACITY)}
            poll = {"worker_id": self.id} | self._poll(POLL_WAIT_SECONDS) | capacity
            self._unanswered = poll
        try:
            answer = slot.call(
                "POST", "/v1/workers/poll", self._unanswered, wait_seconds=POLL_WAIT_SECONDS
            )
            self._unanswered, self._given = None, answer["jobs"]
            self._obey(answer.get("state"))
        except Aborted:
            pass
        except Exception as error:  # whatever it is, the slot must not end
            log.warning("a poll failed: %s", error)
            if isinstance(error, ApiError) and not error.is_retryable:
                self._failure = error
                self.stop()

    def _work(self, slot: Connection, job: Job) -> list[Fields]:
        with self._lock:
            earlier = self._active.get(job.id)
            if earlier:  # this lease proves that the other one has ended
                earlier.is_lost = True
            self._active[job.id] = job
        try:
            end = self._handle(job)
            job.is_done = True
            return [] if job.is_lost else self._ack(slot, job, end)
        except Exception as error:
            # 409: another attempt decides.
            log.warning("the outcome of %s was not taken: %s", job.id, error)
            return []
        finally:
            with self._lock:
                if self._active.get(job.id) is job:
                    del self._active[job.id]

    def _handle(self, job: Job) -> Fields:
        """Runs the handler, and returns the outcome."""
        context = current_traceparent.set(job.traceparent)
        children = current_child_key.set(job.child_key)
        begun = time.monotonic()
        end: Fields
        try:
            result = self._handlers[job.job_type](job)
            json.dumps(result, allow_nan=False)
            end = {"status": "succeeded", "result": result}
        except Released:
            end = {"status": "released"}
        except Snooze as error:
            seconds = min(max(math.ceil(error.seconds), 0), MAX_RETRY_PAUSE_SECONDS)
            end = {"status": "released", "delay_seconds": seconds}
        except RateLimited as error:
            seconds = min(max(math.ceil(error.retry_after), 1), MAX_RATE_LIMITED_SECONDS)
            end = {"status": "rate_limited", "retry_after_seconds": seconds}
            end |= {"scope": error.scope} if error.scope else {}
        except BaseException as error:  # `sys.exit` in a handler, too, is a failure of its job
            if isinstance(error, Cancelled) and job.is_overdue:
                return {"status": "released"}
            stack = "".join(traceback.format_exception(*sys.exc_info()))
            report = {
                "type": type(error).__name__,
                "message": clean(str(error)),
                "stack_trace": clean(stack[-8_000:]),
            }
            end = {
                "status": "failed",
                "error": report,
                "retryable": not isinstance(error, NotRetryable),
            }
            if isinstance(error, RetryAfter):
                seconds = min(max(math.ceil(error.seconds), 0), MAX_RETRY_PAUSE_SECONDS)
                end["retry_after_seconds"] = seconds
        finally:
            current_traceparent.reset(context)
            current_child_key.reset(children)
        end["duration_ms"] = int((time.monotonic() - begun) * 1000)
        return end

    def _ack(self, slot: Connection, job: Job, end: Fields) -> list[Fields]:
        body: Fields = {"worker_id": self.id} | job.fence() | end
        if self._running.is_set() and not self._stopping.is_set():
            # Another slot polls for those that have no job.
            wait_seconds = POLL_WAIT_SECONDS if self.concurrency == 1 else 0
            then = {"then_poll": self._poll(wait_seconds)}
            try:
                answer = slot.call(
                    "POST",
                    "/v1/workers/ack",
                    body | then,
                    wait_seconds=wait_seconds,
                    retry_seconds=ACK_RETRY_SECONDS,
                )
                poll = answer.get("poll", {})
                self._obey(poll.get("state"))
                given: list[Fields] = poll.get("jobs", [])
                return given
            except Aborted:
                pass  # it may have been recorded: an ack that shows its fence may be repeated
            except ApiError as error:
                if error.status not in (400, 413):
                    raise
                refused = {"type": "ResultRefused", "message": str(error)}
                # A handler that has done its work would not make its result smaller.
                is_final = end["status"] == "succeeded" or end.get("retryable") is False
                end = {"status": "failed", "error": refused, "retryable": not is_final}
                body = {"worker_id": self.id} | job.fence() | end
        # On a connection that `stop` does not abort.
        last = Connection(self.client.url, self.client.key)
        retry = self.grace_seconds if self._stopping.is_set() else ACK_RETRY_SECONDS
        try:
            last.call("POST", "/v1/workers/ack", body, retry_seconds=retry)
        finally:
            last.close()
        return []
