// Client and worker for Fencepost, a job queue with an HTTP API.

export { NotSaved } from "./checkpoint.js";
export { ApiError, Client } from "./client.js";
export { InvalidWebhook, verifyWebhook } from "./webhooks.js";
export {
  Cancelled,
  Job,
  NotRetryable,
  RateLimited,
  Released,
  RetryAfter,
  Snooze,
} from "./job.js";
export { Worker } from "./worker.js";
