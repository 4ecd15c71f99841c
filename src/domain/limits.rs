//! Every bound on what a caller sends or asks for, with its unit in the name.
//!
//! `docs/limits.md` lists them for users; a test compares the two.

/// Characters in a `job_type`.
pub const MAX_JOB_TYPE_CHARS: usize = 500;
/// Characters in a queue's name.
pub const MAX_QUEUE_CHARS: usize = 100;
/// Characters in a `worker_id`.
pub const MAX_WORKER_ID_CHARS: usize = 200;
/// Bytes of a job's payload, as sent.
pub const MAX_PAYLOAD_BYTES: usize = 256 * 1024;
/// Bytes of a job's result, as sent.
pub const MAX_RESULT_BYTES: usize = 64 * 1024;
/// Bytes kept of an error (type, message and stack trace together); the rest is cut and marked.
pub const MAX_ERROR_BYTES: usize = 16 * 1024;
/// Characters kept of an error's type; a longer one is cut.
pub const MAX_ERROR_TYPE_CHARS: usize = 500;
/// Levels of arrays and objects in a payload or result.
pub const MAX_JSON_DEPTH: usize = 127;
/// Lowest and highest `priority`; higher runs first.
pub const MIN_PRIORITY: i16 = -100;
/// See [`MIN_PRIORITY`].
pub const MAX_PRIORITY: i16 = 100;
/// How far ahead a job may be scheduled, in seconds (one year).
pub const MAX_DELAY_SECONDS: i64 = 366 * 86_400;
/// Attempts a job may be given.
pub const MAX_MAX_ATTEMPTS: i32 = 100;
/// Longest run of one attempt, in seconds (one day).
pub const MAX_TIMEOUT_SECONDS: i32 = 86_400;
/// Longest lease a poll may ask for, in seconds (one day).
pub const MAX_LEASE_SECONDS: i32 = 86_400;
/// Longest first wait and longest cap of a retry policy, in seconds (30 days).
pub const MAX_RETRY_SECONDS: i64 = 30 * 86_400;
/// Largest `multiplier` of an exponential retry policy.
pub const MAX_RETRY_MULTIPLIER: f64 = 100.0;
/// Entries of `non_retryable_types`.
pub const MAX_NON_RETRYABLE_TYPES: usize = 50;
/// Tags of one job.
pub const MAX_TAGS: usize = 32;
/// Characters in a tag's name.
pub const MAX_TAG_KEY_CHARS: usize = 100;
/// Characters in a tag's value.
pub const MAX_TAG_VALUE_CHARS: usize = 500;
/// Jobs of one `POST /v1/jobs/batch`.
pub const MAX_ENQUEUE_BATCH_JOBS: usize = 500;
/// Acks of one `POST /v1/workers/ack/batch`.
pub const MAX_ACK_BATCH: usize = 500;
/// Queues one poll may name.
pub const MAX_POLL_QUEUES: usize = 20;
/// Job types one poll may name.
pub const MAX_POLL_JOB_TYPES: usize = 100;
/// Jobs one poll may be given.
pub const MAX_POLL_CAPACITY: u32 = 50;
/// Longest wait of one poll, in seconds.
pub const MAX_POLL_WAIT_SECONDS: u32 = 30;
/// Queues and job types a worker may register.
pub const MAX_REGISTERED_NAMES: usize = 500;
/// Characters in a worker's hostname or SDK version.
pub const MAX_WORKER_INFO_CHARS: usize = 200;
/// Slots a worker may say it has.
pub const MAX_WORKER_CONCURRENCY: i32 = 10_000;
/// Jobs of one page of `GET /v1/jobs`.
pub const MAX_PAGE_JOBS: u32 = 200;
/// Rows one page of `GET /v1/jobs` looks at; a filtered page may be short.
pub const MAX_PAGE_EXAMINED_ROWS: i64 = 2_000;
/// Past attempts shown with a job, newest kept.
pub const MAX_SHOWN_ATTEMPTS: i64 = 1_000;
/// Longest `duration_ms` an ack may report (30 days).
pub const MAX_DURATION_MS: i64 = 30 * 86_400_000;
/// Bytes of one request's body.
pub const MAX_BODY_BYTES: usize = 1024 * 1024;
/// Bytes of a batch request's body.
pub const MAX_BATCH_BODY_BYTES: usize = 8 * 1024 * 1024;
/// Characters in a project's or key's name.
pub const MAX_NAME_CHARS: usize = 100;
/// Live keys of one project.
pub const MAX_LIVE_KEYS: i64 = 50;
