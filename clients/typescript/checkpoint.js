// How far a job has come: stored by one attempt, and found by the next.

import { ApiError } from "./client.js";

/** A checkpoint was not stored: the project is full, or a later one is there. */
export class NotSaved extends Error {}

/** Stores it under the fence of the attempt. Returns the server's answer; none: the lease is lost. */
export async function save(client, fence, checkpoint, sequence) {
  const body = { ...fence, checkpoint, checkpoint_sequence: sequence };
  let answer;
  try {
    answer = await client.request("POST", "/v1/workers/heartbeat", body);
  } catch (error) {
    if (error instanceof ApiError && error.status === 409) return undefined;
    throw error;
  }
  if (answer.checkpoint === undefined) {
    console.warn("fencepost: the server is too old for checkpoints");
  } else if (answer.checkpoint !== "stored") {
    throw new NotSaved(`the checkpoint is ${answer.checkpoint}`);
  }
  return answer;
}

/** Runs `work` if no attempt has done so, and returns its result: the checkpoint has it. */
export async function step(job, name, work) {
  const before = job.checkpoint ?? {};
  if (typeof before !== "object" || Array.isArray(before)) {
    throw new Error("the checkpoint of a job with steps must be an object");
  }
  const steps = before.steps ?? {};
  if (Object.hasOwn(steps, name)) return steps[name];
  job.check();
  const result = (await work()) ?? null;
  await job.save({ ...before, steps: { ...steps, [name]: result } });
  return result;
}
