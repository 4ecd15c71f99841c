// The bulk lifecycle of other queues: 100 jobs an enqueue from eight producers, workers at the same
// time, handlers that do nothing. Prints jobs per second. Called by scripts/peers.sh.

import { EventEmitter } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { Queue, Worker } from "bullmq";
import { Logger, makeWorkerUtils, run } from "graphile-worker";
import { PgBoss } from "pg-boss";

const JOBS = Number(process.env.PEER_JOBS ?? "60000");
const BATCH = 100;
const PRODUCERS = 8;
/** A round that takes longer has lost a job. */
const MAX_ROUND_MS = 120_000;
const ROUNDS = Number(process.env.PEER_ROUNDS ?? "5");
const payload = { to: "ada@example.com", text: "x".repeat(180) };
const connectionString = process.env.PEER_DATABASE_URL;
const redis = { path: process.env.PEER_REDIS_SOCKET };

/** Enqueues all jobs from all producers; `done` shows how many have ended. */
async function measure(enqueue, done) {
  const started = performance.now();
  const producing = Array.from({ length: PRODUCERS }, async (_, producer) => {
    for (let at = producer; at < JOBS / BATCH; at += PRODUCERS) await enqueue();
  });
  while (done() < JOBS) {
    const isLate = performance.now() - started > MAX_ROUND_MS;
    if (isLate) throw new Error(`only ${done()} of ${JOBS} jobs were done`);
    await sleep(1);
  }
  const seconds = (performance.now() - started) / 1000;
  await Promise.all(producing);
  if (done() !== JOBS) throw new Error(`${done()} of ${JOBS} jobs were done`);
  return JOBS / seconds;
}

async function graphile() {
  // It writes a line for each job otherwise.
  const logger = new Logger(() => () => {});
  const utils = await makeWorkerUtils({ connectionString, logger });
  await utils.migrate();
  let done = 0;
  const events = new EventEmitter();
  events.on("job:complete", () => void (done += 1));
  const runner = await run({
    events,
    logger,
    connectionString,
    concurrency: 24,
    noHandleSignals: true,
    preset: {
      worker: {
        concurrentJobs: 24,
        maxPoolSize: 26,
        localQueue: { size: 500 },
        completeJobBatchDelay: 0,
        failJobBatchDelay: 0,
      },
    },
    taskList: { noop: () => {} },
  });
  const specs = Array.from({ length: BATCH }, () => ({ identifier: "noop", payload }));
  const rate = await measure(() => utils.addJobs(specs), () => done);
  await runner.stop();
  await utils.release();
  return rate;
}

async function pgBoss() {
  const boss = new PgBoss({ connectionString, max: 20 });
  boss.on("error", (error) => console.error(error));
  await boss.start();
  const queue = `peer-${Date.now()}`;
  await boss.createQueue(queue);
  let done = 0;
  const jobs = Array.from({ length: BATCH }, () => ({ data: payload }));
  const working = Array.from({ length: 8 }, async () => {
    while (done < JOBS) {
      const fetched = await boss.fetch(queue, { batchSize: 50 });
      if (fetched.length === 0) {
        await sleep(1);
        continue;
      }
      await boss.complete(queue, fetched.map((it) => it.id));
      done += fetched.length;
    }
  });
  const rate = await measure(() => boss.insert(queue, jobs), () => done);
  await Promise.all(working);
  await boss.stop({ graceful: false });
  return rate;
}

async function bullmq() {
  const name = `peer-${Date.now()}`;
  const queue = new Queue(name, { connection: redis });
  let done = 0;
  const options = { connection: { ...redis, maxRetriesPerRequest: null }, concurrency: 50 };
  const workers = Array.from({ length: 2 }, () => new Worker(name, async () => {}, options));
  workers.forEach((it) => it.on("completed", () => void (done += 1)));
  const jobs = Array.from({ length: BATCH }, () => ({ name: "noop", data: payload }));
  const rate = await measure(() => queue.addBulk(jobs), () => done);
  await Promise.all(workers.map((it) => it.close()));
  await queue.obliterate({ force: true });
  await queue.close();
  return rate;
}

const peers = { "graphile-worker, batched": graphile, "pg-boss, fetch 50": pgBoss, BullMQ: bullmq };
const only = process.env.PEER_ONLY ?? "";
for (const [name, peer] of Object.entries(peers)) {
  if (!name.includes(only)) continue;
  const rates = [];
  for (let round = 0; round < ROUNDS; round += 1) rates.push(await peer());
  rates.sort((a, b) => a - b);
  const [low, middle, high] = [0, Math.floor(ROUNDS / 2), ROUNDS - 1].map((it) =>
    Math.round(rates[it]),
  );
  console.log(`${name}: ${middle} jobs/s (${low} to ${high})`);
}
process.exit(0);
