//! Schedules: the list, one with its next ticks and its fires, and the form.

use askama::Template;
use axum::{
    extract::Path,
    http::{HeaderMap, Method},
    response::Response,
};
use chrono::DateTime;
use fencepost_domain::{cron, error::Error};
use fencepost_http::routes::recurring::{
    RecurringPage, RecurringSchedule,
    control::{Fire, FirePage},
    times::{CronPreview, FireTime, NextTimes},
};

use super::{
    action_table,
    form::{self, Field, Fields},
    format::{self, ShownJson},
    location::{HX_REQUEST, segment},
    page::{Frame, Here, render},
    session::go,
};

/// Number of future ticks on the page.
const SHOWN_FIRES: u32 = 5;
const SHOWN_PAST_FIRES: u32 = 20;

#[derive(Template)]
#[template(path = "recurring.html")]
struct List {
    frame: Frame,
    schedules: Vec<(RecurringSchedule, String)>,
    next: Option<String>,
}

/// The list, each with its expression in words.
pub async fn list(here: Here) -> Result<Response, Error> {
    let (page, _): (RecurringPage, _) = here.list("/recurring", &[]).await?;
    let frame = here.frame;
    let next = frame.next("/recurring", "", page.next_cursor.as_deref());
    let in_words = |it: RecurringSchedule| {
        let words = cron::parse(&it.cron_expression).map(|cron| cron::in_words(&cron));
        (it, words.unwrap_or_default())
    };
    let schedules = page.recurring.into_iter().map(in_words).collect();
    render(&List { frame, schedules, next })
}

#[derive(Template)]
#[template(path = "schedule.html")]
struct Detail {
    frame: Frame,
    schedule: RecurringSchedule,
    times: NextTimes,
    fires: Vec<Fire>,
    payload: ShownJson,
}

/// One schedule.
pub async fn detail(here: Here, Path((_, id)): Path<(String, String)>) -> Result<Response, Error> {
    let at = format!("/recurring/{}", segment(&id));
    let (next, fires) =
        (format!("{at}/next?count={SHOWN_FIRES}"), format!("{at}/fires?limit={SHOWN_PAST_FIRES}"));
    let (schedule, times, history) = tokio::try_join!(
        here.get::<RecurringSchedule>(&at),
        here.get::<NextTimes>(&next),
        here.get::<FirePage>(&fires),
    )?;
    let payload = format::pretty(schedule.payload.get());
    render(&Detail { frame: here.frame, schedule, times, fires: history.fires, payload })
}

/// Adds to [`FireTime`] what pages show of it.
trait FireTimeExt {
    /// The time in the schedule's zone, for people.
    fn local_words(&self) -> String;
}

impl FireTimeExt for FireTime {
    fn local_words(&self) -> String {
        let read = DateTime::parse_from_rfc3339(&self.local);
        read.map_or_else(
            |_| self.local.clone(),
            |it| it.format("%a %-d %b %Y, %H:%M:%S %:z").to_string(),
        )
    }
}

#[derive(Template)]
#[template(path = "schedule_form.html")]
struct FormPage {
    frame: Frame,
    /// The target of the form.
    place: String,
    schedule: Option<RecurringSchedule>,
    fires: bool,
    payload: String,
    /// The retry policy of its jobs, as JSON: the form carries it without showing it.
    retry: String,
}

/// The form for a new schedule.
pub async fn new(here: Here) -> Result<Response, Error> {
    render(&FormPage {
        frame: here.frame,
        place: "/recurring/new".to_owned(),
        schedule: None,
        fires: true,
        payload: "{}".to_owned(),
        retry: String::new(),
    })
}

/// The form for an existing one.
pub async fn edit(here: Here, Path((_, id)): Path<(String, String)>) -> Result<Response, Error> {
    let schedule: RecurringSchedule = here.get(&format!("/recurring/{}", segment(&id))).await?;
    let payload = schedule.payload.get().to_owned();
    let retry = schedule.retry.as_ref().and_then(|it| serde_json::to_string(it).ok());
    let retry = retry.unwrap_or_default();
    let fires = schedule.enabled;
    let place = format!("/recurring/s/{}/edit", segment(&id));
    let frame = here.frame;
    render(&FormPage { frame, place, schedule: Some(schedule), fires, payload, retry })
}

/// The fields of a schedule.
const SCHEDULE: &[Field] = &[
    Field::Text("job_type"),
    Field::Text("cron_expression"),
    Field::Text("timezone"),
    Field::Text("queue"),
    Field::Text("group"),
    Field::Json("payload"),
    Field::Text("overlap"),
    Field::Text("catch_up"),
    Field::Number("priority"),
    Field::Number("max_attempts"),
    Field::Number("timeout_seconds"),
    Field::Number("spread_seconds"),
    Field::Json("retry"),
    Field::Flag("enabled"),
];

/// Creates a schedule: under the chosen id, if it is free.
pub async fn make(here: Here, headers: HeaderMap, form: Fields) -> Result<Response, Error> {
    let body = form::body(SCHEDULE, &form)?;
    let made: RecurringSchedule = match form.text("recurring_id").trim() {
        "" => here.api.send_form(Method::POST, &here.at("/recurring"), Some(body), &form).await?,
        name => {
            let at = here.at(&format!("/recurring/{}", segment(name)));
            let made = here.api.send_form(Method::PUT, &at, Some(body), &form).await;
            made.map_err(|error| match error {
                Error::PreconditionFailed => Error::invalid(
                    "recurring_id",
                    "is taken: choose another name, or change that schedule",
                ),
                other => other,
            })?
        }
    };
    Ok(to_schedule(&here, &headers, &made.id, "recurring_create"))
}

/// Changes a schedule, unless it was changed since the form was made.
pub async fn save(
    here: Here,
    headers: HeaderMap,
    Path((_, id)): Path<(String, String)>,
    form: Fields,
) -> Result<Response, Error> {
    let at = here.at(&format!("/recurring/{}", segment(&id)));
    let body = form::body(SCHEDULE, &form)?;
    here.api.send_form::<RecurringSchedule>(Method::PUT, &at, Some(body), &form).await?;
    Ok(to_schedule(&here, &headers, &id, "recurring_upsert"))
}

fn to_schedule(here: &Here, headers: &HeaderMap, id: &str, done: &str) -> Response {
    let to = here.frame.to(&format!("/recurring/s/{}", segment(id)));
    go(headers.contains_key(HX_REQUEST), &action_table::saying(&to, done))
}

#[derive(Template)]
#[template(path = "preview.html")]
struct PreviewPart {
    preview: CronPreview,
}

/// The next ticks of the expression that is being typed.
pub async fn preview(here: Here, form: Fields) -> Result<Response, Error> {
    const REQUEST_FIELDS: &[Field] =
        &[Field::Text("cron_expression"), Field::Text("timezone"), Field::Number("count")];
    let mut form = form;
    form.0.push(("count".to_owned(), SHOWN_FIRES.to_string()));
    let body = form::body(REQUEST_FIELDS, &form)?;
    let preview = here.api.send(Method::POST, &here.at("/recurring/preview"), Some(body)).await?;
    render(&PreviewPart { preview })
}
