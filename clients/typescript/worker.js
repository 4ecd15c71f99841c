// A worker: polls for jobs, keeps their leases, shows their fences, and drains on SIGTERM.

import { randomBytes, randomUUID } from "node:crypto";
import { hostname } from "node:os";
import process from "node:process";
import { setTimeout as sleep } from "node:timers/promises";

import { ApiError, Client, currentJob, currentTraceparent } from "./client.js";
import {
  Cancelled,
  cut,
  Job,
  NotRetryable,
  RateLimited,
  Released,
  RetryAfter,
  Snooze,
} from "./job.js";
import { Pacemaker } from "./pacemaker.js";

/** How long a poll waits. Shorter than the 30 s after which a silent worker counts as lost. */
const POLL_WAIT_SECONDS = 20;
/** Jobs that one poll asks for at most: the server's limit. */
const MAX_CAPACITY = 50;
/** Between two heartbeats at most. */
const BEAT_SECONDS = 5;
/**
 * The longest time between two calls while jobs run, as the worker registers it. After three times
 * that without a call its jobs return.
 */
const MAX_CALL_SECONDS = 10;
/** How soon the jobs of a worker that has died are run again; heartbeats keep the leases of others. */
const LEASE_SECONDS = 30;
/** Heartbeats that may fail before a lease ends. */
const BEATS_A_LEASE = 3;
/** Jobs that one worker runs at the same time at most. */
const MAX_CONCURRENCY = 100;
/** How long an ack is sent again while the server does not answer. */
const ACK_RETRY_MS = 600_000;
/** What handlers may still take after the grace period. */
const LAST_MS = 2_000;
/** How long the last call may take. */
const DEREGISTER_MS = 3_000;
/** Longest pause that a handler may choose: the server's limit. */
const MAX_RETRY_PAUSE_SECONDS = 30 * 86_400;
/** The same for `RateLimited`. */
const MAX_RATE_LIMITED_SECONDS = 86_400;
/** Characters of an error's stack. */
const MAX_STACK_CHARACTERS = 8_000;

/** An id in the order of time, so that the server's index stays small. */
function pollId() {
  const time = Date.now().toString(16).padStart(12, "0");
  const random = randomUUID();
  return `${time.slice(0, 8)}-${time.slice(8)}-7${random.slice(15)}`;
}

export class Worker {
  #handlers = new Map();
  #active = new Set();
  #isStopping = false;
  #isSuspended = false;
  #isQuiet = false;
  #parked = new AbortController();
  #failure;
  #pacemaker;
  /** Slots without a job, jobs that no slot has taken, and the poll that one of them sends for all. */
  #idle = 0;
  #given = [];
  #unanswered;
  #isAsking = false;
  #changed = later();

  constructor(options = {}) {
    const {
      queues = ["default"],
      concurrency = 10,
      labels,
      leaseSeconds = LEASE_SECONDS,
      graceSeconds = 25,
    } = options;
    if (!(concurrency >= 1 && concurrency <= MAX_CONCURRENCY)) {
      throw new RangeError(`concurrency must be between 1 and ${MAX_CONCURRENCY}`);
    }
    this.client = options.client ?? new Client();
    this.id = `${hostname()}-${process.pid}-${randomBytes(4).toString("hex")}`;
    this.concurrency = concurrency;
    this.graceSeconds = graceSeconds;
    this.wanted = { queues, ...(labels && { labels }) };
    this.lease = { lease_seconds: leaseSeconds };
    this.beatMs = Math.min(BEAT_SECONDS, leaseSeconds / BEATS_A_LEASE) * 1000;
  }

  /** Makes a function the handler of a job type. What it returns is the job's result. */
  job(jobType, handler) {
    this.#handlers.set(jobType, handler);
    return this;
  }

  /** Takes no more jobs, and lets `run` return when those that run have ended. */
  stop() {
    this.#isStopping = true;
    this.#change();
  }

