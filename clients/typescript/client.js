// Requests to the API: enqueue, read and cancel jobs.

import { AsyncLocalStorage } from "node:async_hooks";
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

/** Milliseconds without an answer after which a request counts as failed. */
const TIMEOUT_MS = 15_000;
/** Longest wait of one request, in seconds: the server's limit. */
const MAX_WAIT_SECONDS = 30;
/** Pause before the first retry; it doubles up to the second number. */
const PAUSE_MS = 250;
const MAX_PAUSE_MS = 10_000;
/** How long a request is retried. */
const RETRY_MS = 60_000;
/** A `Retry-After` beyond this is cut. */
const MAX_RETRY_AFTER_MS = 60_000;

/** The trace of the job that runs here; jobs that it enqueues continue it. */
export const currentTraceparent = new AsyncLocalStorage();

/** The server refused a request. */
export class ApiError extends Error {
  constructor(status, body) {
    const error = body?.error ?? {};
    const message = error.message ?? `the server answered ${status}`;
    super(`${message} (${error.code ?? status}, request ${error.request_id ?? "unknown"})`);
    this.name = "ApiError";
    this.status = status;
    this.code = error.code ?? "";
    this.details = error.details ?? [];
    this.requestId = error.request_id;
    this.error = error;
  }

  /** Whether the same request may succeed later. */
  get isRetryable() {
    return this.status >= 500 || this.status === 408 || this.status === 429;
  }
}

export class Client {
  constructor({ url, key } = {}) {
    this.url = (url ?? process.env.FENCEPOST_URL ?? "http://127.0.0.1:7070").replace(/\/+$/, "");
    this.key = key ?? process.env.FENCEPOST_KEY ?? "";
    if (!this.key) throw new Error("an API key is needed: the option `key`, or FENCEPOST_KEY");
  }

  /** Any call of the API. Retries what may pass: the network, 408, 429 and 5xx. */
  async request(method, path, body, options = {}) {
    const { headers = {}, waitSeconds = 0, retryMs = RETRY_MS, signal } = options;
    const deadline = Date.now() + retryMs;
    for (let pause = PAUSE_MS; ; pause = Math.min(pause * 2, MAX_PAUSE_MS)) {
      let failure;
      let after = 0;
      try {
        const { reply, answer } = await this.#send(
          method,
          path,
          body,
          headers,
          waitSeconds,
          signal,
        );
        if (reply.ok) return answer;
        failure = new ApiError(reply.status, answer);
        after = Number(reply.headers.get("retry-after") ?? 0) * 1000 || 0;
      } catch (error) {
        signal?.throwIfAborted();
        failure = error;
      }
      if (failure instanceof ApiError && !failure.isRetryable) throw failure;
      // Half of it by chance, so that clients do not come back together.
      const chance = pause * (0.5 + Math.random() / 2);
      const wait = Math.max(chance, Math.min(after, MAX_RETRY_AFTER_MS));
      if (Date.now() + wait > deadline) throw failure;
      await sleep(wait, undefined, { signal });
    }
  }

  async #send(method, path, body, headers, waitSeconds, signal) {
    const limit = AbortSignal.timeout(TIMEOUT_MS + waitSeconds * 1000);
    const reply = await fetch(this.url + path, {
      method,
      headers: {
        authorization: `Bearer ${this.key}`,
        "content-type": "application/json",
        ...headers,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
    });
    const text = await reply.text();
    let answer = {};
    try {
      if (text) answer = JSON.parse(text);
    } catch (error) {
      // What is between may answer in its own words; half an answer is none.
      if (reply.ok) throw error;
    }
    return { reply, answer };
  }

  /** Stores a job once, however often the request must be sent, and returns it. */
  enqueue(jobType, payload = null, options = {}) {
    const { idempotencyKey = randomUUID(), traceparent, ...fields } = options;
    const headers = { "idempotency-key": idempotencyKey };
    const trace = traceparent ?? currentTraceparent.getStore();
    if (trace) headers.traceparent = trace;
    const body = { job_type: jobType, payload, ...fields };
    return this.request("POST", "/v1/jobs", body, { headers });
  }

  /** Stores all of these jobs, or none. */
  async enqueueMany(jobs, { idempotencyKey = randomUUID() } = {}) {
    const headers = { "idempotency-key": idempotencyKey };
    return (await this.request("POST", "/v1/jobs/batch", { jobs }, { headers })).jobs;
  }

  /** The job as it is now. */
  job(id) {
    return this.request("GET", `/v1/jobs/${encodeURIComponent(id)}`);
  }

  /** The job when it has ended, or after this time as it is then. */
  async wait(id, timeoutSeconds = 60) {
    const deadline = Date.now() + timeoutSeconds * 1000;
    for (;;) {
      const left = Math.floor((deadline - Date.now()) / 1000);
      const waitSeconds = Math.max(0, Math.min(MAX_WAIT_SECONDS, left));
      const path = `/v1/jobs/${encodeURIComponent(id)}?wait_seconds=${waitSeconds}`;
      const job = await this.request("GET", path, undefined, { waitSeconds });
      const hasEnded = ["succeeded", "dead_letter", "cancelled"].includes(job.state);
      if (hasEnded || Date.now() + 1000 > deadline) return job;
    }
  }

  /** Cancels a job; a running one is asked to stop. */
  cancel(id) {
    return this.request("POST", `/v1/jobs/${encodeURIComponent(id)}/cancel`, {});
  }
}
