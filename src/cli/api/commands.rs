//! What each command asks.

use clap::Subcommand;
use fencepost_domain::limits;
use serde_json::json;

use super::{Call, of_type};
use crate::cli::{
    table::Page,
    words::{because, encoded},
};

/// Jobs per second of a bulk retry, unless the command says otherwise.
const DEFAULT_RETRY_RATE: u32 = 50;

/// `fencepost queues`.
#[derive(Debug, Subcommand)]
pub enum Queues {
    /// List queues
    List {
        #[command(flatten)]
        page: Page<{ limits::MAX_PAGE_QUEUES }>,
    },
    /// Show a queue
    #[command(visible_alias = "show")]
    Get {
        /// Queue
        queue: String,
    },
    /// Pause a queue, or one job type of it: it accepts jobs, but none is claimed
    Pause {
        /// Queue
        queue: String,
        /// Only jobs of this type
        #[arg(long, value_name = "TYPE")]
        job_type: Option<String>,
    },
    /// Resume a queue, or one job type of it
    Resume {
        /// Queue
        queue: String,
        /// Only jobs of this type
        #[arg(long, value_name = "TYPE")]
        job_type: Option<String>,
    },
    /// Release the jobs that silent workers hold, without a failure
    TakeBack {
        /// Queue
        queue: String,
        /// Reason, shown in the history of its jobs
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
    },
    /// Delete a queue without jobs, with its settings
    Delete {
        /// Queue
        queue: String,
    },
}

impl From<Queues> for Call {
    fn from(command: Queues) -> Self {
        match command {
            Queues::List { page } => Self::list(
                format!("/v1/queues?{}", page.query()),
                "queues",
                &[
                    ("QUEUE", "/queue"),
                    ("READY", "/counts/pending"),
                    ("RUNNING", "/counts/processing"),
                    ("SCHEDULED", "/counts/scheduled"),
                    ("BACKOFF", "/counts/backoff"),
                    ("DEAD", "/counts/dead_letter"),
                    ("WORKERS", "/workers"),
                    ("OLDEST READY (S)", "/oldest_ready_age_seconds"),
                    ("WHY IT WAITS", "/oldest_ready_summary"),
                    ("PAUSED SINCE", "/paused_at"),
                ],
            ),
            Queues::Get { queue } => Self::get(format!("/v1/queues/{}", encoded(&queue))),
            Queues::Pause { queue, job_type } => {
                Self::post(format!("/v1/queues/{}/pause", encoded(&queue)), of_type(job_type))
            }
            Queues::Resume { queue, job_type } => {
                Self::post(format!("/v1/queues/{}/resume", encoded(&queue)), of_type(job_type))
            }
            Queues::TakeBack { queue, reason } => Self::post(
                format!("/v1/queues/{}/take-back", encoded(&queue)),
                because(reason.as_deref()),
            ),
            Queues::Delete { queue } => Self::delete(format!("/v1/queues/{}", encoded(&queue))),
        }
    }
}

/// `fencepost dead-letters`.
#[derive(Debug, Subcommand)]
pub enum DeadLetters {
    /// List groups of dead letters with the same error, the latest first
    Groups {
        #[command(flatten)]
        page: Page<{ limits::MAX_PAGE_DEAD_LETTERS }>,
    },
    /// List dead letters, the latest first
    List {
        /// Only of this queue
        #[arg(long, value_name = "QUEUE")]
        queue: Option<String>,
        /// Only of this job type
        #[arg(long, value_name = "TYPE")]
        job_type: Option<String>,
        /// Only with this error, by the fingerprint of its group
        #[arg(long, value_name = "FINGERPRINT")]
        fingerprint: Option<String>,
        #[command(flatten)]
        page: Page<{ limits::MAX_PAGE_DEAD_LETTERS }>,
    },
    /// Retry dead letters: one, or in the background all that match
    Retry {
        /// Job id
        #[arg(
            required_unless_present_any = ["queue", "job_type", "fingerprint", "all"],
            conflicts_with_all = [
                "queue", "job_type", "fingerprint", "all", "rate_per_second", "dry_run",
            ],
        )]
        job_id: Option<String>,
        /// Only of this queue
        #[arg(long, value_name = "QUEUE")]
        queue: Option<String>,
        /// Only of this job type
        #[arg(long, value_name = "TYPE")]
        job_type: Option<String>,
        /// Only with this error, by the fingerprint of its group
        #[arg(long, value_name = "FINGERPRINT")]
        fingerprint: Option<String>,
        /// All of the project
        #[arg(long, conflicts_with_all = ["queue", "job_type", "fingerprint"])]
        all: bool,
        /// Maximum jobs per second [default: 50]
        #[arg(long, value_name = "N")]
        rate_per_second: Option<u32>,
        /// Only count them
        #[arg(long)]
        dry_run: bool,
    },
}

