//! `GET /v1/jobs/{job_id}` and `GET /v1/jobs`.

use std::time::Duration;

use axum::{Extension, Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    access::Permission,
    error::Error,
    formats,
    ids::{BatchId, JobId, JobKey},
    job::JobState,
    limits, search,
};
use fencepost_engine::jobs::{explain, wait};
use fencepost_store::{
    self as store,
    jobs::{JobRow, Order},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Read, Who},
    wire::{
        ClientGone,
        extract::{JobInPath, Query},
        validate::{Check, stored_json},
    },
};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use utoipa::{IntoParams, ToSchema};

use super::{Job, JobError};
use crate::{
    change,
    cursor::{self, List},
    error::ErrorBody,
    redact::shown,
};

const DEFAULT_PAGE_JOBS: u32 = 50;
/// Maximum characters of a tag filter: a name, a colon, and a value.
pub(super) const MAX_TAG_FILTER_CHARS: usize =
    limits::MAX_TAG_KEY_CHARS + 1 + limits::MAX_TAG_VALUE_CHARS;

/// Read a job.
///
/// With its past attempts, its result and its last error. `wait_seconds` delays the answer until
/// the job has ended, or the time is up.
#[utoipa::path(
    get, path = "/jobs/{job_id}", tag = "jobs", operation_id = "jobs_get",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(GetQuery, ("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "The job.", body = Job),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
    Extension(ClientGone(gone)): Extension<ClientGone>,
    Query(query): Query<GetQuery>,
) -> Result<Reply<Job>, Error> {
    if let Some(wait_seconds) = query.wait_seconds {
        let mut check = Check::default();
        check.range("wait_seconds", wait_seconds, 0, limits::MAX_POLL_WAIT_SECONDS);
        check.finish()?;
        let key = JobKey { project_id: caller.project_id, id };
        let wait = Duration::from_secs(wait_seconds.into());
        wait::until_ended(&app.engine, key, wait, gone.cancelled()).await?;
    }
    find(&app, &caller, id).await.map(Reply)
}

/// A job with its attempts.
pub(crate) async fn find<P>(app: &App, caller: &Caller<P>, id: JobId) -> Result<Job, Error> {
    let project_id = caller.project_id;
    let mut conn = app.engine.pools.read_for(project_id).await?;
    let row = store::jobs::find(&mut conn, project_id, id).await?.ok_or(Error::JobNotFound)?;
    let (state, duration_ms) = (row.state, row.duration_ms);
    let attempts = store::jobs::attempts(&mut conn, project_id, id).await?;
    let changed = change::last_changes(&mut conn, &caller.who, project_id, &[id]).await?;
    let last_change = changed.into_values().next();
    let key = JobKey { project_id, id };
    let checkpoint = store::settle::checkpoints::find(&mut conn, &[key]).await?.pop();
    let job = Job {
        last_change,
        checkpoint_sequence: checkpoint.as_ref().map(|it| it.sequence),
        checkpoint: checkpoint.map(|it| stored_json(it.data)).transpose()?,
        ..Job::read(row)?
    };
    Ok(shown(&caller.who, job.with_attempts(attempts, state, duration_ms)))
}

/// How long to wait for a job.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct GetQuery {
    /// Seconds to wait for the job to finish.
    #[param(minimum = 0, maximum = 30)]
    wait_seconds: Option<u32>,
}

/// Filter and page of jobs.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListQuery {
    /// A search line: conditions of the form `name:value`, separated by spaces, all of which must
    /// hold. `state:pending,scheduled`, `queue:mail`, `type:send_mail`, `group:customer-3`,
    /// `tag:customer=3` or `tag:customer`, `label:gpu`, `batch:batch_…`, `age:>5m` or `age:<2h` (s,
    /// m, h, d; since it was stored), `error:refused` (text in the first 1,000 characters of the
    /// last error; at most 100; needs the scope `payload:read`), and a job's id, its start with
    /// `job_`, or its last 4 to 12 characters. Put a value with spaces in double quotes; a
    /// backslash keeps a quote or a backslash in it.
    #[param(max_length = 1000, example = "state:pending queue:mail age:>5m")]
    q: Option<String>,
    /// Only jobs in this state.
    #[serde(default, deserialize_with = "formats::job_states")]
    #[param(value_type = Option<JobState>)]
    state: Vec<JobState>,
    /// Only jobs in one of these states: `states=pending,scheduled`.
    #[serde(default, deserialize_with = "formats::job_states")]
    #[param(value_type = Option<Vec<JobState>>, style = Form, explode = false)]
    states: Vec<JobState>,
    /// Only jobs of this queue.
    queue: Option<String>,
    /// Only jobs of this type.
    job_type: Option<String>,
    /// Only jobs of this group.
    group: Option<String>,
    /// Only jobs with this tag: `name:value`, or `name` for any value. A name that has a colon is
    /// found with `q`.
    tag: Option<String>,
    /// Only jobs of this batch.
    #[serde(default, deserialize_with = "formats::optional_batch")]
    #[param(value_type = Option<String>, example = "batch_01m7w3ha3aextt8pkwwdmxsmqw")]
    batch_id: Option<BatchId>,
    /// Only jobs stored at this time or later.
    #[serde(default, deserialize_with = "formats::optional_time")]
    created_after: Option<DateTime<Utc>>,
    /// Only jobs stored before this time.
    #[serde(default, deserialize_with = "formats::optional_time")]
    created_before: Option<DateTime<Utc>>,
    /// `false` omits `payload` and `result`, which are then null. Use it for lists that show
    /// neither: a page of large jobs can be many megabytes.
    #[param(default = true)]
    payloads: Option<bool>,
    /// Order by the time of storing: `newest` first, or `oldest` first.
    #[param(default = "newest")]
    order: Option<Order>,
    /// Maximum number of jobs to return. Default: 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// A page of jobs.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct JobPage {
    /// Jobs of the page, without their attempts.
    pub jobs: Vec<Job>,
    /// True if there may be more. A page examines a bounded number of jobs, so it can be short or
    /// even empty while there are more.
    pub has_more: bool,
    /// Set if the page is short although there may be more jobs: those that were stored before this
    /// time (with `order=oldest`, after it) have not been examined yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub scanned_until: Option<DateTime<Utc>>,
    /// Pass it as `cursor` to get the next page.
    #[schema(required)]
    pub next_cursor: Option<String>,
    /// Same as `next_cursor`, under the name that older published clients use; not in the document.
    #[schema(ignore)]
    pub cursor: Option<String>,
}

