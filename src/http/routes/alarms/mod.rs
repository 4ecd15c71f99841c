//! `/v1/alarms`: when a project's people and endpoints are notified.

pub mod incidents;

use axum::{Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    alarm::{MAX_ALARM_NAME_CHARS, MAX_ALARM_QUEUES, MAX_ALARMS, MailReaders, MailTo, Rule},
    error::Error,
    ids::ProjectId,
    limits,
};
use fencepost_store::{
    outbound::alarms::{self, AlarmRow, AlarmSettings, DefaultAlarm},
    people::members,
};
use fencepost_web::{
    app::App,
    auth::{Caller, Manage, Read},
    wire::{
        extract::{Json, NameInPath, RequestBody},
        openapi::{items, range},
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::{
    error::ErrorBody,
    routes::audit::{self, NewAuditEntry},
    settings::{self, Preconditions, Settings, Tagged},
};

/// Alarms of one answer: those of a project, and those that each has.
const MAX_SHOWN_ALARMS: i64 = MAX_ALARMS + 50;

/// A rule that begins an incident, of which people are notified.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Alarm {
    /// Name.
    #[schema(example = "dead_letters")]
    pub name: String,
    /// Rule of the alarm.
    pub rule: Rule,
    /// Only these queues; none: all.
    pub queues: Vec<String>,
    /// A number of dead letters (`dead_letters`), running jobs (`workers_silent`), losses in a row
    /// (`jobs_lost`) or groups (`groups_blocked`), seconds (`oldest_ready`, `groups_waiting`,
    /// `push_failing`) or days (`key_expiring`); null for other rules.
    #[schema(required, example = 10)]
    pub threshold: Option<i32>,
    /// Within how many seconds (`dead_letters`), or for how long (`oldest_ready`,
    /// `workers_silent`, `groups_blocked`, `groups_waiting`); null for other rules.
    #[schema(required, example = 300)]
    pub for_seconds: Option<i32>,
    /// Members who get a mail, if their address is verified.
    pub mail_to: MailTo,
    /// True if the alarm is evaluated.
    pub enabled: bool,
    /// Time of the project's last change; null: the alarm has its default settings.
    #[schema(required)]
    pub updated_at: Option<DateTime<Utc>>,
    /// Version of the settings, also in the header `ETag`. A write with it as `If-Match` is refused
    /// if they have changed since.
    #[serde(default)]
    #[schema(required, example = "\"4f0c2a9d1be87a3355d0c61e\"")]
    pub etag: String,
}

impl Settings for Alarm {
    const FIELDS: &'static [&'static str] =
        &["rule", "queues", "threshold", "for_seconds", "mail_to", "enabled"];

    fn etag(&mut self) -> &mut String {
        &mut self.etag
    }
}

impl Alarm {
    fn of(row: AlarmRow) -> Self {
        let rule = Rule::of_name(&row.rule).unwrap_or(Rule::DeadLetters);
        Self {
            name: row.name,
            rule,
            queues: row.queues,
            threshold: rule.thresholds().map(|_| row.threshold),
            for_seconds: rule.periods().map(|_| row.for_seconds),
            mail_to: MailTo::of_name(&row.mail_to),
            enabled: row.is_enabled,
            updated_at: row.updated_at,
            etag: String::new(),
        }
        .tagged()
    }

    fn logged(&self) -> Option<String> {
        serde_json::to_string(self).ok()
    }
}

/// The alarms of a project.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct AlarmList {
    /// Alarms, by name.
    pub alarms: Vec<Alarm>,
    /// Names of enabled alarms that reach no one: no member whom they are mailed to has a verified
    /// address, or the server sends no mails, and no webhook asks for `alarm.triggered`. Empty for
    /// a project without members.
    #[serde(default)]
    pub unheard: Vec<String>,
}

/// Settings of an alarm.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"rule": "oldest_ready", "queues": ["mail"], "threshold": 60, "for_seconds": 30}))]
pub struct PutAlarmRequest {
    /// Rule of the alarm. Default: the rule of the alarm with this name; a new one needs it.
    rule: Option<Rule>,
    /// Only these queues, for rules about queues. Default: all.
    #[schema(extensions(("bounds" = json!(items(0, MAX_ALARM_QUEUES)))))]
    queues: Option<Vec<String>>,
    /// 1–1,000 dead letters or running jobs, 2–100 losses in a row, 1–100 groups, 60–604,800 s, or
    /// 1–90 days: see the rule. Default: that of the rule.
    #[schema(extensions(("bounds" = json!(of_any_rule(Rule::thresholds)))))]
    threshold: Option<i32>,
    /// 60–3,600 s for `dead_letters`, 0–86,400 s for `oldest_ready`, `workers_silent`,
    /// `groups_blocked` and `groups_waiting`. Default: that of the rule.
    #[schema(extensions(("bounds" = json!(of_any_rule(Rule::periods)))))]
    for_seconds: Option<i32>,
    /// Members who get a mail. Default: owners.
    mail_to: Option<MailTo>,
    /// False switches the alarm off. Default: true.
    enabled: Option<bool>,
}

