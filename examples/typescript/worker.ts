// A Fencepost worker that uses only Node's built-in modules and fetch. See docs/worker-guide.md.

import { randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";

const url = process.env.FENCEPOST_URL ?? "http://127.0.0.1:7070";
const key = process.env.FENCEPOST_KEY;
const leaseSeconds = Number(process.env.FENCEPOST_LEASE_SECONDS ?? "30");
const graceMs = 25_000;
const worker_id = `${hostname()}-${process.pid}-${randomUUID().slice(0, 8)}`;

interface Job {
  id: string;
  payload: { name?: string; sleep_seconds?: number; fail?: boolean } | null;
  attempt: number;
  lease_id: string;
  heartbeat_interval_seconds: number;
}

/** The server refused the request permanently. */
class Refused extends Error {}
/** The grace period has ended: the job is released. */
class Released extends Error {}

/** Retries transient errors (network, 408, 429, 5xx) after a pause; throws on other 4xx. */
async function call<T>(path: string, body: unknown): Promise<T> {
  for (let pause = 500; ; pause = Math.min(pause * 2, 10_000)) {
    try {
      const reply = await fetch(`${url}/v1/workers/${path}`, {
        method: "POST",
        headers: { Authorization: `Bearer ${key}`, "Content-Type": "application/json" },
        body: JSON.stringify(body),
        signal: AbortSignal.timeout(40_000),
      });
      if (reply.ok) return (await reply.json()) as T;
      const text = await reply.text();
      if (reply.status < 500 && ![408, 429].includes(reply.status)) throw new Refused(text);
    } catch (error) {
      if (error instanceof Refused) throw error;
    }
    await sleep(pause);
  }
}

/** Your work. Pass `signal` to all calls that wait: it is aborted when the job must stop. */
async function handle(job: Job, signal: AbortSignal): Promise<unknown> {
  await sleep((job.payload?.sleep_seconds ?? 0) * 1000, undefined, { signal });
  if (job.payload?.fail) throw new TypeError("asked to fail");
  return { greeting: `Hello, ${job.payload?.name ?? "world"}!` };
}

const stopping = new AbortController(); // SIGTERM or SIGINT: take no more jobs
const graceOver = new AbortController(); // release running jobs

const queues = { queues: ["default"], job_types: ["greet"] };

/** What a poll asks for. */
function wanted() {
  return {
    ...queues,
    lease_seconds: leaseSeconds,
    // A short wait, so that SIGTERM takes effect soon. A repeat with the same poll_id gets the
    // same jobs.
    wait_seconds: 2,
    poll_id: randomUUID(),
  };
}

/** Works on a job. Returns the jobs that come with the answer to its ack. */
async function work(job: Job): Promise<Job[]> {
  const fence = { job_id: job.id, worker_id, attempt: job.attempt, lease_id: job.lease_id };
  const stop = new AbortController();
  let lost = false;
  const beating = setInterval(async () => {
    try {
      const reply = await call<{ status: string }>("heartbeat", fence);
      if (reply.status === "cancel") stop.abort(new Error("the job was cancelled"));
    } catch {
      lost = true; // 409: this worker no longer holds the job
      stop.abort(new Error("the lease is lost"));
    }
  }, job.heartbeat_interval_seconds * 1000);
  const release = () => stop.abort(new Released());
  graceOver.signal.addEventListener("abort", release);
  let ack: object;
  try {
    ack = { status: "succeeded", result: await handle(job, stop.signal) };
  } catch (error) {
    const cause = stop.signal.aborted ? stop.signal.reason : error;
    const failure = cause instanceof Error ? cause : new Error(String(cause));
    ack =
      failure instanceof Released
        ? { status: "released" }
        : { status: "failed", error: { type: failure.name, message: failure.message } };
  }
  clearInterval(beating);
  graceOver.signal.removeEventListener("abort", release);
  if (lost) return [];
  const then = stopping.signal.aborted ? {} : { then_poll: wanted() };
  try {
    const reply = await call<{ poll?: { jobs: Job[] } }>("ack", { ...fence, ...ack, ...then });
    return reply.poll?.jobs ?? [];
  } catch (error) {
    console.log(job.id, String(error)); // 409: this worker no longer holds the job
    return [];
  }
}

for (const name of ["SIGTERM", "SIGINT"] as const) {
  process.on(name, () => {
    stopping.abort();
    setTimeout(() => graceOver.abort(), graceMs).unref();
  });
}

// After three times that without a call its job returns, without a failure.
const beat_seconds = Math.max(5, Math.floor(leaseSeconds / 3));
await call("register", { worker_id, ...queues, concurrency: 1, beat_seconds });
console.log("ready");
let jobs: Job[] = [];
while (jobs.length > 0 || !stopping.signal.aborted) {
  const job = jobs.shift();
  if (job) {
    jobs.push(...(await work(job)));
  } else {
    jobs = (await call<{ jobs: Job[] }>("poll", { worker_id, ...wanted() })).jobs;
  }
}
await call("deregister", { worker_id });
