//! Logs and metrics: names, kinds, buckets and help texts.
//!
//! No label whose values a customer can invent: a project, queue or job type never appears here.
//! `docs/metrics.md` lists every metric, and a test compares the two.

pub mod process;

use std::time::Duration;

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::{EnvFilter, layer::SubscriberExt, util::SubscriberInitExt};

/// A metric's name, kind and help.
pub struct Metric {
    /// The name, with its unit at the end.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    pub help: &'static str,
}

/// The kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    Gauge,
    /// Times, in buckets of [`SECONDS_BUCKETS`].
    Seconds,
    /// Sizes of batches, in buckets of [`BATCH_BUCKETS`].
    BatchSize,
}

macro_rules! metrics_table {
    ($($constant:ident = $name:literal, $kind:ident, $help:literal;)*) => {
        $(#[doc = $help] pub const $constant: &str = $name;)*
        /// All metrics.
        pub const METRICS: &[Metric] =
            &[$(Metric { name: $name, kind: Kind::$kind, help: $help }),*];
    };
}

metrics_table! {
    HTTP_REQUESTS = "fencepost_http_requests_total", Counter,
        "Requests answered, by route, method and status.";
    HTTP_SECONDS = "fencepost_http_request_duration_seconds", Seconds,
        "Time from the request's head to its answer, by group of routes; a poll's wait is included.";
    CONNECTIONS = "fencepost_http_connections", Gauge,
        "Open client connections.";
    JOBS_ENQUEUED = "fencepost_jobs_enqueued_total", Counter,
        "Jobs stored.";
    JOBS_CLAIMED = "fencepost_jobs_claimed_total", Counter,
        "Jobs leased to workers.";
    JOBS_MATCHED = "fencepost_jobs_matched_total", Counter,
        "Jobs leased by the statement that stored them, because a poll was parked for them.";
    JOBS_SETTLED = "fencepost_jobs_settled_total", Counter,
        "Attempts ended, by outcome.";
    JOBS_RETRIED = "fencepost_jobs_retried_total", Counter,
        "Failed attempts that are retried after a backoff.";
    CHECKPOINTS = "fencepost_checkpoints_total", Counter,
        "Checkpoints of jobs, by outcome: stored, stale or full.";
    JOBS_LOST = "fencepost_jobs_lost_total", Counter,
        "Attempts that were lost: their workers sent no outcome.";
    JOBS_DEAD_LETTERED = "fencepost_jobs_dead_lettered_total", Counter,
        "Jobs dead-lettered.";
    BRAKES = "fencepost_brakes_total", Counter,
        "Job types paused by the circuit breaker of their queue.";
    JOBS_CANCELLED = "fencepost_jobs_cancelled_total", Counter,
        "Jobs cancelled: by request, by a newer job, by their schedule, by a parent's end, or by their own expires_at.";
    JOBS_PRUNED = "fencepost_jobs_pruned_total", Counter,
        "Finished jobs deleted after their retention.";
    OPERATION_JOBS = "fencepost_operation_jobs_total", Counter,
        "Jobs handled by bulk operations: purged, cancelled, retried, replayed or deleted.";
    SCHEDULE_FIRES = "fencepost_schedule_fires_total", Counter,
        "Ticks of recurring schedules, by outcome.";
    SCHEDULE_LATENESS_SECONDS = "fencepost_schedule_lateness_seconds", Seconds,
        "Time from a tick to the commit that stores its job.";
    JOBS_PROMOTED = "fencepost_jobs_promoted_total", Counter,
        "Scheduled or retried jobs that became due.";
    RATE_LIMIT_PAUSES = "fencepost_rate_limit_pauses_total", Counter,
        "Pauses that began because a worker met a rate limit, by scope.";
    GROUP_JOBS_OPENED = "fencepost_group_jobs_opened_total", Counter,
        "Jobs that waited for their group, and that it let run.";
    JOBS_RELEASED = "fencepost_jobs_released_total", Counter,
        "Jobs released because the polling client was gone.";
    FENCES_REFUSED = "fencepost_fences_refused_total", Counter,
        "Acks and heartbeats refused by their fence, by reason.";
    LEASES_REARMED = "fencepost_leases_rearmed_total", Counter,
        "Leases extended after a gap in which no node could reap.";
    SPANS_DROPPED = "fencepost_spans_dropped_total", Counter,
        "Spans that were not exported because a project had too many in a second.";
    WORKERS_LOST = "fencepost_workers_lost_total", Counter,
        "Workers that timed out and lost their leases.";
    PICKUP_SECONDS = "fencepost_job_pickup_seconds", Seconds,
        "Time from when a job could first run to its first lease.";
    RUN_SECONDS = "fencepost_job_run_seconds", Seconds,
        "Time from a lease to the ack of its attempt.";
    OLDEST_READY_SECONDS = "fencepost_oldest_ready_age_seconds", Gauge,
        "Age of the oldest ready job, by the reason for which it waits; reason=ready: nothing keeps it.";
    CANARY_SECONDS = "fencepost_canary_duration_seconds", Seconds,
        "Time of this node's own job through enqueue, claim and ack; misses are not counted.";
    CANARY_RUNS = "fencepost_canary_runs_total", Counter,
        "Own jobs of this node, by outcome: ok or missed.";
    CANARY_MISSES = "fencepost_canary_consecutive_misses", Gauge,
        "Own jobs of this node that were missed since the last good one.";
    JOBS = "fencepost_jobs", Gauge,
        "Jobs of all projects by state: scheduled, active (ready or running), backoff, dead_letter.";
    POLLS_PARKED = "fencepost_polls_parked", Gauge,
        "Parked polls.";
    BATCH_ITEMS = "fencepost_batch_items", BatchSize,
        "Items written by one statement, by kind.";
    BATCH_WAIT_SECONDS = "fencepost_batch_wait_seconds", Seconds,
        "Time that the first item of a batch waited for its batch to start, by kind.";
    BATCH_SECONDS = "fencepost_batch_duration_seconds", Seconds,
        "Time one statement of a batch took, by kind.";
    SHED = "fencepost_requests_shed_total", Counter,
        "Requests refused because a bounded queue was full, by kind.";
    STORE_ERRORS = "fencepost_store_errors_total", Counter,
        "Statements that failed, by kind.";
    POOL_WAIT_SECONDS = "fencepost_pool_wait_seconds", Seconds,
        "Wait for a connection to the database, by pool.";
    POOL_CONNECTIONS = "fencepost_pool_connections", Gauge,
        "Connections to the database, by pool and state: idle or used.";
    POOLS_RENEWED = "fencepost_pools_renewed_total", Counter,
        "Times that all connections were replaced, because the database did not answer.";
    LOOP_SECONDS = "fencepost_loop_duration_seconds", Seconds,
        "Time one step of a background loop took, by loop.";
    LOOP_ERRORS = "fencepost_loop_errors_total", Counter,
        "Steps of background loops that failed, by loop.";
    SET_ASIDE = "fencepost_set_aside_items", Gauge,
        "Items of tenants that a background loop failed to process and skips until its next try, by work.";
    LOOP_LAST_STEP = "fencepost_loop_last_step_timestamp_seconds", Gauge,
        "When a background loop last completed a step, as seconds since 1970, by loop.";
    LOOP_LATENESS_SECONDS = "fencepost_loop_lateness_seconds", Seconds,
        "Delay between the due time and the start of a background loop's step, by loop.";
    LIMITER_DECISIONS = "fencepost_limiter_decisions_total", Counter,
        "Calls counted against limits, by counter (redis or local) and outcome (allowed or refused).";
    LIMITED = "fencepost_requests_limited_total", Counter,
        "Requests refused because a rate or quota was used up, by budget.";
    LIMITS_LOCAL = "fencepost_limits_local_total", Counter,
        "Rate limits that a node counted alone because Redis did not answer.";
    REDIS_FAILURES = "fencepost_redis_failures_total", Counter,
        "Calls to Redis that failed, by reason; after an error or a slow call, Redis is skipped for two seconds.";
    REDIS_BREAKER_OPEN = "fencepost_redis_breaker_open", Gauge,
        "1 while Redis is skipped after a failure.";
    REDIS_SUBSCRIBED = "fencepost_redis_subscribed", Gauge,
        "1 while this node is subscribed to messages of the others over Redis.";
    WAKEUPS_SENT = "fencepost_wakeups_sent_total", Counter,
        "Wake-up messages that this node sent to the others.";
    WAKEUPS_RECEIVED = "fencepost_wakeups_received_total", Counter,
        "Wake-up messages that this node received from the others.";
    NODES = "fencepost_nodes", Gauge,
        "Running nodes, as far as this one knows.";
    MAILS = "fencepost_mails_total", Counter,
        "Mails, by outcome: sent, printed, failed (it is tried again), refused (the recipient is unknown), not_needed, expired (it was not sent in time), or dropped (no mail server, or too many waiting).";
    WEBHOOK_DELIVERIES = "fencepost_webhook_deliveries_total", Counter,
        "Requests to endpoints and of pushes, by outcome: delivered, failed, released, or taken (push answered by 202).";
    WEBHOOK_SECONDS = "fencepost_webhook_duration_seconds", Seconds,
        "Time from a request to an endpoint, or of a push, to the end of its answer, or to its failure.";
    WEBHOOK_IN_FLIGHT = "fencepost_webhooks_in_flight", Gauge,
        "Requests to endpoints and of pushes that this node waits for.";
    WEBHOOK_ENDPOINTS = "fencepost_webhook_endpoints", Gauge,
        "Endpoints that this node serves, of at most 15,000.";
    PUSHED_QUEUES = "fencepost_pushed_queues", Gauge,
        "Queues that this node pushes, of at most 4,000: beyond, projects take turns.";
    WEBHOOK_DELAY_SECONDS = "fencepost_webhook_delay_seconds", Seconds,
        "Time from an event to the lease of its first try.";
    EVENTS_DROPPED = "fencepost_events_dropped_total", Counter,
        "Events that were not sent to an endpoint: too many deliveries to it waited, its project had no bytes left, or the event waited for 72 hours.";
    CONNECTIONS_REFUSED = "fencepost_http_connections_refused_total", Counter,
        "Connections refused because their address had too many.";
    TABLE_BYTES = "fencepost_postgres_table_bytes", Gauge,
        "Size on disk, by table and part: table or indexes.";
    TABLE_DEAD_ROWS = "fencepost_postgres_dead_rows", Gauge,
        "Estimated dead rows that are not vacuumed yet, by table.";
    SNAPSHOT_SECONDS = "fencepost_postgres_oldest_snapshot_seconds", Gauge,
        "Age of the oldest snapshot or transaction, which blocks vacuum.";
    SNAPSHOT_TRANSACTIONS = "fencepost_postgres_oldest_snapshot_transactions", Gauge,
        "Transactions since the oldest snapshot, including replication slots and prepared transactions.";
    POSTGRES_CONNECTIONS = "fencepost_postgres_connections", Gauge,
        "All connections to the database server.";
    POSTGRES_MAX_CONNECTIONS = "fencepost_postgres_max_connections", Gauge,
        "Connections that the database server accepts.";
    WAL_BYTES = "fencepost_postgres_wal_bytes_total", Counter,
        "WAL that the database server has written.";
    HELD_WAL_BYTES = "fencepost_postgres_held_wal_bytes", Gauge,
        "WAL that the slowest replication slot retains.";
    STANDBYS = "fencepost_postgres_standbys", Gauge,
        "Standbys that follow the database server.";
    ARCHIVE_FAILING_SECONDS = "fencepost_postgres_archive_failing_seconds", Gauge,
        "Time since the archive took its last WAL, while it refuses the next; 0: it does not.";
    POSTGRES_COMMITS = "fencepost_postgres_commits_total", Counter,
        "Transactions committed in the database.";
    POSTGRES_DEADLOCKS = "fencepost_postgres_deadlocks_total", Counter,
        "Deadlocks in the database.";
    PROCESS_CPU_SECONDS = "process_cpu_seconds_total", Counter,
        "CPU time of this process, in whole seconds.";
    PROCESS_START = "process_start_time_seconds", Gauge,
        "When this process started, as seconds since 1970.";
    PROCESS_RESIDENT_BYTES = "process_resident_memory_bytes", Gauge,
        "Memory that this process has in RAM.";
    PROCESS_THREADS = "process_threads", Gauge,
        "Threads of this process.";
    PROCESS_OPEN_FDS = "process_open_fds", Gauge,
        "Open file descriptors of this process; each connection of a client has one.";
    PROCESS_MAX_FDS = "process_max_fds", Gauge,
        "File descriptors that this process may open.";
    BUILD_INFO = "fencepost_build_info", Gauge,
        "Always 1; its label says which version runs.";
    ZONE_RULES = "fencepost_zone_rules_info", Gauge,
        "1 for the release of time zone rules that this node uses, 0 for one that it used before.";
    ZONE_RULES_PUBLISHED = "fencepost_zone_rules_published_seconds", Gauge,
        "When the time zone rules that this node uses were published, as seconds since 1970.";
    PANICS = "fencepost_panics_total", Counter,
        "Requests and steps that panicked. Must stay 0.";
}

/// Upper bounds of the time buckets, in seconds.
pub const SECONDS_BUCKETS: &[f64] = &[
    0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 120.0, 300.0,
];
/// Upper bounds of the batch-size buckets, in items.
pub const BATCH_BUCKETS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0];

