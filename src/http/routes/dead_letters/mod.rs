//! `GET /v1/dead-letters`, `GET …/groups`, `POST …/{job_id}/retry` and `DELETE …/{job_id}`: dead
//! letters, and groups of similar failures.

pub mod bulk;

use std::collections::HashMap;

use axum::{Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, formats, ids::JobKey, limits, operation::Filter};
use fencepost_engine::jobs::{control, dead_letters};
use fencepost_store::{
    self as store, TimePosition,
    jobs::{
        Payloads,
        dead_letters::{GroupRow, LetterRow},
    },
};
use fencepost_web::{
    app::App,
    auth::{Caller, Manage, Read},
    wire::{
        extract::{JobInPath, OptionalJson, Query},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use crate::{
    change::{ReasonRequest, last_changes},
    cursor::{self, List},
    error::ErrorBody,
    page::{PageSize, page},
    redact::{Redact, shown},
    routes::{
        audit::{self, NewAuditEntry},
        jobs::{Job, JobError, read},
    },
};

const DEFAULT_PAGE_DEAD_LETTERS: u32 = 50;

/// A dead-lettered job.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct DeadLetter {
    /// Fingerprint of its group.
    #[schema(example = "6f0a1c52e3b84d0c9d5e7a1b2c3d4e5f")]
    pub fingerprint: String,
    /// When it was dead-lettered.
    pub died_at: DateTime<Utc>,
    /// The job, with its last error; without its attempts.
    pub job: Job,
}

/// Filter and page of dead letters.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DeadLettersQuery {
    /// Only dead letters of this queue.
    queue: Option<String>,
    /// Only dead letters of this job type.
    job_type: Option<String>,
    /// Only dead letters of this group.
    fingerprint: Option<String>,
    /// Only dead letters since this time.
    #[serde(default, deserialize_with = "formats::optional_time")]
    died_after: Option<DateTime<Utc>>,
    /// Only dead letters before this time.
    #[serde(default, deserialize_with = "formats::optional_time")]
    died_before: Option<DateTime<Utc>>,
    /// `false` omits `payload` and `result`, which are then null.
    #[param(default = true)]
    payloads: Option<bool>,
    /// Maximum number of dead letters to return. Default: 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

page! {
    /// A page of dead letters, newest first.
    DeadLetterPage {
        /// Dead letters of the page. It examines a bounded number of them, so it can be short or
        /// even empty while there are more.
        dead_letters: DeadLetter
    }
}

/// Checks a filter of a query or body, below `path`.
fn check_filter(path: &str, filter: &Filter, check: &mut Check) {
    let Filter { queue, job_type, fingerprint: _, died_after, died_before } = filter;
    let field = |name: &str| format!("{path}{name}");
    check.optional_name(&field("queue"), queue.as_deref(), limits::MAX_QUEUE_CHARS);
    check.optional_name(&field("job_type"), job_type.as_deref(), limits::MAX_JOB_TYPE_CHARS);
    check.time(&field("died_after"), *died_after);
    check.time(&field("died_before"), *died_before);
}

/// List dead letters.
///
/// Newest first. Pass `next_cursor` to get the next page while `has_more` is true.
#[utoipa::path(
    get, path = "/dead-letters", tag = "dead-letters", operation_id = "dead_letters_list",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(DeadLettersQuery),
    responses(
        (status = 200, description = "A page of dead letters.", body = DeadLetterPage),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<DeadLettersQuery>,
) -> Result<Reply<DeadLetterPage>, Error> {
    let mut check = Check::default();
    let mut size = PageSize::read(
        query.limit,
        DEFAULT_PAGE_DEAD_LETTERS,
        limits::MAX_PAGE_DEAD_LETTERS,
        &mut check,
    );
    let fingerprint = query.fingerprint.as_deref().map(Uuid::parse_str).transpose();
    if fingerprint.is_err() {
        check.refuse("fingerprint", "must be the fingerprint of a group");
    }
    let filter = Filter {
        queue: query.queue,
        job_type: query.job_type,
        fingerprint: fingerprint.unwrap_or_default(),
        died_after: query.died_after,
        died_before: query.died_before,
    };
    check_filter("", &filter, &mut check);
    check.finish()?;
    let project_id = caller.project_id;
    let list = List::of(project_id, "dead letters").filtered(&filter);
    let before = cursor::read_place(&app, list, query.cursor.as_deref())?;
    let mut conn = app.engine.pools.read_for(project_id).await?;
    let rows =
        store::jobs::dead_letters::page(&mut conn, project_id, &filter, before, size.one_more())
            .await?;
    let (mut matching, examined): (Vec<_>, Vec<_>) = rows.into_iter().partition(|it| it.is_match);
    let cursor = |it: &LetterRow| {
        cursor::write_place(&app, list, TimePosition { at: it.died_at, id: it.job_id.0 })
    };
    if Payloads::asked(query.payloads) == Payloads::Shown {
        let ids: Vec<_> = matching.iter().map(|it| it.job_id).collect();
        size = size.at_most(store::jobs::fitting(&mut conn, project_id, &ids).await?);
    }
    let next_cursor = size.cut(&mut matching, cursor).or_else(|| examined.last().map(cursor));
    let ids: Vec<_> = matching.iter().map(|it| it.job_id).collect();
    let jobs =
        store::jobs::find_all(&mut conn, project_id, &ids, Payloads::asked(query.payloads)).await?;
    let keys: Vec<_> = ids.iter().map(|it| (project_id, *it)).collect();
    let mut errors = store::jobs::last_errors(&mut conn, &keys).await?;
    let mut changes = last_changes(&mut conn, &caller.who, project_id, &ids).await?;
    let mut jobs: HashMap<_, _> = jobs.into_iter().map(|it| (it.id, it)).collect();
    let mut dead_letters = Vec::with_capacity(matching.len());
    for LetterRow { job_id, fingerprint, died_at, .. } in matching {
        // It was retried at this very moment.
        let Some(row) = jobs.remove(&job_id) else { continue };
        let error = errors.remove(&(project_id, job_id));
        let last_error = error.and_then(JobError::of);
        let last_change = changes.remove(&job_id);
        let job = Job { last_error, last_change, ..Job::read(row)? };
        let job = shown(&caller.who, job);
        dead_letters.push(DeadLetter { fingerprint: hex(fingerprint), died_at, job });
    }
    Ok(Reply(DeadLetterPage::of(dead_letters, next_cursor)))
}

fn hex(fingerprint: Uuid) -> String {
    fingerprint.simple().to_string()
}

/// Page of groups.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct GroupsQuery {
    /// Maximum number of groups to return. Default: 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// Dead letters with the same job type, error type, and message (without numbers, ids and quoted
/// values).
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct DeadLetterGroup {
    /// Fingerprint of the group.
    #[schema(example = "6f0a1c52e3b84d0c9d5e7a1b2c3d4e5f")]
    pub fingerprint: String,
    /// Job type.
    pub job_type: String,
    /// Error type, or the outcome of the last attempt if the worker reported none.
    #[schema(required)]
    pub error_type: Option<String>,
    /// Error message of the group's first dead letter.
    #[schema(required)]
    pub sample_message: Option<String>,
    /// True if the message is null because the caller may not read it.
    pub redacted: bool,
    /// Id of the first dead letter.
    pub sample_job_id: String,
    /// Number of dead letters.
    pub count: i64,
    /// Time when the first job of the group was dead-lettered.
    pub first_seen_at: DateTime<Utc>,
    /// Time when the latest job of the group was dead-lettered.
    pub last_seen_at: DateTime<Utc>,
    /// Queues of the newest 20 dead letters.
    pub queues: Vec<String>,
    /// Dead letters of the last hour; 100 stands for 100 or more.
    pub count_last_hour: i64,
}

impl Redact for DeadLetterGroup {
    fn redact(&mut self) {
        self.redacted = true;
        self.sample_message = None;
    }
}

impl From<GroupRow> for DeadLetterGroup {
    fn from(row: GroupRow) -> Self {
        Self {
            fingerprint: hex(row.fingerprint),
            job_type: row.job_type,
            error_type: row.error_type,
            sample_message: row.sample_message,
            redacted: false,
            sample_job_id: row.sample_job_id.to_string(),
            count: row.jobs,
            first_seen_at: row.first_seen_at,
            last_seen_at: row.last_seen_at,
            queues: row.queues,
            count_last_hour: row.last_hour,
        }
    }
}

page! {
    /// A page of groups, latest first.
    GroupPage {
        /// Groups of the page.
        groups: DeadLetterGroup
    }
}

/// List groups of dead letters.
///
/// Latest first. Retry or purge a group by its `fingerprint`.
#[utoipa::path(
    get, path = "/dead-letters/groups", tag = "dead-letters", operation_id = "dead_letters_groups",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(GroupsQuery),
    responses(
        (status = 200, description = "A page of groups.", body = GroupPage),
    ),
)]
pub async fn groups(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<GroupsQuery>,
) -> Result<Reply<GroupPage>, Error> {
    let mut check = Check::default();
    let size = PageSize::read(
        query.limit,
        DEFAULT_PAGE_DEAD_LETTERS,
        limits::MAX_PAGE_DEAD_LETTERS,
        &mut check,
    );
    check.finish()?;
    let project_id = caller.project_id;
    let list = List::of(project_id, "groups");
    let before = cursor::read_place(&app, list, query.cursor.as_deref())?;
    let mut conn = app.engine.pools.read_for(project_id).await?;
    let mut rows =
        store::jobs::dead_letters::groups(&mut conn, project_id, before, size.one_more()).await?;
    let next_cursor = size.cut(&mut rows, |group| {
        let position = TimePosition { at: group.last_seen_at, id: group.fingerprint };
        cursor::write_place(&app, list, position)
    });
    let groups: Vec<_> = rows.into_iter().map(DeadLetterGroup::from).collect();
    Ok(Reply(GroupPage::of(shown(&caller.who, groups), next_cursor)))
}

