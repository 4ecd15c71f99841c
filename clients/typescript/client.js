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

/** There is no room: the caller decides what becomes of the job. */
const NO_ROOM = ["queue_full", "quota_exceeded"];

/** The trace of the job that runs here; jobs that it enqueues continue it. */
export const currentTraceparent = new AsyncLocalStorage();
/**
 * The job that runs here. It makes the idempotency keys of what it enqueues: another attempt that
 * enqueues the same makes no second job.
 */
export const currentJob = new AsyncLocalStorage();

/** The idempotency key of a request that enqueues this. */
function newKey(body) {
  return currentJob.getStore()?.childKey(body) ?? randomUUID();
}

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
    const { status, code } = this;
    return (
      status >= 500 || status === 408 || status === 429 || code === "idempotency_in_progress"
    );
  }

  /** Whether a queue is full, or a quota is used up. */
  get isNoRoom() {
    return NO_ROOM.includes(this.code);
  }

  /** Whether the request was invalid because of this field. */
  refuses(field) {
    return this.status === 400 && this.details.some((it) => it.field === field);
  }
}

/** The pause that a `Retry-After` asks for: seconds, or until a date, as a proxy may send it. */
function retryAfterMs(value, nowMs) {
  if (/^\d+$/.test(value)) return Number(value) * 1000;
  return Math.max(Date.parse(value) - nowMs, 0) || 0;
}

/** Whether an error is one of the network, or of an answer that was cut off. */
function isOfNetwork(error) {
  return (
    error instanceof SyntaxError ||
    error?.name === "TimeoutError" ||
    (error instanceof TypeError && error.cause !== undefined)
  );
}

/** What another client of the same server and project needs. */
export let credentialsOf;

export class Client {
  // Private, so that no log shows it.
  #key;
  static {
    credentialsOf = (client) => ({ url: client.url, key: client.#key });
  }
  // As the server named it: a proxy can keep the requests of a project on one node.
  #project;

  constructor({ url, key } = {}) {
    this.url = (url ?? process.env.FENCEPOST_URL ?? "http://127.0.0.1:7070").replace(/\/+$/, "");
    // A secret that was read from a file ends with a line feed.
    this.#key = (key ?? process.env.FENCEPOST_KEY ?? "").trim();
    if (!this.#key) throw new Error("an API key is needed: the option `key`, or FENCEPOST_KEY");
    if (!URL.canParse(this.url)) throw new Error(`the URL cannot be read: ${this.url}`);
    if (!/^[!-~]+$/.test(this.#key)) throw new Error("the API key has characters that no key has");
  }

  /**
   * Any call of the API. Retries what may pass: the network, 408, 429 and 5xx. A full queue or a
   * used-up quota is thrown at once, unless `retryMs` says how long to try. A POST is sent with an
   * idempotency key, so that what is sent again is done once.
   */
  async request(method, path, body, options = {}) {
    const { waitSeconds = 0, timeoutMs = TIMEOUT_MS, retryMs = RETRY_MS, signal } = options;
    const waitsForRoom = options.retryMs !== undefined || path.startsWith("/v1/workers/");
    const text = body === undefined ? undefined : JSON.stringify(body);
    const isRepeatable = method === "POST" && !path.startsWith("/v1/workers/");
    const headers = {
      authorization: `Bearer ${this.#key}`,
      "content-type": "application/json",
      ...(this.#project && { "fencepost-project": this.#project }),
      ...(isRepeatable && { "idempotency-key": randomUUID() }),
      ...options.headers,
    };
    const deadline = Date.now() + retryMs;
    for (let pause = PAUSE_MS; ; pause = Math.min(pause * 2, MAX_PAUSE_MS)) {
      let failure;
      let after = 0;
      try {
        const limit = AbortSignal.timeout(timeoutMs + waitSeconds * 1000);
        const { reply, answer } = await this.#send(path, {
          method,
          headers,
          body: text,
          redirect: "manual",
          signal: signal ? AbortSignal.any([signal, limit]) : limit,
        });
        if (reply.ok) return answer;
        failure = new ApiError(reply.status, answer);
        after = retryAfterMs(reply.headers.get("retry-after") ?? "", Date.now());
      } catch (error) {
        signal?.throwIfAborted();
        if (!isOfNetwork(error)) throw error;
        failure = error;
      }
      if (failure instanceof ApiError && !failure.isRetryable) throw failure;
      if (failure.isNoRoom && !waitsForRoom) throw failure;
      if (pause === PAUSE_MS && retryMs > 0) {
        console.warn(`fencepost: a request to ${this.url} failed: ${failure.message}; trying again`);
      }
      // Half of it by chance, so that clients do not come back together.
      const chance = pause * (0.5 + Math.random() / 2);
      const wait = Math.max(chance, Math.min(after, MAX_RETRY_AFTER_MS));
      if (Date.now() + wait > deadline) {
        if (failure instanceof ApiError) throw failure;
        throw new Error(`${this.url} was not reached: ${failure.message}`, { cause: failure });
      }
      await sleep(wait, undefined, { signal });
    }
  }

  async #send(path, options) {
    const reply = await fetch(this.url + path, options);
    this.#project = reply.headers.get("fencepost-project") ?? this.#project;
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

  /**
   * Stores a job once, however often the request must be sent, and returns it. In a handler, another
   * attempt that enqueues the same stores no second job.
   */
  enqueue(jobType, payload = null, options = {}) {
    const { idempotencyKey, traceparent, retryMs, ...fields } = options;
    const body = { job_type: jobType, payload, ...fields };
    const headers = { "idempotency-key": idempotencyKey ?? newKey(body) };
    const trace = traceparent ?? currentTraceparent.getStore();
    if (trace) headers.traceparent = trace;
    return this.request("POST", "/v1/jobs", body, { headers, retryMs });
  }

  /** Stores all of these jobs, or none. */
  async enqueueMany(jobs, { idempotencyKey, retryMs } = {}) {
    const body = { jobs };
    const headers = { "idempotency-key": idempotencyKey ?? newKey(body) };
    return (await this.request("POST", "/v1/jobs/batch", body, { headers, retryMs })).jobs;
  }

  /** All items of a list, page by page: `items("/v1/jobs?q=state:pending")`. */
  async *items(path) {
    const begins = path.includes("?") ? "&" : "?";
    let at = "";
    do {
      const page = await this.request("GET", path + at);
      yield* Object.values(page).find(Array.isArray);
      at = page.next_cursor && `${begins}cursor=${encodeURIComponent(page.next_cursor)}`;
    } while (at);
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