/// How often the recorder adds samples of histograms to their buckets, so that they do not pile up
/// between scrapes.
pub const UPKEEP_PERIOD: Duration = Duration::from_secs(5);

/// Installs the recorder for this process and describes every metric.
///
/// # Errors
/// When a recorder is installed already.
pub fn install_metrics() -> Result<PrometheusHandle, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for metric in METRICS {
        let buckets = match metric.kind {
            Kind::Seconds => SECONDS_BUCKETS,
            Kind::BatchSize => BATCH_BUCKETS,
            Kind::Counter | Kind::Gauge => continue,
        };
        builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), buckets)?;
    }
    let handle = builder.install_recorder()?;
    initialise_counters();
    for metric in METRICS {
        match metric.kind {
            Kind::Counter => describe_counter!(metric.name, metric.help),
            Kind::Gauge => describe_gauge!(metric.name, metric.help),
            Kind::Seconds => describe_histogram!(metric.name, Unit::Seconds, metric.help),
            Kind::BatchSize => describe_histogram!(metric.name, Unit::Count, metric.help),
        }
    }
    gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1);
    Ok(handle)
}

/// The kinds of batches, as label values.
const BATCH_KINDS: [&str; 11] = [
    "enqueue",
    "succeed",
    "succeed_parents",
    "end",
    "heartbeat",
    "bare_fence",
    "repeat",
    "worker",
    "worker_beat",
    "claim",
    "kind",
];
/// The budgets of calls, as label values.
const BUDGETS: [&str; 8] =
    ["produce", "work", "manage", "polls", "account", "console", "changes", "bytes"];
