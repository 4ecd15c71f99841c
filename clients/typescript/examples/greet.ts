// A worker that greets, and a producer: `node greet.js`, `node greet.js enqueue 10`.

import { setTimeout as sleep } from "node:timers/promises";

import { Client, Snooze, Worker } from "fencepost";

const [command, count] = process.argv.slice(2);
if (command === "enqueue") {
  const client = new Client();
  for (let number = 0; number < Number(count); number++) {
    await client.enqueue("greet", { name: `number ${number}` });
  }
  process.exit();
}

interface Greeting {
  name?: string;
  fail?: boolean;
  sleep_seconds?: number;
  later?: number;
}

const worker = new Worker({
  queues: ["default"],
  concurrency: Number(process.env.CONCURRENCY ?? 1),
  leaseSeconds: Number(process.env.FENCEPOST_LEASE_SECONDS ?? 30),
});

worker.job<Greeting | null>("greet", async ({ attempt, payload, signal }) => {
  const { name = "world", fail = false, sleep_seconds = 0, later } = payload ?? {};
  await sleep(sleep_seconds * 1000, undefined, { signal });
  if (later !== undefined && attempt === 1) throw new Snooze(later);
  if (fail) throw new Error("asked to fail");
  return { greeting: `Hello, ${name}!` };
});

await worker.run({ onReady: () => console.log("ready") });