/// A caller who may not read error messages may not search them either: the matches would reveal
/// them.
pub(super) fn may_search(who: &Who, filter: &store::jobs::Filter) -> Result<(), Error> {
    match filter.error.is_some() && !who.may_read_payloads() {
        true => Err(Error::Forbidden { needs: Permission::ReadPayloads.needs() }),
        false => Ok(()),
    }
}

/// List jobs.
///
/// Newest first, unless `order` says otherwise. Pass `next_cursor` to get the next page while
/// `has_more` is true.
#[utoipa::path(
    get, path = "/jobs", tag = "jobs", operation_id = "jobs_list",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(ListQuery),
    responses(
        (status = 200, description = "A page of jobs.", body = JobPage),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<ListQuery>,
) -> Result<Reply<JobPage>, Error> {
    let page_jobs = query.limit.unwrap_or(DEFAULT_PAGE_JOBS);
    let mut check = Check::default();
    check.range("limit", page_jobs, 1, limits::MAX_PAGE_JOBS);
    check.optional_name("queue", query.queue.as_deref(), limits::MAX_QUEUE_CHARS);
    check.optional_name("job_type", query.job_type.as_deref(), limits::MAX_JOB_TYPE_CHARS);
    check.optional_name("group", query.group.as_deref(), limits::MAX_GROUP_CHARS);
    check.optional_name("tag", query.tag.as_deref(), MAX_TAG_FILTER_CHARS);
    check.time("created_after", query.created_after);
    check.time("created_before", query.created_before);
    if !query.state.is_empty() && !query.states.is_empty() {
        check.refuse("states", "must not be sent beside state");
    }
    check.finish()?;
    let order = query.order.unwrap_or_default();
    let list = match order {
        Order::Newest => List::of(caller.project_id, "jobs"),
        Order::Oldest => List::of(caller.project_id, "jobs_oldest"),
    };
    // A list of states is the same in any order.
    let mut states = [query.state, query.states].concat();
    states.sort_by_key(|it| it.as_str());
    states.dedup();
    let filter = store::jobs::Filter {
        states,
        queue: query.queue,
        job_type: query.job_type,
        group: query.group,
        tags: query.tag.as_deref().map(store::jobs::read_tag).into_iter().collect(),
        batch_id: query.batch_id,
        created_after: query.created_after,
        created_before: query.created_before,
        ..store::jobs::Filter::default()
    };
    let list = list.filtered(&(filter.clone(), query.q.clone()));
    let after = cursor::read_id(&app, list, query.cursor.as_deref())?.map(JobId);
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let filter = match &query.q {
        Some(line) => {
            let now = store::schedules::clock(&mut conn).await?;
            let line = search::read(line, now).and_then(|it| filter.and(it));
            line.map_err(|message| Error::invalid("q", message))?
        }
        None => filter,
    };
    may_search(&caller.who, &filter)?;
    let payloads = store::jobs::Payloads::asked(query.payloads);
    let place = store::jobs::Place { order, after, jobs: page_jobs };
    let (rows, next) =
        store::jobs::page(&mut conn, caller.project_id, &filter, place, payloads).await?;
    let jobs = with_reasons(&mut conn, &caller, rows).await?;
    let next_cursor = next.map(|it| cursor::write_id(&app, list, it.0));
    Ok(Reply(JobPage {
        scanned_until: next.filter(|_| jobs.len() < page_jobs as usize).and_then(JobId::made_at),
        jobs,
        has_more: next.is_some(),
        cursor: next_cursor.clone(),
        next_cursor,
    }))
}

/// Jobs of a list, with their last errors and what keeps them from a worker.
async fn with_reasons(
    conn: &mut PgConnection,
    caller: &Caller<Read>,
    rows: Vec<JobRow>,
) -> Result<Vec<Job>, Error> {
    let failed = rows.iter().filter(|it| it.failures > 0);
    let failed: Vec<_> = failed.map(|it| (caller.project_id, it.id)).collect();
    let mut errors = store::jobs::last_errors(conn, &failed).await?;
    let ids: Vec<_> = rows.iter().map(|it| it.id).collect();
    let mut changes = change::last_changes(conn, &caller.who, caller.project_id, &ids).await?;
    let unserved = explain::unserved(conn, caller.project_id, &rows).await?;
    let jobs = rows.into_iter().map(|row| {
        let error = errors.remove(&(caller.project_id, row.id));
        let waiting_reason = unserved.get(&row.id).copied();
        let last_error = error.and_then(JobError::of);
        let last_change = changes.remove(&row.id);
        let job = Job { last_error, last_change, waiting_reason, ..Job::read(row)? };
        Ok(shown(&caller.who, job))
    });
    jobs.collect()
}
