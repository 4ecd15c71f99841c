// A worker that greets, and a producer: `node greet.js`, `node greet.js enqueue 10`.

import { setTimeout as sleep } from "node:timers/promises";

import { Client, type Job, Snooze, Worker } from "fencepost";

const [command, count] = process.argv.slice(2);
const client = new Client();
if (command === "enqueue") {
  const seconds = process.env.RETRY_SECONDS;
  const retryMs = seconds === undefined ? undefined : Number(seconds) * 1000;
  for (let number = 0; number < Number(count); number++) {
    await client.enqueue("greet", { name: `number ${number}` }, { retryMs });
  }
  process.exit();
}

if (command === "many") {
  const jobs = Array.from({ length: Number(count) }, () => ({ job_type: "many" }));
  const stored = await client.enqueueMany(jobs);
  let found = 0;
  for await (const _ of client.items("/v1/jobs?q=type:many&limit=2")) found += 1;
  console.log(stored.length, found);
  process.exit();
}

interface Greeting {
  name?: string;
  fail?: boolean;
  sleep_seconds?: number;
  spin_seconds?: number;
  later?: number;
  steps?: number;
  hangs_at?: number;
  children?: number;
  fails_first?: boolean;
}

async function inSteps(job: Job<Greeting | null>, steps: number, hangsAt?: number) {
  const ran: number[] = [];
  let sum = 0;
  for (let number = 1; number <= steps; number++) {
    sum += await job.step(`square ${number}`, async () => {
      if (number === hangsAt && job.attempt === 1) await sleep(60_000);
      ran.push(number);
      return number * number;
    });
  }
  return { ran, sum };
}

const worker = new Worker({
  queues: ["default"],
  concurrency: Number(process.env.CONCURRENCY ?? 1),
  leaseSeconds: Number(process.env.FENCEPOST_LEASE_SECONDS ?? 30),
});

worker.job<Greeting | null>("greet", async (job) => {
  const { attempt, payload, signal } = job;
  const { name = "world", fail = false, sleep_seconds = 0, spin_seconds = 0 } = payload ?? {};
  const { later, steps, hangs_at, children = 0, fails_first = false } = payload ?? {};
  if (steps !== undefined) return inSteps(job, steps, hangs_at);
  await sleep(sleep_seconds * 1000, undefined, { signal });
  // The event loop does nothing else meanwhile.
  for (const until = Date.now() + spin_seconds * 1000; Date.now() < until; );
  for (let n = 0; n < children; n++) await client.enqueue("child", { of: "greet" });
  if (later !== undefined && attempt === 1) throw new Snooze(later);
  if (fail || (fails_first && attempt === 1)) throw new Error("asked to fail");
  return { greeting: `Hello, ${name}!` };
});

await worker.run({ onReady: () => console.log("ready") });
