"""Requests to the API: enqueue, read and cancel jobs."""

from __future__ import annotations

import contextvars
import email.utils
import http.client
import json
import logging
import os
import random
import threading
import time
import urllib.parse
import uuid
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional

from .codes import ErrorCode
from .fields import EnqueueFields, NewJob

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ApiError", "Client", "ErrorCode"]

#: An object of JSON.
Fields = dict[str, Any]

#: Seconds without an answer after which a request counts as failed.
TIMEOUT_SECONDS = 15.0
#: Longest wait of one request, in seconds: the server's limit.
MAX_WAIT_SECONDS = 30
#: Pause before the first retry, in seconds; it doubles up to the second number.
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.25, 10.0
#: How long a request is retried, in seconds.
RETRY_SECONDS = 60.0
#: There is no room: the caller decides what becomes of the job.
NO_ROOM = (ErrorCode.QUEUE_FULL, ErrorCode.QUOTA_EXCEEDED)
#: A `Retry-After` beyond this is cut, in seconds.
MAX_RETRY_AFTER_SECONDS = 60.0
#: The server names the project in it; a proxy can keep requests that repeat it on one node.
PROJECT_HEADER = "Fencepost-Project"
#: A connection that was idle for this long is opened anew: servers and proxies close idle ones.
MAX_IDLE_SECONDS = 30.0

#: The trace of the job that runs in this context; jobs that it enqueues continue it.
current_traceparent: contextvars.ContextVar[Optional[str]] = contextvars.ContextVar(
    "current_traceparent", default=None
)
#: Makes the idempotency key of what the job of this context enqueues: another attempt that enqueues
#: the same makes no second job.
current_child_key: contextvars.ContextVar[Optional[Callable[[Any], str]]] = contextvars.ContextVar(
    "current_child_key", default=None
)


log = logging.getLogger("fencepost")


def retry_after(value: str) -> Optional[float]:
    """The pause that a `Retry-After` asks for, in seconds; a proxy may send it as a date."""
    if value.isdigit():
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return None


class ApiError(Exception):
    """The server refused a request. `code` is an `ErrorCode`, or the text of a newer one."""

    def __init__(self, status: int, body: Any) -> None:
        # What is between may answer in its own words.
        error = body.get("error") if isinstance(body, dict) else None
        error = error if isinstance(error, dict) else {}
        code = error.get("code", "")
        self.status = status
        self.code = ErrorCode(code) if code in ErrorCode._value2member_map_ else code
        self.message: str = error.get("message", f"the server answered {status}")
        self.details: list[Fields] = error.get("details") or []
        self.request_id: Optional[str] = error.get("request_id")
        self.error = error
        super().__init__(f"{self.message} ({code or status}, request {self.request_id})")

    def refuses(self, field: str) -> bool:
        """True if the request was invalid because of this field."""
        return self.status == 400 and any(it.get("field") == field for it in self.details)

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return (
            self.status >= 500
            or self.status in (408, 429)
            or self.code == ErrorCode.IDEMPOTENCY_IN_PROGRESS
        )

    @property
    def is_no_room(self) -> bool:
        """Whether a queue is full, or a quota is used up."""
        return self.code in NO_ROOM


class AnswerError(Exception):
    """The answer of a request that succeeded is no JSON: something between has changed it."""


class Aborted(Exception):
    """The request was aborted: its caller stops."""


