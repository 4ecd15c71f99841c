//! Jobs: a list with filters, bulk work on all that match, and one job with everything that is known of it.

use askama::Template;
use axum::{
    extract::{Path, State},
    http::{HeaderMap, Method},
    response::Response,
};

use super::{
    actions,
    api::segment,
    form::{self, Fields, encode},
    many,
    page::{Frame, Here, render},
    picture::{self, Timeline},
    session::{HX_REQUEST, go},
    show::{self, Shown},
};
use crate::{
    app::App,
    domain::{job::JobState, operation::Kind},
    error::Error,
    http::{
        jobs::{
            Job,
            events::{EventView, JobHistory},
            logs::{LogPage, LogView},
            read::JobPage,
            watch::ExplainReply,
        },
        many::ManyReply,
    },
};

/// The filters of the list, as the API calls them.
const FILTERS: [&str; 6] = ["state", "queue", "job_type", "tag", "created_after", "created_before"];
/// Jobs on one page.
const PAGE_JOBS: &str = "50";
/// Chunks of logs that a page shows at first; the stream goes on.
const SHOWN_LOGS: u32 = 500;

#[derive(Template)]
#[template(path = "jobs.html")]
struct Jobs {
    frame: Frame,
    page: JobPage,
    asked: Fields,
    /// The filters as a query.
    filters: String,
    next: Option<String>,
    states: [JobState; 6],
    is_first_page: bool,
    may_cancel: bool,
    may_retry: bool,
}

const STATES: [JobState; 6] = [
    JobState::Scheduled,
    JobState::Pending,
    JobState::Processing,
    JobState::Succeeded,
    JobState::DeadLetter,
    JobState::Cancelled,
];

/// The list.
pub async fn list(here: Here) -> Result<Response, Error> {
    let fixed = [("limit", PAGE_JOBS), ("payloads", "false")];
    let mut query: Vec<_> = fixed.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    for name in FILTERS {
        if let Some(value) = here.asked.get(name) {
            let value =
                if name.starts_with("created") { form::utc(value) } else { value.to_owned() };
            query.push((name.to_owned(), value));
        }
    }
    query.extend(here.asked.get("cursor").map(|it| ("cursor".to_owned(), it.to_owned())));
    let pairs: Vec<_> = query.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let page: JobPage = here.get(&format!("/jobs?{}", encode(&pairs))).await?;
    let Here { frame, asked, .. } = here;
    let filters = asked.query(&FILTERS);
    let next = frame.next("/jobs", &filters, page.next_cursor.as_deref());
    let is_first_page = asked.get("cursor").is_none();
    let state = asked.get("state");
    let can_be =
        |kind: Kind| state.is_none_or(|state| kind.states().iter().any(|it| it.as_str() == state));
    let (may_cancel, may_retry) = (
        frame.may_manage() && can_be(Kind::JobsCancel),
        frame.may_manage() && can_be(Kind::JobsRetry),
    );
    let states = STATES;
    render(&Jobs {
        frame,
        page,
        asked,
        filters,
        next,
        states,
        is_first_page,
        may_cancel,
        may_retry,
    })
}

