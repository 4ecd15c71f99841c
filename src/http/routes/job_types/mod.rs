//! `GET /v1/job-types`: what the types of a project's jobs did lately, and which have a schema.

pub mod schema;

use axum::{Json as Reply, extract::State};
use fencepost_domain::{error::Error, limits, stats::Counts};
use fencepost_store::{self as store, queues::stats::TypeStats};
use fencepost_web::{
    app::App,
    auth::{Caller, Read},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::routes::metrics::Percentiles;

/// Types that are listed: a node counts later ones as `other`.
const MAX_JOB_TYPES: i64 = 500;

/// Statistics of the jobs of one type in the last 24 hours.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct JobTypeStats {
    /// Job type: the kind of work; `other` stands for those beyond the first 100 of a queue.
    #[schema(example = "email.send")]
    pub job_type: String,
    /// True if its payloads have a schema.
    #[serde(default)]
    pub has_schema: bool,
    /// Queues that had such jobs, by name; at most 20.
    pub queues: Vec<String>,
    /// Enqueued jobs.
    pub enqueued: i64,
    /// Succeeded jobs.
    pub succeeded: i64,
    /// Attempts that failed, timed out or lost their worker.
    pub failed: i64,
    /// Dead-lettered jobs.
    pub dead_letter: i64,
    /// Cancelled jobs.
    pub cancelled: i64,
    /// Run time of acknowledged attempts.
    pub run: Percentiles,
    /// Time from when jobs could run to their first lease.
    pub wait: Percentiles,
}

impl From<TypeStats> for JobTypeStats {
    fn from(TypeStats { job_type, queues, counts }: TypeStats) -> Self {
        Self {
            job_type,
            has_schema: false,
            queues,
            enqueued: counts.enqueued,
            succeeded: counts.succeeded,
            failed: counts.failed + counts.timed_out + counts.lease_expired,
            dead_letter: counts.dead_lettered,
            cancelled: counts.cancelled,
            run: Percentiles::of(&counts.run),
            wait: Percentiles::of(&counts.wait),
        }
    }
}

/// The job types of a project.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct JobTypeList {
    /// At most 500, those with most enqueued jobs first; then types that have a schema, and no
    /// jobs lately.
    pub job_types: Vec<JobTypeStats>,
}

/// List job types.
///
/// Types whose jobs did something since the start of the hour 24 hours ago, from the statistics,
/// which are written every five seconds; and types with a schema.
#[utoipa::path(
    get, path = "/job-types", tag = "jobs", operation_id = "job_types_list",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    responses(
        (status = 200, description = "The job types.", body = JobTypeList),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
) -> Result<Reply<JobTypeList>, Error> {
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let found = store::queues::stats::by_type(&mut conn, caller.project_id, MAX_JOB_TYPES).await?;
    // Requests that came together may have stored a few more than the limit.
    let named = limits::MAX_JOB_SCHEMAS * 2;
    let mut named = store::jobs::job_types::names(&mut conn, caller.project_id, named).await?;
    let mut job_types: Vec<JobTypeStats> = found.into_iter().map(JobTypeStats::from).collect();
    for known in &mut job_types {
        let at = named.iter().position(|it| *it == known.job_type);
        known.has_schema = at.map(|at| named.swap_remove(at)).is_some();
    }
    named.sort();
    job_types.extend(named.into_iter().map(|job_type| {
        let idle = TypeStats { job_type, queues: Vec::new(), counts: Counts::default() };
        JobTypeStats { has_schema: true, ..idle.into() }
    }));
    Ok(Reply(JobTypeList { job_types }))
}
