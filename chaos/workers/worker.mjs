// A worker of a run: it fails or works too long now and then, and says what it does.

import { existsSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";

const { Worker } = await import(process.env.CHAOS_LIBRARY);

const worker = new Worker({ queues: ["node"], concurrency: 2, leaseSeconds: 2 });

worker.job("chaos", async (job) => {
  const say = (more) =>
    console.log(JSON.stringify({ ...job.fence(), tenant: job.payload.tenant, ...more }));
  say({});
  await sleep(Math.random() < 0.02 ? 3500 : Math.random() * 40);
  if (Math.random() < 0.15 && !existsSync(process.env.CHAOS_HEALING)) {
    say({ end: "failed" });
    throw new Error("a failure");
  }
  say({ end: "succeeded" });
  return { attempt: job.attempt };
});

await worker.run();