impl RequestBody for PutAlarmRequest {}

/// The bounds of a number within which those of each rule are.
fn of_any_rule(bounds: fn(Rule) -> Option<(i32, i32)>) -> Value {
    let (least, greatest): (Vec<_>, Vec<_>) = Rule::ALL.into_iter().filter_map(bounds).unzip();
    range(least.into_iter().min(), greatest.into_iter().max())
}

/// List alarms.
///
/// Every project has some, which it can change. Endpoints of webhooks that ask for them get the
/// events
/// `alarm.triggered` and `alarm.resolved`.
#[utoipa::path(
    get, path = "/alarms", tag = "alarms", operation_id = "alarms_list",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    responses((status = 200, description = "All alarms of the project.", body = AlarmList)),
)]
pub async fn list(caller: Caller<Read>, State(app): State<App>) -> Result<Reply<AlarmList>, Error> {
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let rows = alarms::list(&mut conn, caller.project_id, MAX_SHOWN_ALARMS).await?;
    let is_heard_elsewhere = alarms::has_webhook(&mut conn, caller.project_id).await?;
    drop(conn);
    let readers = match is_heard_elsewhere {
        true => None,
        false => Some(mail_readers(&app, caller.project_id).await?),
    };
    let alarms: Vec<_> = rows.into_iter().map(Alarm::of).collect();
    let is_missed =
        |it: &Alarm| it.enabled && readers.is_some_and(|readers| readers.miss(it.mail_to));
    let unheard = alarms.iter().filter(|it| is_missed(it)).map(|it| it.name.clone()).collect();
    Ok(Reply(AlarmList { alarms, unheard }))
}

/// Members who read mails of alarms. Without a mail server there are none.
async fn mail_readers(app: &App, project_id: ProjectId) -> Result<MailReaders, Error> {
    let mut conn = app.engine.pools.people.acquire_for(project_id).await?;
    let readers = members::mail_readers(&mut conn, project_id).await?;
    Ok(match app.accounts.mailer.is_used() {
        true => readers,
        false => MailReaders { has_members: readers.has_members, ..MailReaders::default() },
    })
}

/// Read an alarm.
#[utoipa::path(
    get, path = "/alarms/{alarm}", tag = "alarms", operation_id = "alarms_get",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(("alarm" = String, Path, description = "Name of the alarm.", example = "dead_letters")),
    responses(
        (status = 200, description = "The alarm.", body = Alarm),
        (status = 404, description = "The project has no such alarm.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Read>,
    State(app): State<App>,
    NameInPath(name): NameInPath,
) -> Result<Tagged<Alarm>, Error> {
    let alarm = find(&app, caller.project_id, &name).await?;
    alarm.map(Tagged).ok_or(Error::AlarmNotFound)
}

async fn find(app: &App, project_id: ProjectId, name: &str) -> Result<Option<Alarm>, Error> {
    let mut conn = app.engine.pools.read_for(project_id).await?;
    Ok(alarms::find(&mut conn, project_id, name).await?.map(Alarm::of))
}

/// Write an alarm.
///
/// Changes one that every project has, or makes another one, for example for single queues.
#[utoipa::path(
    put, path = "/alarms/{alarm}", tag = "alarms", operation_id = "alarms_put",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("alarm" = String, Path, description = "Name of the alarm.", example = "dead_letters"), settings::Header),
    request_body = PutAlarmRequest,
    responses(
        (status = 200, description = "The alarm.", body = Alarm),
    ),
)]
pub async fn put(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(name): NameInPath,
    conditions: Preconditions,
    Json(request): Json<PutAlarmRequest>,
) -> Result<Tagged<Alarm>, Error> {
    let about = (caller.project_id, format!("alarm {name}"));
    let current = find(&app, caller.project_id, &name);
    let write = write(&app, &caller, &name, request);
    conditions.write(&app, about, current, write).await.map(Tagged)
}