class Connection:
    """One keep-alive connection. Another thread may abort its request."""

    def __init__(self, url: str, key: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the URL of the server cannot be read: {url!r}")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connect: Callable[[], http.client.HTTPConnection] = lambda: kind(
            parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS
        )
        self._url = url
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._http: Optional[http.client.HTTPConnection] = None
        self._used = 0.0
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Ends the request that waits, and refuses all others until `resume`."""
        self._aborted.set()
        sock = getattr(self._http, "sock", None)
        if sock is not None:
            try:
                sock.shutdown(2)
            except OSError:
                pass

    def resume(self) -> None:
        """Allows requests again."""
        self._aborted.clear()

    def send(
        self, method: str, path: str, data: Optional[bytes], headers: Fields, timeout: float
    ) -> tuple[int, Optional[float], Any]:
        """One try: status, `Retry-After` in seconds or none, and the answer."""
        if time.monotonic() - self._used > MAX_IDLE_SECONDS:
            self.close()
        if self._http is None:
            self._http = self._connect()
        try:
            self._http.timeout = timeout
            if self._http.sock is not None:
                self._http.sock.settimeout(timeout)
            self._http.request(method, self._prefix + path, data, {**self._headers, **headers})
            if self._aborted.is_set():
                raise Aborted
            answer = self._http.getresponse()
            content = answer.read()
            seconds = retry_after(answer.headers.get("Retry-After", ""))
            project = answer.headers.get(PROJECT_HEADER)
            if project:
                # A proxy can keep the requests of a project on one node.
                self._headers[PROJECT_HEADER] = project
            self._used = time.monotonic()
            return answer.status, seconds, read(answer.status, content)
        except BaseException:
            self.close()
            raise

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Optional[Fields] = None,
        wait_seconds: float = 0.0,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retry_seconds: Optional[float] = None,
    ) -> Any:
        """Retries what may pass: the network, 408, 429 and 5xx. Raises `ApiError` for the rest.

        A full queue or a used-up quota is raised at once, unless `retry_seconds` says how long to
        try. A POST is sent with an idempotency key, so that what is sent again is done once.
        """
        waits_for_room = retry_seconds is not None or path.startswith("/v1/workers/")
        retry_seconds = RETRY_SECONDS if retry_seconds is None else retry_seconds
        data = None if body is None else json.dumps(body).encode()
        headers = dict(headers or {})
        if method == "POST" and not path.startswith("/v1/workers/"):
            headers.setdefault("Idempotency-Key", str(uuid.uuid4()))
        deadline = time.monotonic() + retry_seconds
        pause = PAUSE_SECONDS
        while True:
            if self._aborted.is_set():
                raise Aborted
            after: Optional[float] = None
            failure: Exception
            try:
                timeout = timeout_seconds + wait_seconds
                status, after, answer = self.send(method, path, data, headers, timeout)
                if 200 <= status < 300:
                    return answer
                refused = failure = ApiError(status, answer)
                if not refused.is_retryable or (refused.is_no_room and not waits_for_room):
                    raise failure
            except http.client.InvalidURL:
                raise
            except (OSError, http.client.HTTPException, AnswerError) as error:
                if self._aborted.is_set():
                    raise Aborted from error
                failure = error
            if pause == PAUSE_SECONDS and retry_seconds > 0:
                log.warning("a request to %s failed: %s; trying again", self._url, failure)
            # Half of it by chance, so that clients do not come back together.
            wait = pause * random.uniform(0.5, 1.0)
            if after is not None:
                wait = max(wait, min(after, MAX_RETRY_AFTER_SECONDS))
            if time.monotonic() + wait > deadline:
                if isinstance(failure, OSError):
                    raise ConnectionError(f"{self._url} was not reached: {failure}") from failure
                raise failure
            self._aborted.wait(wait)
            pause = min(pause * 2, MAX_PAUSE_SECONDS)

    def close(self) -> None:
        """Closes it; the next request opens it again."""
        if self._http is not None:
            self._http.close()
        self._http = None


def read(status: int, content: bytes) -> Any:
    """The answer; that of a refusal may be in other words than JSON."""
    try:
        return json.loads(content) if content else {}
    except ValueError:
        if 200 <= status < 300:
            raise AnswerError("the answer is not JSON") from None
        return {}


def new_key(body: Fields) -> str:
    """The idempotency key of a request that enqueues this."""
    of_job = current_child_key.get()
    return of_job(body) if of_job else str(uuid.uuid4())


class Client:
    """Enqueues jobs and reads them. Threads may share it: each has a connection of its own."""

    def __init__(self, url: Optional[str] = None, key: Optional[str] = None) -> None:
        self.url = url or os.environ.get("FENCEPOST_URL", "http://127.0.0.1:7070")
        # A secret that was read from a file ends with a line feed.
        self.key = (key or os.environ.get("FENCEPOST_KEY", "")).strip()
        if not self.key:
            raise ValueError("an API key is needed: the argument `key`, or FENCEPOST_KEY")
        if not (self.key.isascii() and self.key.isprintable()):
            raise ValueError("the API key has characters that no key has")
        self._threads = threading.local()

    def _connection(self) -> Connection:
        if not hasattr(self._threads, "connection"):
            self._threads.connection = Connection(self.url, self.key)
        connection: Connection = self._threads.connection
        return connection

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """Any call of the API, such as `request("GET", "/v1/queues")`."""
        return self._connection().call(method, path, body, **options)

    def enqueue(
        self,
        job_type: str,
        payload: Any = None,
        *,
        idempotency_key: Optional[str] = None,
        traceparent: Optional[str] = None,
        retry_seconds: Optional[float] = None,
        **fields: Unpack[EnqueueFields],
    ) -> Fields:
        """Stores a job once, however often the request must be sent, and returns it.

        `fields` are those of `POST /v1/jobs`: `queue`, `delay_seconds`, `max_attempts`, … A full
        queue is raised at once; `retry_seconds` waits for room, and bounds all retries. In a
        handler, another attempt that enqueues the same stores no second job.
        """
        body = {"job_type": job_type, "payload": payload, **fields}
        headers = {"Idempotency-Key": idempotency_key or new_key(body)}
        trace = traceparent or current_traceparent.get()
        if trace:
            headers["traceparent"] = trace
        job: Fields = self.request(
            "POST", "/v1/jobs", body, headers=headers, retry_seconds=retry_seconds
        )
        return job

    def enqueue_many(
        self,
        jobs: list[NewJob],
        *,
        idempotency_key: Optional[str] = None,
        retry_seconds: Optional[float] = None,
    ) -> list[Fields]:
        """Stores all of these jobs, or none. `retry_seconds` as for `enqueue`."""
        body = {"jobs": jobs}
        headers = {"Idempotency-Key": idempotency_key or new_key(body)}
        answer = self.request(
            "POST",
            "/v1/jobs/batch",
            body,
            headers=headers,
            retry_seconds=retry_seconds,
        )
        stored: list[Fields] = answer["jobs"]
        return stored

    def items(self, path: str) -> Iterator[Fields]:
        """All items of a list, page by page: `items("/v1/jobs?q=state:pending")`."""
        cursor: Optional[str] = None
        while True:
            begins = "&" if "?" in path else "?"
            at = f"{begins}cursor={urllib.parse.quote(cursor, safe='')}" if cursor else ""
            page = self.request("GET", path + at)
            yield from next(it for it in page.values() if isinstance(it, list))
            cursor = page.get("next_cursor")
            if not cursor:
                return

    def job(self, job_id: str) -> Fields:
        """The job as it is now."""
        job: Fields = self.request("GET", f"/v1/jobs/{urllib.parse.quote(job_id, safe='')}")
        return job

    def wait(self, job_id: str, timeout_seconds: float = 60.0) -> Fields:
        """The job when it has ended, or after this time as it is then."""
        deadline = time.monotonic() + timeout_seconds
        path = f"/v1/jobs/{urllib.parse.quote(job_id, safe='')}?wait_seconds="
        while True:
            left = max(0, min(MAX_WAIT_SECONDS, int(deadline - time.monotonic())))
            job: Fields = self.request("GET", f"{path}{left}", wait_seconds=left)
            ended = job["state"] in ("succeeded", "dead_letter", "cancelled")
            if ended or time.monotonic() + 1 > deadline:
                return job

    def cancel(self, job_id: str) -> Fields:
        """Cancels a job; a running one is asked to stop."""
        path = f"/v1/jobs/{urllib.parse.quote(job_id, safe='')}/cancel"
        answer: Fields = self.request("POST", path, {})
        return answer
