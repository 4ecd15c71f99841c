// A job from enqueue to ack, through openapi-fetch over the types that openapi-typescript makes.
// With the argument `refused` it also enqueues until it is refused, and again when it may.
import assert from "node:assert/strict";
import { setTimeout } from "node:timers/promises";
import createClient from "openapi-fetch";
import type { paths } from "./made/schema";

const [queue, worker_id] = ["client-openapi-fetch", "openapi-fetch"];
const client = createClient<paths>({
  baseUrl: process.env.FENCEPOST_URL,
  headers: { Authorization: `Bearer ${process.env.FENCEPOST_KEY}` },
});

const made = await client.POST("/v1/jobs", { body: { job_type: "greet", payload: { name: "Ada" }, queue } });
assert(made.data, JSON.stringify(made.error));
const polled = await client.POST("/v1/workers/poll", { body: { worker_id, queues: [queue], wait_seconds: 5 } });
const leased = polled.data?.jobs[0];
assert(leased && leased.id === made.data.id);
const fence = { job_id: leased.id, worker_id, attempt: leased.attempt, lease_id: leased.lease_id };
const beat = await client.POST("/v1/workers/heartbeat", { body: { ...fence, progress: 0.5 } });
assert.equal(beat.data?.status, "ok");
const acked = await client.POST("/v1/workers/ack", { body: { ...fence, status: "succeeded", result: { greeting: "Hello" } } });
assert.equal(acked.data?.action, "done");
const done = await client.GET("/v1/jobs/{job_id}", { params: { path: { job_id: leased.id } } });
assert.equal(done.data?.state, "succeeded");
assert.deepEqual(done.data?.result, { greeting: "Hello" });
const missing = await client.GET("/v1/jobs/{job_id}", { params: { path: { job_id: "job_01m7w3ha3aextt8pkwwdmxsmqw" } } });
assert.equal(missing.error?.error.code, "job_not_found");
if (process.argv.includes("refused")) {
  // Together more than the plan `free` allows in a minute, with what comes back meanwhile.
  const [batches, batchJobs] = [20, 500];
  const jobs = Array.from({ length: batchJobs }, () => ({ job_type: "other", queue: "other" }));
  const enqueue = () => client.POST("/v1/jobs/batch", { body: { jobs } });
  let answer = await enqueue();
  for (let left = batches; answer.data && left > 0; left--) answer = await enqueue();
  assert.equal(answer.error?.error.code, "rate_limit_exceeded");
  await setTimeout(Number(answer.response.headers.get("retry-after")) * 1000);
  assert((await enqueue()).data);
}
console.log("worked", leased.id);
