//! Every bound on what a caller sends or asks for, with its unit in the name.
//!
//! `docs/limits.md` lists them for users; a test compares the two.

/// Characters in a `job_type`.
pub const MAX_JOB_TYPE_CHARS: usize = 500;
/// Job types whose payloads one request may check: each schema is compiled.
pub const MAX_CHECKED_TYPES: usize = 20;
/// Job types of a project with a schema.
pub const MAX_JOB_SCHEMAS: i64 = 200;
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
/// Bytes kept of an error while the project has stored as many bytes as its plan allows.
pub const MAX_FULL_ERROR_BYTES: usize = 1024;
/// Characters kept of an error's type; a longer one is cut.
pub const MAX_ERROR_TYPE_CHARS: usize = 500;
/// Levels of arrays and objects in a payload or result.
pub const MAX_JSON_DEPTH: usize = 127;
/// Lowest and highest `priority`; higher runs first.
pub const MIN_PRIORITY: i16 = -100;
/// See [`MIN_PRIORITY`].
pub const MAX_PRIORITY: i16 = 100;
/// Longest delay of a job, in seconds (20 years).
pub const MAX_DELAY_SECONDS: i64 = 20 * 366 * 86_400;
/// How far ahead the `run_at` of a job may lie, in years of 366 days.
pub const MAX_RUN_AT_YEARS: i64 = 100;
/// The same in seconds.
pub const MAX_RUN_AT_SECONDS: i64 = MAX_RUN_AT_YEARS * 366 * 86_400;
/// Attempts a job may be given.
pub const MAX_MAX_ATTEMPTS: i32 = 100;
/// Largest checkpoint of a job, in bytes.
pub const MAX_CHECKPOINT_BYTES: usize = 64 * 1024;
/// Largest `checkpoint_sequence`: what every JSON reader keeps exactly (2^53 − 1).
pub const MAX_CHECKPOINT_SEQUENCE: i64 = (1 << 53) - 1;
/// Largest `max_losses` of a job.
pub const MAX_MAX_LOSSES: i32 = 100;
/// Longest run of one attempt, in seconds (one day).
pub const MAX_TIMEOUT_SECONDS: i32 = 86_400;
/// How long the attempts of a deleted job are known, in seconds (two days): longer than an attempt
/// may run.
pub const DELETED_KEEP_SECONDS: i32 = 2 * MAX_TIMEOUT_SECONDS;
/// Longest lease a poll may ask for, in seconds (one day).
pub const MAX_LEASE_SECONDS: i32 = 86_400;
/// Longest time for which a worker puts a job off, in seconds (30 days).
pub const MAX_SNOOZE_SECONDS: u32 = 30 * 86_400;
/// Longest pause that a worker asks for because of a rate limit, in seconds: a day.
pub const MAX_RATE_LIMITED_SECONDS: i64 = 86_400;
/// The pause of a worker that names none, in seconds.
pub const DEFAULT_RATE_LIMITED_SECONDS: u32 = 5;
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
/// Bytes of the names of queues and job types that a worker may register, together.
pub const MAX_REGISTERED_NAMES_BYTES: usize = 64 * 1024;
/// Characters in a worker's hostname or SDK version.
pub const MAX_WORKER_INFO_CHARS: usize = 200;
/// Maximum number of slots that a worker may register.
pub const MAX_WORKER_CONCURRENCY: i32 = 10_000;
/// Jobs of one page of `GET /v1/jobs`.
pub const MAX_PAGE_JOBS: u32 = 200;
/// Bytes of payloads, results and texts in one page of a list, by which a page may end early; a
/// page has at least one row.
pub const MAX_PAGE_BYTES: usize = 2 * 1024 * 1024;
/// Rows that one page of `GET /v1/jobs` examines; a filtered page may be short.
pub const MAX_PAGE_EXAMINED_ROWS: i64 = 2_000;
/// Looks of one page of jobs, each at [`MAX_PAGE_EXAMINED_ROWS`]: a filter may match few jobs, and
/// clients take an empty page for the end.
pub const MAX_PAGE_LOOKS: i64 = 5;
/// Past attempts shown with a job, newest kept.
pub const MAX_SHOWN_ATTEMPTS: i64 = 1_000;
/// Longest `duration_ms` an ack may report (30 days).
pub const MAX_DURATION_MS: i64 = 30 * 86_400_000;
/// Bytes of one request's body.
pub const MAX_BODY_BYTES: usize = 1024 * 1024;
/// Bytes of the body of a change, up to which it is accepted while the project has stored as many
/// bytes as its plan allows: people must be able to make room.
pub const MAX_FULL_CHANGE_BYTES: usize = 8 * 1024;
/// Bytes of the queues, job types and labels that a worker may register while the project has
/// stored as many bytes as its plan allows.
pub const MAX_FULL_NAMES_BYTES: usize = 4 * 1024;
/// Bytes of a batch request's body.
pub const MAX_BATCH_BODY_BYTES: usize = 8 * 1024 * 1024;
/// Characters in a project's or key's name.
pub const MAX_NAME_CHARS: usize = 100;
/// Live keys of one project.
pub const MAX_LIVE_KEYS: i64 = 50;
/// Labels of one job, and of one worker.
pub const MAX_LABELS: usize = 16;
/// Characters in a label.
pub const MAX_LABEL_CHARS: usize = 100;
/// Characters in a `group`.
pub const MAX_GROUP_CHARS: usize = 200;
/// Groups of a project that may be paused at the same time.
pub const MAX_PAUSED_GROUPS: i64 = 10_000;
/// Groups of a project that may have rules of their own at the same time.
pub const MAX_GROUP_OVERRIDES: i64 = 10_000;
/// Longest pause of a group that ends by itself, in seconds: 30 days.
pub const MAX_GROUP_PAUSE_SECONDS: i32 = 30 * 86_400;
/// Groups of a queue with waiting jobs, by name, among which a list finds those that wait longest.
pub const MAX_COMPARED_GROUPS: i32 = 1_000;
/// Largest page of groups.
pub const MAX_PAGE_GROUPS: u32 = 100;
/// Characters in a `concurrency_key`, and in the key of `unique`.
pub const MAX_KEY_CHARS: usize = 200;
/// Largest `concurrency_limit` of a job and `max_concurrency` of a queue.
pub const MAX_CONCURRENCY: i32 = 100_000;
/// Queues of one project. At this number jobs are stored in existing queues only.
pub const MAX_PROJECT_QUEUES: i64 = 100_000;
/// Jobs one job may wait for.
pub const MAX_PARENTS: usize = 100;
/// Jobs that may wait for one job.
pub const MAX_CHILDREN: i32 = 1_000;
/// Jobs that the end of one job or batch leads to: its callbacks, and those that follow them.
pub const MAX_CALLBACKS: usize = 20;
/// Callbacks that follow each other.
pub const MAX_CALLBACK_DEPTH: usize = 5;
/// Bytes of the callbacks of one job or batch, together.
pub const MAX_CALLBACKS_BYTES: usize = 256 * 1024;
/// Batches of one project that have not completed.
pub const MAX_OPEN_BATCHES: i64 = 10_000;
/// Days after which a batch that was never sealed, and that no job has joined since, is sealed.
pub const IDLE_BATCH_DAYS: i32 = 30;
/// Days for which a completed batch is kept.
pub const BATCH_KEEP_DAYS: i32 = 30;
/// Jobs of one workflow.
pub const MAX_WORKFLOW_JOBS: usize = 500;
/// Characters in an idempotency key.
pub const MAX_IDEMPOTENCY_KEY_CHARS: usize = 200;
/// How long an idempotent answer is kept, in seconds (one day).
pub const IDEMPOTENCY_KEEP_SECONDS: i64 = 86_400;
/// Seconds after which a request that is still running under its idempotency key may be repeated,
/// also if its node is alive.
pub const IDEMPOTENCY_LOCK_SECONDS: i32 = 60;
/// Jobs of one heartbeat for a whole worker.
pub const MAX_BEAT_JOBS: usize = 500;
/// A worker that sends heartbeats for all of its jobs is lost after this many seconds without a
/// call.
pub const WORKER_SILENCE_SECONDS: i32 = 30;
/// The least `beat_seconds`, which is the longest time between two calls of a worker.
pub const MIN_BEAT_SECONDS: i32 = 5;
/// The greatest `beat_seconds` (one hour).
pub const MAX_BEAT_SECONDS: i32 = 3_600;
/// Such a worker is gone after this many times as long without a call.
pub const MISSED_BEATS: i32 = 3;
/// A worker is deleted after this many seconds without a call (30 days).
pub const WORKER_KEEP_SECONDS: i64 = 30 * 86_400;
/// Workers of one project that are known.
pub const MAX_PROJECT_WORKERS: i64 = 100_000;
/// The same, whatever its plan says.
pub const MIN_PROJECT_WORKERS: i64 = 100;
/// Recurring schedules one worker may register.
pub const MAX_REGISTERED_SCHEDULES: usize = 100;
/// Characters in a cron expression, and in a time zone's name.
pub const MAX_CRON_CHARS: usize = 100;
/// Workers of one page of `GET /v1/workers`.
pub const MAX_PAGE_WORKERS: u32 = 200;
/// Workflows on one page of a list. Each has a bounded number of jobs, which are counted.
pub const MAX_PAGE_WORKFLOWS: u32 = 50;
/// Batches on one page of a list.
pub const MAX_PAGE_BATCHES: u32 = 50;
/// Stored definitions of workflows of a project.
pub const MAX_WORKFLOW_DEFINITIONS: i64 = 500;
/// Stored definitions on one page of a list.
pub const MAX_PAGE_DEFINITIONS: i64 = 50;
/// Bytes of a stored definition, as sent.
pub const MAX_DEFINITION_BYTES: usize = 256 * 1024;
/// Custom events of one `POST /v1/workers/events`.
pub const MAX_EVENTS: usize = 100;
/// Characters in a custom event's type.
pub const MAX_EVENT_TYPE_CHARS: usize = 64;
/// Bytes of a custom event's payload, as sent.
pub const MAX_EVENT_PAYLOAD_BYTES: usize = 16 * 1024;
/// Custom events kept of one job.
pub const MAX_JOB_EVENTS: i64 = 1_000;
/// Events of one page of `GET /v1/jobs/{job_id}/events`.
pub const MAX_PAGE_EVENTS: u32 = 1_000;
/// Log chunks of one `POST /v1/workers/logs`.
pub const MAX_LOG_CHUNKS: usize = 500;
/// Bytes of one log chunk.
pub const MAX_LOG_CHUNK_BYTES: usize = 64 * 1024;
/// Bytes kept of one attempt's logs; the rest is cut and marked.
pub const MAX_LOG_BYTES: i64 = 1024 * 1024;
/// Chunks kept of one attempt's logs.
pub const MAX_LOG_CHUNKS_KEPT: i32 = 10_000;
/// Jobs whose logs one report may bring.
pub const MAX_LOG_JOBS: usize = 50;
/// Log chunks of one page.
pub const MAX_PAGE_LOGS: u32 = 1_000;
/// Places of one template.
pub const MAX_PLACES: usize = 100;
/// Bytes that fill the places of one template; later ones become null.
pub const MAX_FILLED_BYTES: usize = 1024 * 1024;
/// Bytes of parents' results that one job is given; later ones are left out and marked.
pub const MAX_PARENT_RESULTS_BYTES: i64 = 1024 * 1024;
/// Bytes of an event's payload that a project's stream carries; a larger one is in the job's
/// history only.
pub const MAX_STREAMED_PAYLOAD_BYTES: usize = 1024;
/// Event streams one node serves at a time.
pub const MAX_STREAMS: usize = 5_000;
/// Of these, the last ones are for projects that have none.
pub const RESERVED_STREAMS: usize = 500;
/// Event streams of one project that one node serves at a time, whatever the plan.
pub const MAX_PROJECT_STREAMS: u32 = 500;
/// Events of one project that a node keeps for streams that reconnect.
pub const MAX_REMEMBERED_EVENTS: usize = 10_000;
/// Bytes of these events of one project, if few projects have streams.
pub const MAX_PROJECT_REMEMBERED_BYTES: usize = 4 * 1024 * 1024;
/// Bytes of these events of all projects, of which each with a stream has the same part.
pub const MAX_REMEMBERED_BYTES: usize = 64 * 1024 * 1024;
/// Jobs that a queue's rate limit may start in its window.
pub const MAX_RATE_LIMIT_COUNT: i32 = 100_000;
/// Length of a rate limit's window, in seconds (one day).
pub const MAX_RATE_LIMIT_SECONDS: i32 = 86_400;
/// Default retention of finished jobs, in days.
pub const DEFAULT_RETENTION_DAYS: i32 = 7;
/// Days for which a queue may keep its finished jobs.
pub const MAX_RETENTION_DAYS: i32 = 3_650;
/// Days after which a plan may delete dead letters.
pub const MAX_DEAD_LETTER_DAYS: i32 = 36_500;
/// Largest `brake_after` of a queue.
pub const MAX_BRAKE_AFTER: i32 = 10_000;
/// Largest `max_waiting` of a queue.
pub const MAX_MAX_WAITING: i32 = 10_000_000;
/// Job types that may be paused in a queue. The circuit breaker's statement carries the same number
/// as a literal.
pub const MAX_PAUSED_TYPES: i64 = 100;
/// Queues of one page of `GET /v1/queues`.
pub const MAX_PAGE_QUEUES: u32 = 100;
/// Operations of one project that may run at a time.
pub const MAX_RUNNING_OPERATIONS: i64 = 20;
/// Operations of one page of `GET /v1/operations`.
pub const MAX_PAGE_OPERATIONS: u32 = 100;
/// Days for which an ended operation is kept.
pub const OPERATION_KEEP_DAYS: i32 = 30;
/// Dead letters, or groups of them, of one page.
pub const MAX_PAGE_DEAD_LETTERS: u32 = 200;
/// Largest `max` of a bulk request.
pub const MAX_OPERATION_JOBS: i64 = 10_000_000;
/// Largest `rate_per_second` of a bulk request.
pub const MAX_OPERATION_RATE: i32 = 10_000;
/// Recurring schedules of one project.
pub const MAX_SCHEDULES: i64 = 10_000;
/// Characters in the id of a recurring schedule.
pub const MAX_SCHEDULE_ID_CHARS: usize = 200;
/// Largest `spread_seconds` of a recurring schedule.
pub const MAX_SPREAD_SECONDS: i32 = 3_600;
/// Recurring schedules of one page.
pub const MAX_PAGE_SCHEDULES: u32 = 200;
/// Fires on one page.
pub const MAX_PAGE_FIRES: u32 = 200;
/// Fire times of a preview.
pub const MAX_SHOWN_TIMES: u32 = 100;
/// Days for which fires are kept.
pub const FIRE_KEEP_DAYS: i32 = 30;
/// Shortest period of a recurring schedule that any plan allows, in seconds.
pub const MIN_SCHEDULE_PERIOD_SECONDS: u32 = 1;
/// Members and open invitations of one project that any plan allows.
pub const MAX_MEMBERS: i64 = 1_000;
/// Projects that one account may own.
pub const MAX_OWNED_PROJECTS: i64 = 20;
/// Characters in an e-mail address (RFC 5321).
pub const MAX_EMAIL_CHARS: usize = 254;
/// Characters in a password, at least.
pub const MIN_PASSWORD_CHARS: usize = 12;
/// Characters in a password, at most.
pub const MAX_PASSWORD_CHARS: usize = 128;
/// Maximum bytes of a presented key or token; anything longer is not ours.
pub const MAX_SECRET_BYTES: usize = 128;
/// How long an access token is good for, in seconds.
pub const ACCESS_TOKEN_SECONDS: i64 = 600;
/// Seconds after which a session that is not refreshed expires (7 days).
pub const SESSION_IDLE_SECONDS: i64 = 7 * 86_400;
/// Maximum age of a session, in seconds (30 days).
pub const SESSION_SECONDS: i64 = 30 * 86_400;
/// How long a login waits for the second factor, in seconds.
pub const LOGIN_CHALLENGE_SECONDS: i64 = 300;
/// Wrong codes of one login, after which it must begin again.
pub const MAX_CODE_TRIES: i32 = 5;
/// How long the login of a terminal waits for its person, in seconds (10 minutes).
pub const DEVICE_LOGIN_SECONDS: i64 = 600;
/// Characters of the name of a terminal: the page for approval shows it.
pub const MAX_DEVICE_NAME_CHARS: usize = 40;
/// How long the key of a terminal lives, in seconds (90 days).
pub const DEVICE_KEY_SECONDS: i64 = 90 * 86_400;
/// How long a terminal waits before it asks for its key again, in seconds.
pub const DEVICE_POLL_SECONDS: i64 = 5;
/// How long a person may change keys and members after a login or `POST /v1/auth/step-up`, in
/// seconds (15 minutes).
pub const STEP_UP_SECONDS: i64 = 900;
/// How long the secret of an authenticator app may wait for its first code, in seconds.
pub const PENDING_TOTP_SECONDS: i64 = 900;
/// Recovery codes that an account gets at once.
pub const RECOVERY_CODES: usize = 10;
/// How long a key lives that a token was exchanged for, in seconds (15 minutes), at most: never
/// longer than the token.
pub const EXCHANGED_KEY_SECONDS: i64 = 900;
/// Live keys of a project that tokens were exchanged for.
pub const MAX_EXCHANGED_KEYS: i64 = 500;
/// Bytes of a token to be exchanged.
pub const MAX_TOKEN_BYTES: usize = 8 * 1_024;
/// Characters of the subject of trusted tokens, as OpenID Connect bounds a `sub`.
pub const MAX_SUBJECT_CHARS: usize = 255;
/// Identities of an account at OpenID Connect providers.
pub const MAX_IDENTITIES: i64 = 10;
/// Characters of a presented code, at most.
pub const MAX_CODE_CHARS: usize = 32;
/// Sessions that a list shows, newest first.
pub const MAX_SHOWN_SESSIONS: i64 = 100;
/// Lifetime of a link that verifies an address, in seconds (2 days).
pub const VERIFY_SECONDS: i64 = 2 * 86_400;
/// Lifetime of a link that resets a password, in seconds (1 hour).
pub const RESET_SECONDS: i64 = 3_600;
/// Lifetime of an invitation, in seconds (7 days).
pub const INVITATION_SECONDS: i64 = 7 * 86_400;
/// Keys of one page of `GET /v1/keys`.
pub const MAX_PAGE_KEYS: u32 = 200;
/// Maximum lifetime of an expiring key, in seconds (10 years).
pub const MAX_KEY_SECONDS: i64 = 3_660 * 86_400;
/// How long a rotated key may stay valid, in seconds (30 days).
pub const MAX_KEY_OVERLAP_SECONDS: i64 = 30 * 86_400;
/// Maximum bytes of a secret scanner's report.
pub const MAX_REPORT_BYTES: usize = 256 * 1024;
/// Maximum number of keys of a secret scanner's report.
pub const MAX_REPORTED_KEYS: usize = 1_000;
/// Passkeys of one account.
pub const MAX_PASSKEYS: i64 = 10;
/// How long a browser may take to answer with a passkey, in seconds.
pub const PASSKEY_SECONDS: u64 = 300;
/// Bytes of what a browser answers with a passkey.
pub const MAX_PASSKEY_BYTES: usize = 16 * 1024;
/// Networks that one key allows.
pub const MAX_KEY_NETWORKS: usize = 32;
/// Queues that one key may be bound to: those of one poll.
pub const MAX_KEY_QUEUES: usize = MAX_POLL_QUEUES;
/// Job types that one key may be bound to: those of one poll.
pub const MAX_KEY_JOB_TYPES: usize = MAX_POLL_JOB_TYPES;
/// Own rate limit of a key, in calls per minute.
pub const MAX_KEY_CALLS_PER_MINUTE: i32 = 1_000_000;
/// Bytes of the state before or after a change, in the audit log; beyond it, values of more than
/// [`MAX_AUDIT_VALUE_BYTES`] are replaced by their hashes.
pub const MAX_AUDIT_STATE_BYTES: usize = 1024;
/// See [`MAX_AUDIT_STATE_BYTES`].
pub const MAX_AUDIT_VALUE_BYTES: usize = 128;
/// Changes of one project in a day that the audit log keeps with their states, for each call of its
/// `manage_per_minute`. Calls of workers and producers make no more changes than that.
pub const DAILY_CHANGES_PER_MANAGE_CALL: u32 = 40;
/// Rows of one page of the audit log.
pub const MAX_PAGE_AUDIT: u32 = 200;
/// Rows of one export of the audit log, newest first.
pub const MAX_EXPORTED_AUDIT: i64 = 100_000;
/// Entries of an account's security log in one answer, newest first.
pub const MAX_SHOWN_SECURITY_ENTRIES: i64 = 200;
/// Days after which an account is deleted that was never used nor verified.
pub const UNUSED_ACCOUNT_DAYS: i32 = 30;
/// Hours after which an event that waits is dropped.
pub const EVENT_KEEP_HOURS: i32 = 72;
/// Days for which failed deliveries are kept.
pub const FAILED_DELIVERY_DAYS: i32 = 30;
/// Hours for which deliveries to a disabled endpoint wait.
pub const EMPTY_HOURS: i32 = 72;
/// Endpoints of one project.
pub const MAX_ENDPOINTS: i64 = 500;
/// Requests of pushes of one project that one node sends at a time.
pub const MAX_PROJECT_PUSH_IN_FLIGHT: u32 = 200;
/// Queues of one project that are pushed.
pub const MAX_PROJECT_PUSHED_QUEUES: i64 = 50;
/// Events, queues and job types that one endpoint may name, each.
pub const MAX_ENDPOINT_NAMES: usize = 50;
/// Characters in an endpoint's description.
pub const MAX_DESCRIPTION_CHARS: usize = 200;
/// Deliveries to one endpoint that one node sends at a time.
pub const MAX_ENDPOINT_IN_FLIGHT: i32 = 50;
/// Longest wait for an endpoint's answer, in seconds.
pub const MAX_ENDPOINT_TIMEOUT_SECONDS: i32 = 30;
/// How long a rotated secret of an endpoint may stay valid, in seconds (7 days).
pub const MAX_SECRET_OVERLAP_SECONDS: i32 = 7 * 86_400;
/// Jobs of a pushed queue that one node sends at a time.
pub const MAX_PUSH_IN_FLIGHT: i32 = 200;
/// Longest request of a pushed queue, in seconds.
pub const MAX_PUSH_TIMEOUT_SECONDS: i32 = 600;
/// Headers that a pushed queue's requests carry besides ours.
pub const MAX_PUSH_HEADERS: usize = 10;
/// Characters of the name of one.
pub const MAX_PUSH_HEADER_NAME_CHARS: usize = 64;
/// Characters of its value.
pub const MAX_PUSH_HEADER_VALUE_CHARS: usize = 2_048;
/// Characters of all names and values: nodes keep those of all pushed queues.
pub const MAX_PUSH_HEADERS_CHARS: usize = 4_096;
/// Endpoints of one page.
pub const MAX_PAGE_ENDPOINTS: u32 = 100;
/// Mails that may wait on all nodes together; further ones are dropped.
pub const MAX_WAITING_MAILS: i64 = 100_000;
/// For how long a mail without a link is tried, in seconds (72 hours).
pub const MAIL_SECONDS: i64 = 259_200;
/// Incidents of one page.
pub const MAX_PAGE_INCIDENTS: u32 = 100;
/// Deliveries of one page.
pub const MAX_PAGE_DELIVERIES: u32 = 100;
/// Days for which accounts' security logs are kept.
pub const SECURITY_LOG_KEEP_DAYS: i32 = 90;
/// Days for which the audit log is kept, also that of a deleted project.
pub const AUDIT_KEEP_DAYS: i32 = 400;
/// Days for which usage is kept by day; its months are kept for as long as the project.
pub const USAGE_KEEP_DAYS: i32 = 400;
/// Names of deleted projects are cleared after this many days.
pub const NAME_KEEP_DAYS: i32 = 90;
/// Queues of a project, and types of a queue, that a node counts by name; later ones are `other`.
pub const MAX_COUNTED_NAMES: usize = 100;
/// Pairs of a queue and a type of one project that a node counts by name.
pub const MAX_COUNTED_PAIRS: usize = 500;
/// Values of one metric label in what a project's Prometheus scrapes; the rest is `other`.
pub const MAX_LABEL_VALUES: usize = 100;
