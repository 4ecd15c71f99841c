/** Any JSON. */
export type Json = null | boolean | number | string | Json[] | { [field: string]: Json };

/** Stable codes of errors. Later servers may send others. */
export type ErrorCode =
  | "invalid_request"
  | "invalid_cron_expression"
  | "invalid_timezone"
  | "unauthorized"
  | "invalid_credentials"
  | "invalid_code"
  | "passkey_refused"
  | "token_refused"
  | "invalid_token"
  | "forbidden"
  | "suspended"
  | "role_exceeds_caller"
  | "email_not_verified"
  | "code_required"
  | "step_up_required"
  | "signup_closed"
  | "not_found"
  | "key_not_found"
  | "account_not_found"
  | "invitation_not_found"
  | "session_not_found"
  | "identity_not_found"
  | "passkey_not_found"
  | "email_taken"
  | "slug_taken"
  | "cannot_remove_owner"
  | "keys_remain"
  | "rate_limit_exceeded"
  | "project_not_found"
  | "job_not_found"
  | "workflow_not_found"
  | "batch_not_found"
  | "worker_not_found"
  | "queue_not_found"
  | "alarm_not_found"
  | "endpoint_not_found"
  | "delivery_not_found"
  | "push_not_found"
  | "operation_not_found"
  | "recurring_job_not_found"
  | "method_not_allowed"
  | "request_timeout"
  | "invalid_state"
  | "worker_mismatch"
  | "stale_lease"
  | "fence_required"
  | "parent_terminal"
  | "batch_completed"
  | "unique_conflict"
  | "queue_in_use"
  | "group_ordered"
  | "group_not_found"
  | "group_not_blocked"
  | "shared_limit_not_found"
  | "shared_limit_in_use"
  | "precondition_failed"
  | "recurring_job_type_conflict"
  | "idempotency_key_reuse"
  | "idempotency_in_progress"
  | "quota_exceeded"
  | "queue_full"
  | "payload_too_large"
  | "unsupported_media_type"
  | "internal"
  | "overloaded"
  | "unavailable"
  | (string & {});

/** The server refused a request. */
export class ApiError extends Error {
  readonly status: number;
  readonly code: ErrorCode;
  /** Invalid fields. */
  readonly details: { field: string; message: string }[];
  readonly requestId: string | undefined;
  /** The whole error, as the server sent it. */
  readonly error: { [field: string]: Json };
  /** Whether the same request may succeed later. */
  readonly isRetryable: boolean;
  /** Whether a queue is full, or a quota is used up. */
  readonly isNoRoom: boolean;
  /** Whether the request was invalid because of this field. */
  refuses(field: string): boolean;
}

/** A job as `GET /v1/jobs/{id}` answers it. */
export interface JobRecord {
  id: string;
  job_type: string;
  queue: string;
  state: "scheduled" | "pending" | "processing" | "succeeded" | "dead_letter" | "cancelled";
  attempt: number;
  failures: number;
  result?: Json;
  [field: string]: unknown;
}

/** The other fields of `POST /v1/jobs`. */
export interface EnqueueOptions {
  queue?: string;
  priority?: number;
  delay_seconds?: number;
  run_at?: string;
  expires_at?: string;
  max_attempts?: number;
  max_losses?: number;
  timeout_seconds?: number;
  retry?: { [field: string]: Json };
  tags?: { [key: string]: string };
  labels?: string[];
  depends_on?: Json[];
  unique?: { [field: string]: Json };
  concurrency_key?: string;
  concurrency_limit?: number;
  group?: string;
  batch_id?: string;
  parent_job_id?: string;
  callback_url?: string;
  check_payload?: boolean;
  on_success?: { [field: string]: Json };
  on_failure?: { [field: string]: Json };
  on_complete?: { [field: string]: Json };
  /**
   * Default: a new one for each call, so that a job is stored once. In a handler, one of the job
   * and of what it enqueues, so that another attempt makes no second job.
   */
  idempotencyKey?: string;
  /** Default: that of the job whose handler enqueues it. */
  traceparent?: string;
  /** Waits for room in a full queue, and bounds all retries. Default: a full queue is thrown. */
  retryMs?: number;
}

export interface RequestOptions {
  headers?: { [name: string]: string };
  /** How long the server may wait before it answers. */
  waitSeconds?: number;
  /** How long one try may take, beside the wait. Default: 15 seconds. */
  timeoutMs?: number;
  /**
   * How long the request is retried. Default: a minute, but a full queue or a used-up quota is
   * thrown at once.
   */
  retryMs?: number;
  signal?: AbortSignal;
}

