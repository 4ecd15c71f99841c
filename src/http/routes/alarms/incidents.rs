//! `/v1/incidents`: what alarms have found.

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    alarm::{Details, MAX_MUTE_SECONDS, Rule, summary},
    error::Error,
    ids::IncidentId,
    limits,
};
use fencepost_store::outbound::incidents::{self, IncidentRow};
use fencepost_web::{
    app::App,
    auth::{Caller, Manage, Read, Who},
    wire::{
        extract::{IncidentInPath, Json, Query, RequestBody},
        openapi::range,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    cursor::{self, List},
    error::ErrorBody,
    page::{PageSize, page},
};

const DEFAULT_PAGE_INCIDENTS: u32 = 50;

/// State of an incident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum IncidentState {
    /// It lasts.
    Open,
    /// It has ended.
    Resolved,
}

/// A finding of an alarm, from its beginning to its end.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Incident {
    /// Id of the incident.
    #[schema(example = "inc_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// The alarm.
    #[schema(example = "dead_letters")]
    pub alarm: String,
    /// Rule of the alarm.
    pub rule: Rule,
    /// Subject of the incident: an error group, a queue, a job type of a queue
    /// (`queue/job_type`), a schedule, an endpoint or a key.
    #[schema(example = "8b70f301de4cf85e6c996dca2119ff86")]
    pub subject: String,
    /// The incident in a sentence.
    #[schema(example = "10 jobs of the type mail.send became dead letters with SmtpTimeout.")]
    pub summary: String,
    /// The summary in fields for programs. It may be renewed while the incident lasts.
    pub details: Details,
    /// State.
    pub state: IncidentState,
    /// Time when the incident began.
    pub began_at: DateTime<Utc>,
    /// Time when it was to be reported: at once, or when it had lasted for long enough. While it is
    /// muted, no report is sent.
    pub triggered_at: DateTime<Utc>,
    /// Time of its end; null: the incident lasts.
    #[schema(required)]
    pub resolved_at: Option<DateTime<Utc>>,
    /// Until then, this alarm notifies of nothing about this subject; null: this
    /// incident was not muted; an earlier one of the same subject may be.
    #[schema(required)]
    pub muted_until: Option<DateTime<Utc>>,
}

impl Incident {
    /// Callers who may not list keys and webhooks do not see their names and hosts.
    fn of(row: IncidentRow, who: &Who) -> Self {
        let (rule, mut details) = row.read();
        if !who.may(rule.permission()) {
            details.name = None;
        }
        let is_open = row.resolved_at.is_none();
        Self {
            id: row.id.to_string(),
            alarm: row.alarm,
            rule,
            subject: row.subject,
            summary: summary(rule, &details),
            details,
            state: if is_open { IncidentState::Open } else { IncidentState::Resolved },
            began_at: row.began_at,
            triggered_at: row.triggered_at,
            resolved_at: row.resolved_at,
            muted_until: row.muted_until,
        }
    }
}

page! {
    /// A page of incidents, newest first.
    IncidentPage {
        /// Incidents of the page.
        incidents: Incident
    }
}

/// Page of incidents.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct IncidentsQuery {
    /// Only those that last, or only those that have ended. Default: all.
    state: Option<IncidentState>,
    /// Maximum number of incidents to return. Default: 50.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// List incidents.
///
/// Incidents that have ended are kept for 90 days.
#[utoipa::path(
    get, path = "/incidents", tag = "alarms", operation_id = "incidents_list",
    params(IncidentsQuery),
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    responses(
        (status = 200, description = "A page of incidents, newest first.", body = IncidentPage),
    ),
)]
pub async fn list(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<IncidentsQuery>,
) -> Result<Reply<IncidentPage>, Error> {
    let mut check = Check::default();
    let max = limits::MAX_PAGE_INCIDENTS;
    let size = PageSize::read(query.limit, DEFAULT_PAGE_INCIDENTS, max, &mut check);
    check.finish()?;
    let list = List::of(caller.project_id, "incidents").filtered(&query.state);
    let before = cursor::read_id(&app, list, query.cursor.as_deref())?.map(IncidentId);
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let (project_id, limit) = (caller.project_id, size.one_more());
    let mut rows = match query.state {
        Some(IncidentState::Open) => {
            incidents::list_open(&mut conn, project_id, before, limit).await?
        }
        asked => incidents::list(&mut conn, project_id, asked.is_some(), before, limit).await?,
    };
    drop(conn);
    let next_cursor = size.cut(&mut rows, |it| cursor::write_id(&app, list, it.id.0));
    let incidents = rows.into_iter().map(|it| Incident::of(it, &caller.who)).collect();
    Ok(Reply(IncidentPage::of(incidents, next_cursor)))
}

/// Read an incident.
#[utoipa::path(
    get, path = "/incidents/{incident_id}", tag = "alarms", operation_id = "incidents_get",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("incident_id" = String, Path, description = "The incident.", example = "inc_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "The incident.", body = Incident),
        (status = 404, description = "The project has no such incident.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    IncidentInPath(id): IncidentInPath,
) -> Result<Reply<Incident>, Error> {
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let row = incidents::find(&mut conn, caller.project_id, id).await?;
    Ok(Reply(Incident::of(row.ok_or(Error::AlarmNotFound)?, &caller.who)))
}

/// For how long to be silent.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"seconds": 3600}))]
pub struct MuteIncidentRequest {
    /// Seconds without notifications; 0 ends all mutes of the alarm about this subject.
    #[schema(extensions(("bounds" = json!(range(0, MAX_MUTE_SECONDS)))))]
    seconds: i32,
}

impl RequestBody for MuteIncidentRequest {}

/// Mute an incident.
///
/// While it is muted, neither its end nor a further incident of the same alarm and subject is
/// reported. These are still listed.
#[utoipa::path(
    post, path = "/incidents/{incident_id}/mute", tag = "alarms", operation_id = "incidents_mute",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("incident_id" = String, Path, description = "The incident.", example = "inc_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body = MuteIncidentRequest,
    responses(
        (status = 200, description = "The incident.", body = Incident),
        (status = 404, description = "The project has no such incident.", body = ErrorBody),
    ),
)]
pub async fn mute(
    caller: Caller<Manage>,
    State(app): State<App>,
    IncidentInPath(id): IncidentInPath,
    Json(request): Json<MuteIncidentRequest>,
) -> Result<Reply<Incident>, Error> {
    let mut check = Check::default();
    check.range("seconds", request.seconds, 0, MAX_MUTE_SECONDS);
    check.finish()?;
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    incidents::mute(&mut conn, caller.project_id, id, request.seconds).await?;
    let row = incidents::find(&mut conn, caller.project_id, id).await?;
    Ok(Reply(Incident::of(row.ok_or(Error::AlarmNotFound)?, &caller.who)))
}
