//! One job with all details.

use askama::Template;
use axum::{
    extract::{Path, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use fencepost_domain::{
    actor::ActorKind,
    error::Error,
    ids::{ANONYMOUS, PUSH_WORKER},
    job::JobState,
};
use fencepost_http::{
    change::ActorView,
    routes::jobs::{
        Job,
        events::{EventView, JobHistory},
        logs::{LogPage, LogView},
        watch::ExplainReply,
    },
};
use fencepost_web::{
    app::App,
    wire::logs::{Sent, write_sent},
};
use serde_json::{Value, json, value::RawValue};

use super::{
    action_table,
    diagram::{self, Timeline},
    form::{self, Field, Fields},
    format::{self, ShownJson},
    location::{HX_REQUEST, segment},
    page::{Frame, Here, as_file, render},
    session::go,
};

/// Prefix of the server's event types.
const OWN_EVENTS: &str = "fencepost.";
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// Chunks of logs on a new page; the stream adds more.
const SHOWN_LOGS: u32 = 500;
/// Newest events of a job that its page shows.
pub const SHOWN_EVENTS: u32 = 100;

/// Adds to [`EventView`] what pages show of it.
trait EventViewExt {
    /// The type of an event: ours in words, others as workers name them.
    fn shown_kind(&self) -> String;

    /// Its details, unless the table of attempts shows them already.
    fn shown_payload(&self) -> Option<&str>;
}

impl EventViewExt for EventView {
    fn shown_kind(&self) -> String {
        self.kind.strip_prefix(OWN_EVENTS).map_or_else(|| self.kind.clone(), format::words)
    }

    fn shown_payload(&self) -> Option<&str> {
        let is_of_attempt = self.attempt.is_some() && self.kind.starts_with(OWN_EVENTS);
        self.payload.as_ref().filter(|_| !is_of_attempt).map(|it| it.get())
    }
}

/// Adds to [`ActorView`] what pages show of it.
trait ActorViewExt {
    /// The actor in words.
    fn shown(&self) -> String;
}

impl ActorViewExt for ActorView {
    fn shown(&self) -> String {
        let who = self.name.as_deref().or(self.id.as_deref()).unwrap_or_default();
        let what = match self.kind {
            ActorKind::Key => "the key",
            ActorKind::Member => "",
            ActorKind::Operation => "the operation",
            ActorKind::Parent => "its parent",
            ActorKind::Schedule => "the schedule",
            ActorKind::Server => "the server",
        };
        format!("{what} {who}").trim().to_owned()
    }
}

#[derive(Template)]
#[template(path = "job.html")]
struct JobDetail {
    frame: Frame,
    explain: ExplainReply,
    events: Vec<EventView>,
    has_more_events: bool,
    logs: Vec<LogView>,
    /// Their last position, for the stream of logs.
    sent_logs: String,
    has_more_logs: bool,
    truncated_attempts: Vec<i32>,
    timeline: Timeline,
    payload: ShownJson,
    /// The payload, if all of it is shown.
    editable: Option<String>,
    result: Option<ShownJson>,
    /// The command that enqueues the same again, if all of the payload is shown.
    curl: Option<String>,
    /// Whether it waits for its time.
    is_early: bool,
    /// Whether it could still be replaced by another one.
    waits: bool,
    job: Job,
}

impl JobDetail {
    /// The worker that holds the job, if it chose its name: only such a one is asked for its jobs.
    fn holder(&self) -> Option<&str> {
        let is_held = self.job.state == JobState::Processing;
        let named = self.job.worker_id.as_deref().filter(|_| is_held);
        named.filter(|it| !it.starts_with(ANONYMOUS) && !it.starts_with(PUSH_WORKER))
    }
}

pub async fn detail(
    here: Here,
    State(app): State<App>,
    headers: HeaderMap,
    Path((_, id)): Path<(String, String)>,
) -> Result<Response, Error> {
    let at = format!("/jobs/{}", segment(&id));
    // A refreshed page keeps its logs.
    let shown_logs = if headers.contains_key(HX_REQUEST) { 1 } else { SHOWN_LOGS };
    let (explained, history, logged) = (
        format!("{at}/explain"),
        format!("{at}/events?limit={SHOWN_EVENTS}"),
        format!("{at}/logs?limit={shown_logs}"),
    );
    let (job, explain, history, logs) = tokio::try_join!(
        here.get::<Job>(&at),
        here.get::<ExplainReply>(&explained),
        here.get::<JobHistory>(&history),
        here.get::<LogPage>(&logged),
    )?;
    let mut shown = logs.logs;
    let sent: Sent =
        shown.iter().map(|it| ((it.attempt, it.stream.clone()), it.sequence)).collect();
    // Streams side by side, in order of time.
    shown.sort_by_key(|it| (it.attempt, it.timestamp_ms, it.sequence));
    let payload = format::pretty(job.payload.get());
    let waits = matches!(job.state, JobState::Scheduled | JobState::Pending);
    render(&JobDetail {
        timeline: diagram::timeline(&job, here.frame.now),
        curl: (payload.cut_from.is_none() && !job.redacted)
            .then(|| curl(&app.accounts.public_url, &job)),
        editable: payload.cut_from.is_none().then(|| payload.text.clone()),
        payload,
        result: job.result.as_ref().map(|it| format::pretty(it.get())),
        is_early: waits && job.paused_at.is_none() && job.run_at > here.frame.now,
        waits,
        has_more_events: history.has_more,
        events: history.events,
        has_more_logs: logs.has_more,
        truncated_attempts: logs.truncated_attempts,
        logs: shown,
        sent_logs: write_sent(&sent),
        explain,
        job,
        frame: here.frame,
    })
}

/// The command that enqueues the same work again: all that a replay copies.
fn curl(url: &str, job: &Job) -> String {
    let mut fields = json!({
        "job_type": job.job_type, "queue": job.queue, "max_attempts": job.max_attempts,
        "timeout_seconds": job.timeout_seconds, "retry": job.retry,
    });
    if job.priority != 0 {
        fields["priority"] = json!(job.priority);
    }
    let lists = [("labels", json!(job.labels)), ("tags", json!(job.tags))];
    let is_empty = |it: &Value| it == &json!([]) || it == &json!({});
    for (name, value) in lists.into_iter().filter(|it| !is_empty(&it.1)) {
        fields[name] = value;
    }
    if let (Some(key), limit) = (&job.concurrency_key, job.concurrency_limit) {
        fields["concurrency_key"] = json!(key);
        fields["concurrency_limit"] = json!(limit);
    }
    if let Some(group) = &job.group {
        fields["group"] = json!(group);
    }
    // The payload is written byte for byte.
    let fields = fields.to_string();
    let open = fields.strip_suffix('}').unwrap_or(&fields);
    // A quote ends the shell's text, stands alone, and begins another.
    let body = format!("{open},\"payload\":{}}}", job.payload.get()).replace('\'', r"'\''");
    format!(
        "curl {url}/v1/jobs \\\n  -H \"Authorization: Bearer $FENCEPOST_KEY\" \\\n  \
         -H 'Content-Type: application/json' \\\n  -d '{body}'"
    )
}

/// Enqueues a job with the work of this one, and shows it. Without a payload in the form it is
/// copied byte for byte.
pub async fn replay(
    here: Here,
    headers: HeaderMap,
    Path((_, id)): Path<(String, String)>,
    form: Fields,
) -> Result<Response, Error> {
    const CHANGES: &[Field] = &[
        Field::Json("payload"),
        Field::Text("job_type"),
        Field::Text("queue"),
        Field::AllWords("labels"),
    ];
    let body = match form.get("payload") {
        Some(_) => form::body(CHANGES, &form)?,
        None => "{}".to_owned(),
    };
    let path = here.at(&format!("/jobs/{}/replay", segment(&id)));
    let made: Job = here.api.send_form(Method::POST, &path, Some(body), &form).await?;
    let mut done = "jobs_replay";
    if form.get("cancel").is_some() {
        let path = here.at(&format!("/jobs/{}/cancel", segment(&id)));
        match here.api.send::<Job>(Method::POST, &path, None).await {
            Ok(job) if job.state == JobState::Cancelled => (),
            Ok(job) if job.state == JobState::Processing => done = action_table::FIRST_RUNS,
            Ok(_) | Err(Error::InvalidState(_)) => done = action_table::FIRST_ENDED,
            Err(other) => return Err(other),
        }
    }
    let to = here.frame.to(&format!("/jobs/{}", segment(&made.id)));
    Ok(go(headers.contains_key(HX_REQUEST), &action_table::saying(&to, done)))
}

/// A job's payload, byte for byte, as a file.
pub async fn payload(here: Here, Path((_, id)): Path<(String, String)>) -> Result<Response, Error> {
    let job: Job = here.get(&format!("/jobs/{}", segment(&id))).await?;
    Ok(json_file(&job.payload, &format!("{}-payload.json", job.id)))
}

/// A job's result, byte for byte, as a file.
pub async fn result(here: Here, Path((_, id)): Path<(String, String)>) -> Result<Response, Error> {
    let job: Job = here.get(&format!("/jobs/{}", segment(&id))).await?;
    let result = job.result.ok_or(Error::NoSuchRoute)?;
    Ok(json_file(&result, &format!("{}-result.json", job.id)))
}

fn json_file(json: &RawValue, name: &str) -> Response {
    const JSON: HeaderValue = HeaderValue::from_static("application/json");
    as_file(([(CONTENT_TYPE, JSON)], json.get().to_owned()).into_response(), name)
}

/// Live events of the project's jobs.
pub async fn stream(here: Here, headers: HeaderMap) -> Result<Response, Error> {
    pass_on(&here, "/events/stream", headers.get(LAST_EVENT_ID).cloned()).await
}

/// Live logs of a job.
pub async fn log_stream(
    here: Here,
    headers: HeaderMap,
    Path((_, id)): Path<(String, String)>,
) -> Result<Response, Error> {
    // A script that reconnects sends its position in the query; a browser that does so itself, in
    // the header.
    let in_query = || here.asked.get("after").and_then(|it| HeaderValue::from_str(it).ok());
    let last = headers.get(LAST_EVENT_ID).cloned().or_else(in_query);
    pass_on(&here, &format!("/jobs/{}/logs/stream", segment(&id)), last).await
}

/// A stream of the API, from after the last event.
async fn pass_on(here: &Here, path: &str, last: Option<HeaderValue>) -> Result<Response, Error> {
    let mut kept = HeaderMap::new();
    if let Some(last) = last {
        kept.insert(LAST_EVENT_ID, last);
    }
    here.api.call(Method::GET, &here.at(path), None, kept).await
}