  /** Works until SIGTERM, SIGINT or `stop`. Running jobs have `graceSeconds` to end. */
  async run({ onReady = () => {} } = {}) {
    if (this.#handlers.size === 0) {
      throw new Error("the worker has no handlers: it would take jobs of every type");
    }
    this.wanted.job_types = [...this.#handlers.keys()].sort();
    await this.#register();
    const forget = this.#listen();
    const done = new AbortController();
    this.#pacemaker = new Pacemaker(this.client, this.id, this.beatMs, ({ answer, begun }) =>
      this.#take(answer, performance.now() - (Date.now() - begun)),
    );
    const slots = Promise.all(Array.from({ length: this.concurrency }, () => this.#serve()));
    this.#beat(done.signal);
    onReady();
    try {
      await Promise.race([slots, this.#stopped()]);
      const grace = sleep(this.graceSeconds * 1000, undefined, { signal: done.signal });
      await Promise.race([slots, grace.catch(() => {})]);
      for (const job of this.#active) job.stop(new Released("the worker stops"));
      const last = sleep(LAST_MS, undefined, { signal: done.signal });
      await Promise.race([slots, last.catch(() => {})]);
    } finally {
      done.abort();
      await this.#pacemaker.end();
      forget();
      await this.#deregister();
    }
    if (this.#failure) throw this.#failure;
  }

  async #register() {
    const path = "/v1/workers/register";
    const about = {
      worker_id: this.id,
      hostname: hostname(),
      pid: process.pid,
      sdk_version: "fencepost-typescript/0.2.0",
      concurrency: this.concurrency,
      ...this.wanted,
    };
    try {
      await this.client.request("POST", path, { ...about, beat_seconds: MAX_CALL_SECONDS });
    } catch (error) {
      // A server of version 0.2.0 or older: a lost worker's jobs wait for their leases.
      if (!(error instanceof ApiError && error.refuses("beat_seconds"))) throw error;
      await this.client.request("POST", path, about);
    }
  }

  /** Releases what still runs. */
  async #deregister() {
    const limits = { timeoutMs: DEREGISTER_MS, retryMs: DEREGISTER_MS };
    const body = { worker_id: this.id };
    try {
      await this.client.request("POST", "/v1/workers/deregister", body, limits);
    } catch (error) {
      // Its leases expire instead.
      console.warn(`fencepost: the worker was not deregistered: ${error.message}`);
    }
  }

  #listen() {
    const stop = () => (this.#isStopping ? process.exit(1) : this.stop());
    const suspend = (isSuspended) => () => {
      this.#isSuspended = isSuspended;
      this.#change();
    };
    const listeners = {
      SIGTERM: stop,
      SIGINT: stop,
      SIGTSTP: suspend(true),
      SIGCONT: suspend(false),
    };
    for (const [signal, listener] of Object.entries(listeners)) process.on(signal, listener);
    return () => {
      for (const [signal, listener] of Object.entries(listeners)) process.off(signal, listener);
    };
  }

  get #mayPoll() {
    return !this.#isStopping && !this.#isSuspended && !this.#isQuiet;
  }

  /** Ends parked polls if there must be none, and wakes what waits for a change. */
  #change() {
    if (!this.#mayPoll) this.#parked.abort();
    else if (this.#parked.signal.aborted) this.#parked = new AbortController();
    this.#wake();
  }

  #wake() {
    this.#changed.resolve();
    this.#changed = later();
  }

  async #stopped() {
    while (!this.#isStopping) await this.#changed.promise;
  }

  /** Obeys a directive of the server. */
  #obey(state) {
    const isQuiet = state === "quiet";
    if (state === "terminate") this.stop();
    else if (state && isQuiet !== this.#isQuiet && !this.#isSuspended) {
      this.#isQuiet = isQuiet;
      this.#change();
    }
  }

  /** What heartbeats say. The pacemaker knows it, too, in case that the event loop is blocked. */
  #shown() {
    const jobs = [...this.#active].filter((it) => !it.isLost);
    const active_jobs = jobs.map((it) => ({ ...it.fence(), progress: it.progress }));
    const state = this.#isSuspended ? "quiet" : "running";
    this.#pacemaker?.note(state, active_jobs);
    return { jobs, state, active_jobs };
  }

  /** Does what the answer to a heartbeat says, which was sent then. */
  #take(answer, begun) {
    for (const { job_id, status } of answer.jobs ?? []) {
      const job = [...this.#active].find((it) => it.id === job_id && !it.isLost);
      if (job) job.renewed = Math.max(job.renewed, begun);
      if (status === "lost") job?.lose();
      else if (status === "cancel") job?.stop(new Cancelled("it was cancelled"));
    }
    this.#obey(answer.state);
  }

  async #beat(signal) {
    while (!signal.aborted) {
      // It keeps the process alive, also while the worker is quiet.
      await sleep(this.beatMs, undefined, { signal }).catch(() => {});
      const { jobs, state, active_jobs } = this.#shown();
      // While it polls, the polls show that it lives.
      if (signal.aborted || (jobs.length === 0 && this.#mayPoll)) continue;
      const body = { worker_id: this.id, state, active_jobs };
      const begun = performance.now();
      try {
        // One that hangs must not take the time of the next ones.
        const limits = { timeoutMs: this.beatMs, retryMs: 0 };
        const path = "/v1/workers/heartbeat";
        this.#take(await this.client.request("POST", path, body, limits), begun);
      } catch (error) {
        console.warn(`fencepost: a heartbeat failed: ${error.message}`);
      }
      // A slow server blocks no event loop.
      this.#shown();
      for (const job of jobs) {
        if (job.isOverdue) job.stop(new Cancelled("its lease was not renewed"));
      }
    }
  }

  #poll(wait_seconds) {
    return { ...this.wanted, ...this.lease, wait_seconds, poll_id: pollId() };
  }

  async #serve() {
    for (let job = await this.#next(); job; job = await this.#next()) {
      let jobs = [job];
      while (jobs.length > 0) {
        const next = await this.#work(new Job(jobs[0], this));
        jobs = [...next, ...jobs.slice(1)];
      }
    }
  }

  /** The next job of a slot; undefined: the worker stops. One poll asks for all idle slots. */
  async #next() {
    this.#idle++;
    try {
      while (this.#given.length === 0) {
        if (this.#isStopping) return undefined;
        if (this.#isAsking || !this.#mayPoll) {
          await this.#changed.promise;
          continue;
        }
        this.#isAsking = true;
        await this.#ask();
        this.#isAsking = false;
        this.#wake();
      }
      return this.#given.shift();
    } finally {
      this.#idle--;
    }
  }

  async #ask() {
    const { signal } = this.#parked;
    try {
      // A poll without an answer is repeated with its id: it gets the same jobs.
      this.#unanswered ??= {
        worker_id: this.id,
        ...this.#poll(POLL_WAIT_SECONDS),
        capacity: Math.min(this.#idle, MAX_CAPACITY),
      };
      const options = { waitSeconds: POLL_WAIT_SECONDS, signal };
      const poll = this.#unanswered;
      const answer = await this.client.request("POST", "/v1/workers/poll", poll, options);
      this.#unanswered = undefined;
      this.#given = answer.jobs;
      this.#obey(answer.state);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && !error.isRetryable) {
        // Handlers that run have their grace period.
        this.#failure ??= error;
        this.stop();
      }
      console.warn(`fencepost: a poll failed: ${error.message}`);
    }
  }

  async #work(job) {
    // This lease proves that an earlier one of the same job has ended.
    for (const it of this.#active) if (it.id === job.id) it.lose();
    this.#active.add(job);
    this.#shown();
    const begun = Date.now();
    try {
      const handler = this.#handlers.get(job.jobType);
      const end = await currentTraceparent
        .run(job.traceparent, async () => currentJob.run(job, handler, job))
        .then((result) => ({
          status: "succeeded",
          result: JSON.parse(JSON.stringify(result ?? null)),
        }))
        .catch((thrown) => failed(reason(thrown, job), job));
      job.isDone = true;
      end.duration_ms = Date.now() - begun;
      return job.isLost ? [] : await this.#ack(job, end);
    } catch (error) {
      // 409: another attempt decides.
      console.warn(`fencepost: the outcome of ${job.id} was not taken: ${error.message}`);
      return [];
    } finally {
      this.#active.delete(job);
      this.#shown();
    }
  }

  async #ack(job, end) {
    let body = { worker_id: this.id, ...job.fence(), ...end };
    if (this.#mayPoll) {
      const { signal } = this.#parked;
      // Another slot polls for those that have no job.
      const waitSeconds = this.concurrency === 1 ? POLL_WAIT_SECONDS : 0;
      const options = { waitSeconds, retryMs: ACK_RETRY_MS, signal };
      try {
        const then = { ...body, then_poll: this.#poll(waitSeconds) };
        const { poll } = await this.client.request("POST", "/v1/workers/ack", then, options);
        this.#obey(poll?.state);
        return poll?.jobs ?? [];
      } catch (error) {
        if (error instanceof ApiError && [400, 413].includes(error.status)) {
          const refused = { type: "ResultRefused", message: error.message };
          // A handler that has done its work would not make its result smaller.
          const retryable = end.status !== "succeeded" && end.retryable !== false;
          const report = { status: "failed", error: refused, retryable };
          body = { worker_id: this.id, ...job.fence(), ...report };
        } else if (!signal.aborted) {
          throw error;
        }
        // It may have been recorded: an ack that shows its fence may be repeated.
      }
    }
    const options = { retryMs: this.#isStopping ? this.graceSeconds * 1000 : ACK_RETRY_MS };
    await this.client.request("POST", "/v1/workers/ack", body, options);
    return [];
  }
}