#[derive(Template)]
#[template(path = "bulk.html")]
struct Bulk {
    frame: Frame,
    operation: &'static str,
    verb: &'static str,
    counted: ManyReply,
    /// The filters, as the API calls them.
    filters: Vec<(&'static str, String)>,
    back: String,
}

/// How many jobs match, and the button that deals with all of them.
pub async fn bulk(here: Here) -> Result<Response, Error> {
    let (operation, verb) = match here.asked.get("what") {
        Some("cancel") => ("jobs_cancel_many", "Cancel"),
        Some("retry") => ("jobs_retry_many", "Retry"),
        _ => return Err(Error::NoSuchRoute),
    };
    let (counted, filters) = many::count(&here, operation, &FILTERS).await?;
    let back = here.frame.to(&format!("/jobs?{}", here.asked.query(&FILTERS)));
    render(&Bulk { frame: here.frame, operation, verb, counted, filters, back })
}

impl EventView {
    /// What it brought along, unless the table of attempts says it already.
    fn told(&self) -> Option<&str> {
        let is_of_attempt = self.attempt.is_some() && self.kind.starts_with("fencepost.");
        self.payload.as_ref().filter(|_| !is_of_attempt).map(|it| it.get())
    }
}

#[derive(Template)]
#[template(path = "job.html")]
struct JobDetail {
    frame: Frame,
    explain: ExplainReply,
    events: Vec<EventView>,
    logs: Vec<LogView>,
    has_more_logs: bool,
    truncated_attempts: Vec<i32>,
    timeline: Timeline,
    payload: Shown,
    result: Option<Shown>,
    is_waiting: bool,
    job: Job,
    curl: String,
}

/// One job.
pub async fn detail(
    here: Here,
    State(app): State<App>,
    headers: HeaderMap,
    Path((_, id)): Path<(String, String)>,
) -> Result<Response, Error> {
    let at = format!("/jobs/{}", segment(&id));
    // A page that looks again keeps the logs that it has.
    let shown_logs = if headers.contains_key(HX_REQUEST) { 1 } else { SHOWN_LOGS };
    let (explained, history, logged) =
        (format!("{at}/explain"), format!("{at}/events"), format!("{at}/logs?limit={shown_logs}"));
    let (job, explain, history, logs) = tokio::try_join!(
        here.get::<Job>(&at),
        here.get::<ExplainReply>(&explained),
        here.get::<JobHistory>(&history),
        here.get::<LogPage>(&logged),
    )?;
    let url = &app.accounts.public_url;
    render(&JobDetail {
        timeline: picture::timeline(&job, here.frame.now),
        payload: show::cut(show::pretty(job.payload.get())),
        result: job.result.as_ref().map(|it| show::cut(show::pretty(it.get()))),
        is_waiting: matches!(job.state, JobState::Scheduled | JobState::Pending),
        curl: format!("curl {url}/v1/jobs/{} -H 'Authorization: Bearer '$FENCEPOST_KEY", job.id),
        events: history.events,
        has_more_logs: logs.has_more,
        truncated_attempts: logs.truncated_attempts,
        logs: logs.logs,
        explain,
        job,
        frame: here.frame,
    })
}

/// Enqueues a job like this one: the same type, queue, payload, tags and rules, to run at once. What ties a job to others
/// is its own: parents, a unique key, an end.
pub async fn duplicate(
    here: Here,
    headers: HeaderMap,
    Path((_, id)): Path<(String, String)>,
    form: Fields,
) -> Result<Response, Error> {
    let job: Job = here.get(&format!("/jobs/{}", segment(&id))).await?;
    let mut wish = serde_json::json!({
        "job_type": job.job_type, "queue": job.queue, "priority": job.priority,
        "max_attempts": job.max_attempts, "timeout_seconds": job.timeout_seconds, "retry": job.retry,
        "tags": job.tags, "labels": job.labels,
    });
    if let Some(key) = job.concurrency_key {
        wish["concurrency_key"] = key.into();
        wish["concurrency_limit"] = job.concurrency_limit.into();
    }
    let wish = wish.to_string();
    // The payload byte for byte, as everywhere.
    let body = format!("{{\"payload\":{},{}", job.payload.get(), &wish[1..]);
    let (jobs, once) = (here.at("/jobs"), form.get(actions::ONCE));
    let made: Job = here.api.send_once(Method::POST, &jobs, Some(body), once).await?;
    let said = encode(&[(actions::DONE, "jobs_create")]);
    let to = here.frame.to(&format!("/jobs/{}?{said}", segment(&made.id)));
    Ok(go(headers.contains_key(HX_REQUEST), &to))
}

/// What happens to the project's jobs, as it happens.
pub async fn stream(here: Here, headers: HeaderMap) -> Result<Response, Error> {
    pass_on(&here, "/events/stream", &headers).await
}

/// A job's logs, as they come.
pub async fn log_stream(
    here: Here,
    headers: HeaderMap,
    Path((_, id)): Path<(String, String)>,
) -> Result<Response, Error> {
    pass_on(&here, &format!("/jobs/{}/logs/stream", segment(&id)), &headers).await
}

async fn pass_on(here: &Here, path: &str, headers: &HeaderMap) -> Result<Response, Error> {
    let mut kept = HeaderMap::new();
    if let Some(last) = headers.get("last-event-id") {
        kept.insert("last-event-id", last.clone());
    }
    here.api.call(Method::GET, &here.at(path), None, kept).await
}