impl From<DeadLetters> for Call {
    fn from(command: DeadLetters) -> Self {
        match command {
            DeadLetters::Groups { page } => Self::list(
                format!("/v1/dead-letters/groups?{}", page.query()),
                "groups",
                &[
                    ("COUNT", "/count"),
                    ("JOB TYPE", "/job_type"),
                    ("ERROR", "/error_type"),
                    ("MESSAGE", "/sample_message"),
                    ("LAST SEEN", "/last_seen_at"),
                    ("FINGERPRINT", "/fingerprint"),
                ],
            ),
            DeadLetters::List { queue, job_type, fingerprint, page } => {
                let mut path = format!("/v1/dead-letters?payloads=false&{}", page.query());
                let filters =
                    [("queue", queue), ("job_type", job_type), ("fingerprint", fingerprint)];
                for (name, value) in filters {
                    if let Some(value) = value {
                        path += &format!("&{name}={}", encoded(&value));
                    }
                }
                Self::list(
                    path,
                    "dead_letters",
                    &[
                        ("JOB", "/job/id"),
                        ("JOB TYPE", "/job/job_type"),
                        ("QUEUE", "/job/queue"),
                        ("FAILURES", "/job/failures"),
                        ("DIED", "/died_at"),
                        ("ERROR", "/job/last_error/type"),
                        ("MESSAGE", "/job/last_error/message"),
                    ],
                )
            }
            DeadLetters::Retry { job_id: Some(job_id), .. } => {
                Self::post(format!("/v1/dead-letters/{}/retry", encoded(&job_id)), json!({}))
            }
            DeadLetters::Retry {
                queue, job_type, fingerprint, rate_per_second, dry_run, ..
            } => {
                let rate = rate_per_second.unwrap_or(DEFAULT_RETRY_RATE);
                let mut filter = serde_json::Map::new();
                let filters =
                    [("queue", queue), ("job_type", job_type), ("fingerprint", fingerprint)];
                for (name, value) in filters {
                    if let Some(value) = value {
                        filter.insert(name.to_owned(), json!(value));
                    }
                }
                let mut body = json!({"filter": filter, "rate_per_second": rate});
                if dry_run {
                    body["dry_run"] = json!(true);
                }
                Self::post("/v1/dead-letters/retry".to_owned(), body)
            }
        }
    }
}

/// `fencepost workers`.
#[derive(Debug, Subcommand)]
pub enum Workers {
    /// List workers
    List {
        /// Only workers that poll this queue
        #[arg(long, value_name = "QUEUE")]
        queue: Option<String>,
        #[command(flatten)]
        page: Page<{ limits::MAX_PAGE_WORKERS }>,
    },
    /// Ask a worker to take no more jobs
    Quiet {
        /// Worker id
        worker_id: String,
    },
    /// Ask a worker to take no more jobs, and to exit
    Terminate {
        /// Worker id
        worker_id: String,
    },
    /// End what a worker was asked for
    Resume {
        /// Worker id
        worker_id: String,
    },
    /// Release all jobs that a worker holds, without a failure
    TakeBack {
        /// Worker id
        worker_id: String,
        /// Reason, shown in the history of its jobs
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
    },
}