/// Retry a dead letter.
///
/// Its failures count from 0 again; attempts and history continue. Descendants that were cancelled
/// with it are retried, too.
#[utoipa::path(
    post, path = "/dead-letters/{job_id}/retry", tag = "dead-letters", operation_id = "dead_letters_retry",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body(content = ReasonRequest, description = "Optional."),
    responses(
        (status = 200, description = "The job.", body = Job),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
        (status = 409, description = "The job is not a dead letter, or a live job has its unique key.", body = ErrorBody),
    ),
)]
pub async fn retry(
    caller: Caller<Manage>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
    OptionalJson(request): OptionalJson<ReasonRequest>,
) -> Result<Reply<Job>, Error> {
    let key = JobKey { project_id: caller.project_id, id };
    let by = request.accept(&caller.who)?;
    control::retry_dead_letter(&app.engine, key, &by).await?;
    audit::note(&app, &caller, NewAuditEntry::to("dead_letter.retried", id.to_string())).await;
    read::find(&app, &caller, id).await.map(Reply)
}

/// Delete a dead letter.
///
/// Deletes the job with its payload, history and logs. This cannot be undone.
#[utoipa::path(
    delete, path = "/dead-letters/{job_id}", tag = "dead-letters", operation_id = "dead_letters_delete",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("job_id" = String, Path, description = "The job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 204, description = "Deleted."),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
        (status = 409, description = "The job is not a dead letter.", body = ErrorBody),
    ),
)]
pub async fn delete(
    caller: Caller<Manage>,
    State(app): State<App>,
    JobInPath(id): JobInPath,
) -> Result<StatusCode, Error> {
    let key = JobKey { project_id: caller.project_id, id };
    dead_letters::delete(&app.engine, key).await?;
    audit::note(&app, &caller, NewAuditEntry::to("dead_letter.deleted", id.to_string())).await;
    Ok(StatusCode::NO_CONTENT)
}
