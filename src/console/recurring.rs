//! Recurring schedules: the list, one with its next fires and its history, and the form that makes or changes one.

use askama::Template;
use axum::{extract::Path, http::Method, response::Response};
use chrono::DateTime;

use super::{
    api::segment,
    form::{self, Field, Fields},
    page::{Frame, Here, render},
    show,
};
use crate::{
    domain::schedule::Schedule,
    error::Error,
    http::recurring::{
        RecurringPage, RecurringSchedule,
        control::{Fire, FirePage},
        times::{FireTime, NextTimes, Preview},
    },
};

/// Fires ahead that are shown.
const SHOWN_FIRES: u32 = 5;

#[derive(Template)]
#[template(path = "recurring.html")]
struct List {
    frame: Frame,
    schedules: Vec<(RecurringSchedule, String)>,
    next: Option<String>,
}

/// The list, each with its times in words.
pub async fn list(here: Here) -> Result<Response, Error> {
    let cursor = here.asked.query(&["cursor"]);
    let page: RecurringPage = here.get(&format!("/recurring?{cursor}")).await?;
    let frame = here.frame;
    let next = frame.next("/recurring", "", page.next_cursor.as_deref());
    let in_words = |it: RecurringSchedule| {
        let read = Schedule::parse(&it.cron_expression, &it.timezone);
        (it, read.map(|it| it.in_words()).unwrap_or_default())
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
    payload: String,
}

/// One schedule.
pub async fn detail(here: Here, Path((_, id)): Path<(String, String)>) -> Result<Response, Error> {
    let at = format!("/recurring/{}", segment(&id));
    let (next, fires) = (format!("{at}/next?count={SHOWN_FIRES}"), format!("{at}/fires?limit=20"));
    let (schedule, times, history) = tokio::try_join!(
        here.get::<RecurringSchedule>(&at),
        here.get::<NextTimes>(&next),
        here.get::<FirePage>(&fires),
    )?;
    let payload = show::pretty(schedule.payload.get());
    render(&Detail { frame: here.frame, schedule, times, fires: history.fires, payload })
}

impl FireTime {
    /// The time in the schedule's zone, for people.
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
    schedule: Option<RecurringSchedule>,
    payload: String,
    /// How its jobs are tried again, as JSON: the form carries it, and does not show it.
    retry: String,
}

/// The form for a new schedule.
pub async fn new(here: Here) -> Result<Response, Error> {
    render(&FormPage {
        frame: here.frame,
        schedule: None,
        payload: "{}".to_owned(),
        retry: String::new(),
    })
}

/// The form for one that is there.
pub async fn edit(here: Here, Path((_, id)): Path<(String, String)>) -> Result<Response, Error> {
    let schedule: RecurringSchedule = here.get(&format!("/recurring/{}", segment(&id))).await?;
    let payload = schedule.payload.get().to_owned();
    let retry = schedule.retry.as_ref().and_then(|it| serde_json::to_string(it).ok());
    let retry = retry.unwrap_or_default();
    render(&FormPage { frame: here.frame, schedule: Some(schedule), payload, retry })
}

#[derive(Template)]
#[template(path = "preview.html")]
struct PreviewPart {
    preview: Preview,
}

/// The next fires of what is being typed.
pub async fn preview(here: Here, form: Fields) -> Result<Response, Error> {
    const WISH: &[Field] =
        &[Field::Text("cron_expression"), Field::Text("timezone"), Field::Number("count")];
    let mut form = form;
    form.0.push(("count".to_owned(), SHOWN_FIRES.to_string()));
    let body = form::body(WISH, &form)?;
    let preview = here.api.send(Method::POST, &here.at("/recurring/preview"), Some(body)).await?;
    render(&PreviewPart { preview })
}