impl From<Workers> for Call {
    fn from(command: Workers) -> Self {
        let ask = |worker_id: &str, what: &str| {
            Self::post(format!("/v1/workers/{}/{what}", encoded(worker_id)), json!({}))
        };
        match command {
            Workers::List { queue, page } => {
                let queue = queue.map(|it| format!("&queue={}", encoded(&it))).unwrap_or_default();
                Self::list(
                    format!("/v1/workers?{}{queue}", page.query()),
                    "workers",
                    &[
                        ("WORKER", "/worker_id"),
                        ("STATE", "/state"),
                        ("ALIVE", "/alive"),
                        ("BUSY", "/slots_in_use"),
                        ("OF", "/concurrency"),
                        ("QUEUES", "/queues"),
                        ("JOB TYPES", "/job_types"),
                        ("LAST SEEN", "/last_seen_at"),
                        ("ASKED TO", "/directive"),
                    ],
                )
            }
            Workers::Quiet { worker_id } => ask(&worker_id, "quiet"),
            Workers::Terminate { worker_id } => ask(&worker_id, "terminate"),
            Workers::Resume { worker_id } => ask(&worker_id, "resume"),
            Workers::TakeBack { worker_id, reason } => Self::post(
                format!("/v1/workers/{}/take-back", encoded(&worker_id)),
                because(reason.as_deref()),
            ),
        }
    }
}

/// `fencepost schedules`.
#[derive(Debug, Subcommand)]
pub enum Schedules {
    /// List schedules
    List {
        #[command(flatten)]
        page: Page<{ limits::MAX_PAGE_SCHEDULES }>,
    },
    /// Show a schedule
    #[command(visible_alias = "show")]
    Get {
        /// Schedule id
        id: String,
    },
    /// Pause a schedule
    Pause {
        /// Schedule id
        id: String,
    },
    /// Resume a schedule
    Resume {
        /// Schedule id
        id: String,
    },
    /// Create a schedule's job now; its ticks do not change
    Run {
        /// Schedule id
        id: String,
    },
}

impl From<Schedules> for Call {
    fn from(command: Schedules) -> Self {
        let act = |id: &str, what: &str| {
            Self::post(format!("/v1/recurring/{}/{what}", encoded(id)), json!({}))
        };
        match command {
            Schedules::List { page } => Self::list(
                format!("/v1/recurring?{}", page.query()),
                "recurring",
                &[
                    ("SCHEDULE", "/id"),
                    ("JOB TYPE", "/job_type"),
                    ("QUEUE", "/queue"),
                    ("EXPRESSION", "/cron_expression"),
                    ("TIME ZONE", "/timezone"),
                    ("ENABLED", "/enabled"),
                    ("NEXT RUN", "/next_run_at"),
                    ("LAST RUN", "/last_run_at"),
                    ("PROBLEM", "/problem"),
                    ("WARNING", "/warning"),
                ],
            ),
            Schedules::Get { id } => Self::get(format!("/v1/recurring/{}", encoded(&id))),
            Schedules::Pause { id } => act(&id, "pause"),
            Schedules::Resume { id } => act(&id, "resume"),
            Schedules::Run { id } => act(&id, "run"),
        }
    }
}

/// `fencepost workflows`.
#[derive(Debug, Subcommand)]
pub enum Workflows {
    /// List workflows, the latest first
    List {
        #[command(flatten)]
        page: Page<{ limits::MAX_PAGE_WORKFLOWS }>,
    },
    /// Show a workflow
    #[command(visible_alias = "show")]
    Get {
        /// Workflow id
        id: String,
    },
    /// Cancel a workflow
    Cancel {
        /// Workflow id
        id: String,
    },
}

impl From<Workflows> for Call {
    fn from(command: Workflows) -> Self {
        match command {
            Workflows::List { page } => Self::list(
                format!("/v1/workflows?{}", page.query()),
                "workflows",
                &[
                    ("WORKFLOW", "/id"),
                    ("NAME", "/name"),
                    ("STATE", "/state"),
                    ("DONE", "/succeeded_jobs"),
                    ("OF", "/total_jobs"),
                    ("CREATED", "/created_at"),
                ],
            ),
            Workflows::Get { id } => Self::get(format!("/v1/workflows/{}", encoded(&id))),
            Workflows::Cancel { id } => {
                Self::post(format!("/v1/workflows/{}/cancel", encoded(&id)), json!({}))
            }
        }
    }
}
