// A leased job, and what its handler may throw.

import { createHash } from "node:crypto";

import { save, withSteps } from "./checkpoint.js";

/** Text of one log chunk; the server's limit is 64 KiB. */
const MAX_LOG_CHARACTERS = 15_000;

/** The job was cancelled, or its lease is lost: stop working on it. */
export class Cancelled extends Error {}
/** The worker stops: the job goes back to its queue without a failure. */
export class Released extends Error {}
/** Throw it to put the job off: it is ready again after that time. No failure is counted. */
export class Snooze extends Error {
  constructor(seconds) {
    super(`put off for ${seconds} s`);
    this.seconds = seconds;
  }
}
/** Throw it when the job cannot succeed: it becomes a dead letter at once. */
export class NotRetryable extends Error {}
/** Throw it to choose when the job is retried. */
export class RetryAfter extends Error {
  constructor(seconds, message = `again in ${seconds} s`) {
    super(message);
    this.seconds = seconds;
  }
}

/**
 * Throw it when what you call asks for fewer requests: the job's group waits, or its queue if the
 * job has no group or `scope` is "queue". No failure is counted.
 */
export class RateLimited extends Error {
  constructor(retryAfter = 5, scope = undefined) {
    super(`asked to wait ${retryAfter} s`);
    this.retryAfter = retryAfter;
    this.scope = scope;
  }
}

/** A leased job. `data` is the job as the server sent it. */
export class Job {
  #worker;
  #begun;
  #sequence = 0;
  #saved;
  /** The number of the last checkpoint that was stored: where another attempt begins. */
  #stored;
  #saving = Promise.resolve();
  /** How often this attempt has enqueued the same since a checkpoint. */
  #children = new Map();
  #stopped = new AbortController();

  constructor(data, worker) {
    this.data = data;
    this.id = data.id;
    this.jobType = data.job_type;
    this.payload = data.payload;
    this.attempt = data.attempt;
    this.tags = data.tags;
    this.parentResults = data.parent_results;
    this.traceparent = data.traceparent;
    /** How far earlier attempts have come, as `save` stored it. Undefined: nowhere. */
    this.checkpoint = data.checkpoint;
    this.#saved = data.checkpoint_sequence ?? 0;
    this.#stored = this.#saved;
    /** From 0 to 1; set it while you work. */
    this.progress = undefined;
    this.isLost = false;
    /** Its handler has ended. */
    this.isDone = false;
    /** When the lease was last renewed. */
    this.renewed = performance.now();
    this.#begun = this.renewed;
    this.#worker = worker;
  }

  /** Whether the lease was not renewed for its whole length: another worker may have the job. */
  get isOverdue() {
    return performance.now() - this.renewed > this.data.lease_seconds * 1000;
  }

  /** Aborted when the job must stop; its reason is `Cancelled` or `Released`. */
  get signal() {
    return this.#stopped.signal;
  }

  stop(reason) {
    this.#stopped.abort(reason);
  }

  lose() {
    this.isLost = true;
    if (!this.isDone) this.#warn();
    this.stop(new Cancelled("its lease is lost"));
  }

  #warn() {
    const limit = this.data.timeout_seconds;
    const hasOutlived = performance.now() - this.#begun >= limit * 1000;
    const why = hasOutlived ? `has outlived its timeout of ${limit} s` : "has lost its lease";
    console.warn(`fencepost: job ${this.id} ${why}: its outcome will not count`);
  }

  /** Throws when the job must stop. */
  check() {
    this.signal.throwIfAborted();
  }

  /** What proves that this is the current attempt. */
  fence() {
    return { job_id: this.id, attempt: this.attempt, lease_id: this.data.lease_id };
  }

  /**
   * The idempotency key of what its handler enqueues next: the same in each attempt that begins at
   * the same checkpoint.
   */
  childKey(body) {
    const digest = createHash("sha256").update(JSON.stringify(body)).digest("hex").slice(0, 32);
    const place = `${this.id}:${this.#stored}:${digest}`;
    const number = (this.#children.get(place) ?? 0) + 1;
    this.#children.set(place, number);
    return `${place}:${number}`;
  }

  /** Stores how far the job has come: JSON of at most 64 KiB, for the next attempt. */
  save(checkpoint) {
    return this.#saveNext(() => checkpoint);
  }

  /** Runs `work` if no attempt has done so, and returns its result: the checkpoint has it. */
  async step(name, work) {
    const { steps } = withSteps(this.checkpoint);
    if (Object.hasOwn(steps, name)) return steps[name];
    this.check();
    const result = (await work()) ?? null;
    // Other steps may have ended meanwhile.
    await this.#saveNext(() => {
      const after = withSteps(this.checkpoint);
      return { ...after, steps: { ...after.steps, [name]: result } };
    });
    return result;
  }

  /** One after the other, so that none takes the place of a later one. */
  #saveNext(make) {
    const saved = this.#saving.then(async () => {
      const checkpoint = make();
      const fence = { worker_id: this.#worker.id, ...this.fence() };
      const answer = await save(this.#worker.client, fence, checkpoint, ++this.#saved);
      if (answer === undefined) {
        this.lose();
        this.check();
      }
      this.checkpoint = checkpoint;
      this.#stored = this.#saved;
      if (answer.status === "cancel") this.stop(new Cancelled("it was cancelled"));
    });
    this.#saving = saved.catch(() => {});
    return saved;
  }

  /** Adds a line to the job's logs. */
  async log(text) {
    const data = `${cut(text, MAX_LOG_CHARACTERS)}\n`;
    const sequence = this.#sequence++;
    const chunk = {
      job_id: this.id,
      attempt: this.attempt,
      sequence,
      data,
      timestamp_ms: Date.now(),
    };
    const body = { worker_id: this.#worker.id, chunks: [chunk] };
    await this.#worker.client.request("POST", "/v1/workers/logs", body);
  }
}

/** The beginning of a text, without half a character at its end. */
export function cut(text, characters) {
  return text.slice(0, characters).toWellFormed();
}
