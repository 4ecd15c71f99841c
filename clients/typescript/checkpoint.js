// How far a job has come: stored by one attempt, and found by the next.

import { ApiError } from "./client.js";

/** A checkpoint was not stored: the project is full, or a later one is there. */
export class NotSaved extends Error {}

/** Stores it under the fence of the attempt. Returns the server's answer; none: the lease is lost. */
export async function save(client, fence, checkpoint, sequence) {
  const body = { ...fence, checkpoint: checkpoint ?? null, checkpoint_sequence: sequence };
  let answer = {};
  try {
    answer = await client.request("POST", "/v1/workers/heartbeat", body);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 409) return undefined;
    if (!error.refuses("checkpoint") || !error.message.includes("unknown")) throw error;
  }
  if (answer.checkpoint === undefined) {
    // Version 0.2.0 or older.
    console.warn("fencepost: the server is too old for checkpoints");
  } else if (answer.checkpoint !== "stored") {
    throw new NotSaved(`the checkpoint is ${answer.checkpoint}`);
  }
  return answer;
}

/** The checkpoint of a job, with the results of its steps. */
export function withSteps(checkpoint) {
  const there = checkpoint ?? {};
  if (typeof there !== "object" || Array.isArray(there)) {
    throw new Error("the checkpoint of a job with steps must be an object");
  }
  return { ...there, steps: there.steps ?? {} };
}