/// Initialises error counters to 0: `rate()` misses the first increment of a series that did not
/// exist.
fn initialise_counters() {
    for metric in METRICS.iter().filter(|it| it.kind == Kind::Counter) {
        match metric.name {
            HTTP_REQUESTS | JOBS_SETTLED | FENCES_REFUSED | SCHEDULE_FIRES => (),
            // Set, not counted: they appear once they are known.
            WAL_BYTES | POSTGRES_COMMITS | POSTGRES_DEADLOCKS | PROCESS_CPU_SECONDS => (),
            LIMITER_DECISIONS => {
                for (by, outcome) in [
                    ("redis", "allowed"),
                    ("redis", "refused"),
                    ("local", "allowed"),
                    ("local", "refused"),
                ] {
                    counter!(LIMITER_DECISIONS, "by" => by, "outcome" => outcome).increment(0);
                }
            }
            LIMITED => {
                for budget in BUDGETS {
                    counter!(LIMITED, "budget" => budget).increment(0);
                }
            }
            REDIS_FAILURES => {
                for reason in ["error", "slow", "subscription"] {
                    counter!(REDIS_FAILURES, "reason" => reason).increment(0);
                }
            }
            MAILS => {
                for outcome in
                    ["sent", "printed", "failed", "refused", "not_needed", "expired", "dropped"]
                {
                    counter!(MAILS, "outcome" => outcome).increment(0);
                }
            }
            CANARY_RUNS => {
                for outcome in ["ok", "missed"] {
                    counter!(CANARY_RUNS, "outcome" => outcome).increment(0);
                }
            }
            RATE_LIMIT_PAUSES => {
                for scope in ["group", "queue"] {
                    counter!(RATE_LIMIT_PAUSES, "scope" => scope).increment(0);
                }
            }
            WEBHOOK_DELIVERIES => {
                for outcome in ["delivered", "failed", "released", "taken"] {
                    counter!(WEBHOOK_DELIVERIES, "outcome" => outcome).increment(0);
                }
            }
            SHED | STORE_ERRORS => {
                for kind in BATCH_KINDS {
                    counter!(metric.name, "kind" => kind).increment(0);
                }
            }
            // Each loop registers its own name.
            LOOP_ERRORS => (),
            name => counter!(name).increment(0),
        }
    }
}

/// Sends logs to standard error: one JSON object a line.
///
/// # Errors
/// When `filter` cannot be read, or logging was set up already.
pub fn install_logs(filter: &str) -> anyhow::Result<()> {
    // PostgreSQL's notices are not events of ours.
    let filter = EnvFilter::try_new(format!("sqlx=warn,{filter}"))?;
    let layer =
        tracing_subscriber::fmt::layer().json().flatten_event(true).with_writer(std::io::stderr);
    tracing_subscriber::registry().with(filter).with(layer).try_init()?;
    Ok(())
}