/** Calls that were given the job's signal throw an `AbortError` instead of the reason. */
function reason(thrown, job) {
  return job.signal.aborted && thrown?.name === "AbortError" ? job.signal.reason : thrown;
}

/** The outcome of a handler that threw. */
function failed(thrown, job) {
  const isOverdue = thrown instanceof Cancelled && job.isOverdue;
  if (thrown instanceof Released || isOverdue) return { status: "released" };
  if (thrown instanceof Snooze) {
    return { status: "released", delay_seconds: seconds(thrown.seconds) };
  }
  if (thrown instanceof RateLimited) {
    const wanted = Math.min(Math.max(seconds(thrown.retryAfter), 1), MAX_RATE_LIMITED_SECONDS);
    return { status: "rate_limited", retry_after_seconds: wanted, scope: thrown.scope };
  }
  const error = thrown instanceof Error ? thrown : new Error(String(thrown));
  const stack_trace = cut(error.stack ?? "", MAX_STACK_CHARACTERS);
  return {
    status: "failed",
    error: { type: error.constructor.name, message: error.message.toWellFormed(), stack_trace },
    retryable: !(error instanceof NotRetryable),
    ...(error instanceof RetryAfter && { retry_after_seconds: seconds(error.seconds) }),
  };
}

/** Whole seconds that the server takes. */
function seconds(wanted) {
  return Math.min(Math.max(Math.ceil(wanted), 0), MAX_RETRY_PAUSE_SECONDS);
}

/** A promise and the function that resolves it. */
function later() {
  let resolve;
  const promise = new Promise((done) => {
    resolve = done;
  });
  return { promise, resolve };
}
