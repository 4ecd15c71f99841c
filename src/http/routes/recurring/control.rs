//! `POST /v1/recurring/{recurring_id}/pause`, `…/resume`, `…/run`, and `GET …/fires`.

use axum::{Json as Reply, extract::State, http::StatusCode, response::Response};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, limits, schedule::FireOutcome};
use fencepost_engine::schedules::{self, FireRow, fire};
use fencepost_store::{self as store, TimePosition};
use fencepost_web::{
    app::App,
    auth::{Caller, Read, Schedule},
    wire::{
        extract::{NameInPath, Query},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::RecurringSchedule;
use crate::{
    cursor::{self, List},
    error::ErrorBody,
    idempotency::{self, Answer, Ids, Repeat},
    page::{PageSize, page},
    redact::shown,
    routes::{
        audit::{self, NewAuditEntry},
        jobs::{Job, read},
    },
};

const DEFAULT_PAGE_FIRES: u32 = 50;

/// Pause a schedule.
///
/// It does not fire until it is resumed.
#[utoipa::path(
    post, path = "/recurring/{recurring_id}/pause", tag = "recurring", operation_id = "recurring_pause",
    security(("api_key" = ["schedules"]), ("session" = ["member"])),
    params(("recurring_id" = String, Path, description = "The schedule.", example = "rjob_report")),
    responses(
        (status = 200, description = "The schedule.", body = RecurringSchedule),
        (status = 404, description = "The project has no such schedule.", body = ErrorBody),
    ),
)]
pub async fn pause(
    caller: Caller<Schedule>,
    State(app): State<App>,
    NameInPath(id): NameInPath,
) -> Result<Reply<RecurringSchedule>, Error> {
    let row = schedules::set_paused(&app.engine, caller.project_id, &id, true).await?;
    audit::note(&app, &caller, NewAuditEntry::to("recurring.paused", id)).await;
    Ok(Reply(shown(&caller.who, RecurringSchedule::of(&app.engine, row)?)))
}

/// Resume a schedule.
///
/// It fires from this moment; ticks during the pause are not caught up.
#[utoipa::path(
    post, path = "/recurring/{recurring_id}/resume", tag = "recurring", operation_id = "recurring_resume",
    security(("api_key" = ["schedules"]), ("session" = ["member"])),
    params(("recurring_id" = String, Path, description = "The schedule.", example = "rjob_report")),
    responses(
        (status = 200, description = "The schedule.", body = RecurringSchedule),
        (status = 404, description = "The project has no such schedule.", body = ErrorBody),
    ),
)]
pub async fn resume(
    caller: Caller<Schedule>,
    State(app): State<App>,
    NameInPath(id): NameInPath,
) -> Result<Reply<RecurringSchedule>, Error> {
    let row = schedules::set_paused(&app.engine, caller.project_id, &id, false).await?;
    audit::note(&app, &caller, NewAuditEntry::to("recurring.resumed", id)).await;
    Ok(Reply(shown(&caller.who, RecurringSchedule::of(&app.engine, row)?)))
}

/// Run a schedule now.
///
/// Creates one job immediately, regardless of its ticks, its `overlap` or a pause. Its ticks do not
/// change.
#[utoipa::path(
    post, path = "/recurring/{recurring_id}/run", tag = "recurring", operation_id = "recurring_run",
    security(("api_key" = ["schedules"]), ("session" = ["member"])),
    params(
        ("recurring_id" = String, Path, description = "The schedule.", example = "rjob_report"),
        idempotency::Header,
    ),
    responses(
        (status = 201, description = "The job is stored.", body = Job,
         headers(("Location" = String, description = "The job's path."))),
        (status = 404, description = "The project has no such schedule.", body = ErrorBody),
        (status = 429, description = "The project has too many jobs, or has stored all of its bytes.", body = ErrorBody),
    ),
)]
pub async fn run(
    caller: Caller<Schedule>,
    State(app): State<App>,
    NameInPath(id): NameInPath,
    repeat: Repeat,
) -> Result<Response, Error> {
    let (running, by) = (app.clone(), caller.clone());
    repeat
        .once(&app, &caller, async move |ids: Ids| {
            let job_id = fire::run_now(&running.engine, by.tenant(), &id, ids.job(0)).await?;
            audit::note(&running, &by, NewAuditEntry::to("recurring.run", id)).await;
            let job = read::find(&running, &by, job_id).await?;
            Ok(Answer::job(StatusCode::CREATED, job))
        })
        .await
}

/// Page of fires.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FiresQuery {
    /// Maximum number of fires to return. Default: 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// A tick and its outcome.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = RecurringFire)]
pub struct Fire {
    /// Time when the tick was due.
    pub due_at: DateTime<Utc>,
    /// Time when the tick was handled, to within 20 ms.
    pub at: DateTime<Utc>,
    /// Lateness in milliseconds.
    pub lateness_ms: i64,
    /// Outcome.
    pub outcome: FireOutcome,
    /// Id of its job; null: none.
    #[schema(required)]
    pub job_id: Option<String>,
    /// Number of ticks that this entry stands for: 1, or more where many ticks were missed at once.
    pub ticks: i64,
}

impl From<FireRow> for Fire {
    fn from(row: FireRow) -> Self {
        Self {
            due_at: row.tick,
            at: row.at,
            lateness_ms: (row.at - row.tick).num_milliseconds(),
            outcome: row.outcome,
            job_id: row.job_id.map(|it| it.to_string()),
            ticks: row.ticks,
        }
    }
}

page! {
    /// A page of ticks, newest first.
    FirePage {
        /// Fires of the page.
        fires: Fire
    }
}

/// List a schedule's fires.
///
/// The newest fires come first. Each is kept for 30 days.
#[utoipa::path(
    get, path = "/recurring/{recurring_id}/fires", tag = "recurring", operation_id = "recurring_fires",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(FiresQuery, ("recurring_id" = String, Path, description = "The schedule.", example = "rjob_report")),
    responses(
        (status = 200, description = "A page of fires.", body = FirePage),
        (status = 404, description = "The project has no such schedule.", body = ErrorBody),
    ),
)]
pub async fn fires(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(id): NameInPath,
    Query(query): Query<FiresQuery>,
) -> Result<Reply<FirePage>, Error> {
    let mut check = Check::default();
    let size = PageSize::read(query.limit, DEFAULT_PAGE_FIRES, limits::MAX_PAGE_FIRES, &mut check);
    check.finish()?;
    let project_id = caller.project_id;
    let list = List::of(project_id, "fires").filtered(&id);
    let before = cursor::read_place(&app, list, query.cursor.as_deref())?.map(|it| it.at);
    let mut conn = app.engine.pools.read_for(project_id).await?;
    let mut rows =
        store::schedules::fires(&mut conn, project_id, &id, before, size.one_more()).await?;
    drop(conn);
    if rows.is_empty() {
        schedules::find(&app.engine, project_id, &id).await?;
    }
    let next_cursor = size.cut(&mut rows, |fire| {
        cursor::write_place(&app, list, TimePosition { at: fire.tick, id: Uuid::nil() })
    });
    let fires = rows.into_iter().map(Fire::from).collect();
    Ok(Reply(FirePage::of(fires, next_cursor)))
}