export class Client {
  /** Default: `FENCEPOST_URL` and `FENCEPOST_KEY`. */
  constructor(options?: { url?: string; key?: string });
  /**
   * Any call of the API. Retries what may pass: the network, 408, 429 and 5xx. A POST is sent with
   * an idempotency key, so that what is sent again is done once.
   */
  request(method: string, path: string, body?: unknown, options?: RequestOptions): Promise<any>;
  /** Stores a job once, however often the request must be sent, and returns it. */
  enqueue(jobType: string, payload?: unknown, options?: EnqueueOptions): Promise<JobRecord>;
  /** Stores all of these jobs, or none. */
  enqueueMany(
    jobs: ({ job_type: string; payload?: unknown } & EnqueueOptions)[],
    options?: { idempotencyKey?: string; retryMs?: number },
  ): Promise<JobRecord[]>;
  /** All items of a list, page by page: `items("/v1/jobs?q=state:pending")`. */
  items(path: string): AsyncGenerator<any>;
  /** The job as it is now. */
  job(id: string): Promise<JobRecord>;
  /** The job when it has ended, or after this time as it is then. */
  wait(id: string, timeoutSeconds?: number): Promise<JobRecord>;
  /** Cancels a job; a running one is asked to stop. */
  cancel(id: string): Promise<unknown>;
}

/** A leased job. */
export class Job<Payload = any> {
  readonly id: string;
  readonly jobType: string;
  readonly payload: Payload;
  /** The fence: show it to other systems, so that they can refuse an older attempt. */
  readonly attempt: number;
  readonly tags: { [key: string]: string };
  readonly parentResults: { [field: string]: Json }[];
  readonly traceparent: string | null;
  /** The job as the server sent it. */
  readonly data: { [field: string]: Json };
  /** From 0 to 1; set it while you work. */
  progress: number | undefined;
  /** Aborted when the job must stop; its reason is `Cancelled` or `Released`. */
  readonly signal: AbortSignal;
  /** Throws when the job must stop. */
  check(): void;
  /** How far earlier attempts have come, as `save` stored it. Undefined: nowhere. */
  checkpoint: any;
  /** Stores how far the job has come: JSON of at most 64 KiB, for the next attempt. */
  save(checkpoint: unknown): Promise<void>;
  /** Runs `work` if no attempt has done so, and returns its result: the checkpoint has it. */
  step<Result>(name: string, work: () => Result | Promise<Result>): Promise<Result>;
  /** Adds a line to the job's logs. */
  log(text: string): Promise<void>;
}

export interface WorkerOptions {
  client?: Client;
  /** Default: `default`. */
  queues?: string[];
  /** Handlers that run at the same time. Default: 10. */
  concurrency?: number;
  labels?: string[];
  /** How soon the jobs of a worker that has died are run again. Default: 30. */
  leaseSeconds?: number;
  /** What running jobs have to end after SIGTERM. Default: 25. */
  graceSeconds?: number;
}

export class Worker {
  readonly id: string;
  constructor(options?: WorkerOptions);
  /** Makes a function the handler of a job type. What it returns is the job's result. */
  job<Payload = any>(jobType: string, handler: (job: Job<Payload>) => unknown): this;
  /** Works until SIGTERM, SIGINT or `stop`. */
  run(options?: { onReady?: () => void }): Promise<void>;
  /** Takes no more jobs, and lets `run` return when those that run have ended. */
  stop(): void;
}

/** The job was cancelled, or its lease is lost: stop working on it. */
export class Cancelled extends Error {}
/** The worker stops: the job goes back to its queue without a failure. */
export class Released extends Error {}
/** Throw it to put the job off: it is ready again after that time. No failure is counted. */
export class Snooze extends Error {
  constructor(seconds: number);
  readonly seconds: number;
}
/** A checkpoint was not stored: the project is full, or a later one is there. */
export class NotSaved extends Error {}
/** Throw it when the job cannot succeed: it becomes a dead letter at once. */
export class NotRetryable extends Error {}
/** Throw it to choose when the job is retried. */
export class RetryAfter extends Error {
  constructor(seconds: number, message?: string);
  readonly seconds: number;
}

/**
 * Throw it when what you call asks for fewer requests: the job's group waits, or its queue if the
 * job has no group or `scope` is "queue". With "shared_limit:NAME" all wait that this limit counts.
 * No failure is counted.
 */
export class RateLimited extends Error {
  constructor(retryAfter?: number, scope?: "group" | "queue" | `shared_limit:${string}`);
  readonly retryAfter: number;
  readonly scope?: "group" | "queue" | `shared_limit:${string}`;
}

export interface WebhookEvent {
  /** Such as `job.dead_lettered`. Others come later: ignore those that you do not know. */
  type: string;
  timestamp: string;
  data: { [field: string]: Json };
}

/** The request was not signed with this secret, or is too old. */
export class InvalidWebhook extends Error {}

/**
 * Checks that a request comes from the server, and returns its event. `secret` is the endpoint's,
 * `whsec_…`; `headers` are those of a `Request` or of Node's `http`; `body` is as it came.
 */
export function verifyWebhook(
  secret: string,
  headers: Headers | { [name: string]: string | string[] | undefined },
  body: string | Uint8Array,
  toleranceSeconds?: number,
): WebhookEvent;