async fn write(
    app: &App,
    caller: &Caller<Manage>,
    name: &str,
    request: PutAlarmRequest,
) -> Result<Alarm, Error> {
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let default = alarms::default(&mut conn, name).await?;
    let before = alarms::find(&mut conn, caller.project_id, name).await?.map(Alarm::of);
    let fixed = default.as_ref().and_then(|it| Rule::of_name(&it.rule));
    let rule = rule(&request, fixed, before.as_ref())?;
    let usual = alarms::default(&mut conn, rule.name()).await?.ok_or(Error::AlarmNotFound)?;
    let settings = check(name, request, rule, &default.unwrap_or(usual))?;
    if !alarms::put(&mut conn, caller.project_id, name, &settings, MAX_ALARMS).await? {
        return Err(Error::QuotaExceeded { what: "alarms of its own", max: MAX_ALARMS });
    }
    let after = alarms::find(&mut conn, caller.project_id, name).await?;
    drop(conn);
    let after = Alarm::of(after.ok_or(Error::AlarmNotFound)?);
    let entry = NewAuditEntry {
        before: before.and_then(|it| it.logged()),
        after: after.logged(),
        ..NewAuditEntry::to("alarm.changed", name)
    };
    audit::note(app, caller, entry).await;
    Ok(after)
}

/// The rule that is meant. The names of alarms that every project has keep their rules.
fn rule(
    request: &PutAlarmRequest,
    fixed: Option<Rule>,
    before: Option<&Alarm>,
) -> Result<Rule, Error> {
    let rule = request.rule.or(fixed).or(before.map(|it| it.rule));
    match (rule, fixed) {
        (None, _) => Err(Error::invalid("rule", "is needed for a new alarm")),
        (Some(rule), Some(fixed)) if rule != fixed => {
            Err(Error::invalid("rule", format!("must be {} for this name", fixed.name())))
        }
        (Some(rule), _) => Ok(rule),
    }
}

fn check(
    name: &str,
    it: PutAlarmRequest,
    rule: Rule,
    usual: &DefaultAlarm,
) -> Result<AlarmSettings, Error> {
    let mut check = Check::default();
    let is_plain = |it: char| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '_';
    if name.chars().count() > MAX_ALARM_NAME_CHARS || !name.chars().all(is_plain) {
        let bound = MAX_ALARM_NAME_CHARS;
        check.refuse("alarm", format!("must be at most {bound} of a to z, 0 to 9 and _"));
    }
    let queues = it.queues.unwrap_or_default();
    check.names("queues", &queues, MAX_ALARM_QUEUES, limits::MAX_QUEUE_CHARS);
    if !rule.has_queues() && !queues.is_empty() {
        check.refuse("queues", format!("the rule {} is not about queues", rule.name()));
    }
    let mut number = |field, sent: Option<i32>, bounds, usual| match (sent, bounds) {
        (None, _) => usual,
        (Some(sent), Some((min, max))) => {
            check.range(field, sent, min, max);
            sent
        }
        (Some(_), None) => {
            check.refuse(field, format!("the rule {} has none", rule.name()));
            usual
        }
    };
    let threshold = number("threshold", it.threshold, rule.thresholds(), usual.threshold);
    let for_seconds = number("for_seconds", it.for_seconds, rule.periods(), usual.for_seconds);
    check.finish()?;
    Ok(AlarmSettings {
        rule: rule.name(),
        queues,
        threshold,
        for_seconds,
        mail_to: it.mail_to.unwrap_or(MailTo::Owners).name(),
        is_enabled: it.enabled.unwrap_or(true),
    })
}

/// Delete an alarm.
///
/// One that every project has is as before; to silence it, disable it.
#[utoipa::path(
    delete, path = "/alarms/{alarm}", tag = "alarms", operation_id = "alarms_delete",
    security(("api_key" = ["manage"]), ("session" = ["member"])),
    params(("alarm" = String, Path, description = "Name of the alarm.", example = "dead_letters"), settings::Header),
    responses(
        (status = 204, description = "What the project has set is deleted."),
        (status = 404, description = "The project has set no such alarm.", body = ErrorBody),
    ),
)]
pub async fn delete(
    caller: Caller<Manage>,
    State(app): State<App>,
    NameInPath(name): NameInPath,
    conditions: Preconditions,
) -> Result<StatusCode, Error> {
    let before = find(&app, caller.project_id, &name).await?;
    let about = (caller.project_id, format!("alarm {name}"));
    let delete = async {
        let mut conn = app.engine.pools.read_for(caller.project_id).await?;
        let is_gone = alarms::delete(&mut conn, caller.project_id, &name).await?;
        if is_gone { Ok(()) } else { Err(Error::AlarmNotFound) }
    };
    let current = find(&app, caller.project_id, &name);
    conditions.write(&app, about, current, delete).await?;
    let entry = NewAuditEntry {
        before: before.and_then(|it| it.logged()),
        ..NewAuditEntry::to("alarm.deleted", name)
    };
    audit::note(&app, &caller, entry).await;
    Ok(StatusCode::NO_CONTENT)
}
