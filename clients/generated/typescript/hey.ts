// A job from enqueue to ack, through the client that hey-api makes. With the argument `refused` it
// also enqueues until it is refused, and again when it may.
import assert from "node:assert/strict";
import { setTimeout } from "node:timers/promises";
import { client } from "./made/hey/client.gen";
import { jobsCreate, jobsCreateBatch, jobsGet, workersAck, workersHeartbeat, workersPoll } from "./made/hey";

const [queue, worker_id] = ["client-hey-api", "hey-api"];
client.setConfig({ baseUrl: process.env.FENCEPOST_URL, auth: () => process.env.FENCEPOST_KEY });

const made = await jobsCreate({ body: { job_type: "greet", payload: { name: "Ada" }, queue }, throwOnError: true });
const polled = await workersPoll({ body: { worker_id, queues: [queue], wait_seconds: 5 }, throwOnError: true });
const leased = polled.data.jobs[0];
assert.equal(leased.id, made.data.id);
const fence = { job_id: leased.id, worker_id, attempt: leased.attempt, lease_id: leased.lease_id };
const beat = await workersHeartbeat({ body: { ...fence, progress: 0.5 }, throwOnError: true });
assert.equal(beat.data.status, "ok");
const acked = await workersAck({ body: { ...fence, status: "succeeded" }, throwOnError: true });
assert.equal(acked.data.action, "done");
const done = await jobsGet({ path: { job_id: leased.id }, throwOnError: true });
assert.equal(done.data.state, "succeeded");
const missing = await jobsGet({ path: { job_id: "job_01m7w3ha3aextt8pkwwdmxsmqw" } });
assert.equal(missing.error?.error.code, "job_not_found");
if (process.argv.includes("refused")) {
  // Together more than the plan `free` allows in a minute, with what comes back meanwhile.
  const [batches, batchJobs] = [20, 500];
  const jobs = Array.from({ length: batchJobs }, () => ({ job_type: "other", queue: "other" }));
  const enqueue = () => jobsCreateBatch({ body: { jobs } });
  let answer = await enqueue();
  for (let left = batches; answer.data && left > 0; left--) answer = await enqueue();
  assert.equal(answer.error?.error.code, "rate_limit_exceeded");
  await setTimeout(Number(answer.response?.headers.get("retry-after")) * 1000);
  assert((await enqueue()).data);
}
console.log("worked", leased.id);
