//! The list of jobs: a tab for each state, one search line, and bulk operations on what it shows;
//! and the form of a new job.

use askama::Template;
use axum::response::Response;

use super::{
    form::{self, encode},
    format,
    location::segment,
    page::{Frame, Here, refused_page, render},
    session::go,
};
use crate::{
    domain::{
        access::{Permission, role_may},
        job::JobState,
        operation::Kind,
        search,
    },
    error::Error,
    http::{
        jobs::read::JobPage,
        metrics::{MetricsSummary, StateCounts},
        queues::{Queue, QueuePage},
    },
};

/// The filters of bulk operations on jobs, as the API names them.
pub const FILTERS: [&str; 8] =
    ["q", "state", "queue", "job_type", "tag", "batch_id", "created_after", "created_before"];
/// The filters of the page: its line has the others.
const OWN_FILTERS: [&str; 4] = ["q", "state", "created_after", "created_before"];
const PAGE_JOBS: &str = "50";
/// With this many, a page searches no further: one request can choose all of them.
const MAX_SHOWN_JOBS: usize = 50;
/// Pages that one search reads at most. Each examines a bounded number of jobs.
const MAX_SEARCHED_PAGES: usize = 5;
const DEFAULT_QUEUE: &str = "default";
/// Queues that the line suggests.
const SUGGESTED_QUEUES: u32 = 50;

#[derive(Template)]
#[template(path = "jobs.html")]
struct Jobs {
    frame: Frame,
    page: JobPage,
    asked: form::Fields,
    /// What is wrong with the line.
    refused: Option<String>,
    filters: String,
    next: Option<String>,
    tabs: Vec<Tab>,
    suggestions: String,
    is_first_page: bool,
    may_cancel: bool,
    may_retry: bool,
    may_replay: bool,
}

/// A state to choose.
struct Tab {
    name: String,
    path: String,
    /// None: other conditions hold, too.
    count: Option<i64>,
    is_here: bool,
}

/// The list; or one job, if its id is the whole line.
pub async fn list(here: Here) -> Result<Response, Error> {
    let line = line(&here);
    if let Some(id) = whole_id(&line) {
        return Ok(go(false, &here.frame.to(&format!("/jobs/{}", segment(id)))));
    }
    let asked = own_fields(&here, &line);
    let refused = refusal(&asked, &here.frame);
    let (page, summary, suggestions) = tokio::try_join!(
        find(&here, &asked, refused.is_some()),
        here.get::<MetricsSummary>("/metrics/summary?period=1h"),
        suggestions(&here)
    )?;
    let is_first_page = here.asked.get("cursor").is_none();
    let frame = here.frame;
    let filters = asked.query(&OWN_FILTERS);
    let next = frame.next("/jobs", &filters, page.next_cursor.as_deref());
    let states = states(&frame, &asked);
    let can_be = |kind: Kind| states.iter().all(|it| kind.states().contains(it));
    let [may_cancel, may_retry, may_replay] = [Kind::JobsCancel, Kind::JobsRetry, Kind::JobsReplay]
        .map(|it| frame.may_manage() && refused.is_none() && can_be(it));
    let tabs = tabs(&frame, &asked, &summary.current);
    let shown = render(&Jobs {
        frame,
        page,
        asked,
        refused: refused.clone(),
        filters,
        next,
        tabs,
        suggestions,
        is_first_page,
        may_cancel,
        may_retry,
        may_replay,
    })?;
    Ok(match refused {
        Some(message) => refused_page(shown, Error::invalid("q", message)),
        None => shown,
    })
}

/// What is wrong with the search, for the page that shows it again.
fn refusal(asked: &form::Fields, frame: &Frame) -> Option<String> {
    let read = match search::read(asked.text("q"), frame.now) {
        Ok(read) => read,
        Err(message) => return Some(message),
    };
    let both = [
        ("created_after", read.created_after.is_some(), "age:<"),
        ("created_before", read.created_before.is_some(), "age:>"),
    ];
    let doubled = both.into_iter().find(|it| it.1 && asked.get(it.0).is_some());
    let doubled = doubled.map(|it| format!("`{}` and the time range exclude each other", it.2));
    let needs_more = read.error.is_some() && !role_may(frame.role(), Permission::ReadPayloads);
    let needs = needs_more.then(|| "only members may search errors".to_owned());
    doubled.or(needs)
}

/// The search line: what was typed, and what links of other pages name.
fn line(here: &Here) -> String {
    let mut conditions = vec![here.asked.text("q").trim().to_owned()];
    let named = [("queue", "queue"), ("job_type", "type"), ("batch_id", "batch")];
    for (field, name) in named {
        conditions.extend(here.asked.get(field).map(|it| search::condition(name, it)));
    }
    let tag = here.asked.get("tag").map(|it| it.replacen(':', "=", 1));
    conditions.extend(tag.map(|it| search::condition("tag", &it)));
    conditions.retain(|it| !it.is_empty());
    conditions.join(" ")
}

/// The id, if the line is nothing else.
fn whole_id(line: &str) -> Option<&str> {
    line.parse::<crate::ids::JobId>().ok().map(|_| line)
}

/// The filters of the page. A line that names states does without the tab.
fn own_fields(here: &Here, line: &str) -> form::Fields {
    let mut fields = vec![("q".to_owned(), line.to_owned())];
    for name in OWN_FILTERS.into_iter().filter(|it| *it != "q") {
        fields.extend(here.asked.get(name).map(|it| (name.to_owned(), it.to_owned())));
    }
    let named = search::read(line, here.frame.now).is_ok_and(|it| !it.states.is_empty());
    fields.retain(|it| it.0 != "state" || !named);
    form::Fields(fields)
}

/// The states that the filters name; none: any.
fn states(frame: &Frame, asked: &form::Fields) -> Vec<JobState> {
    let in_line = search::read(asked.text("q"), frame.now).unwrap_or_default().states;
    let of_tab = JobState::ALL.into_iter().find(|it| asked.get("state") == Some(it.as_str()));
    in_line.into_iter().chain(of_tab).collect()
}

fn tabs(frame: &Frame, asked: &form::Fields, counts: &StateCounts) -> Vec<Tab> {
    let line = asked.text("q");
    let read = search::read(line, frame.now).unwrap_or_default();
    let other = search::Search { states: Vec::new(), ..read.clone() };
    let is_plain = other == search::Search::default()
        && asked.get("created_after").is_none()
        && asked.get("created_before").is_none();
    let tab = |state: Option<JobState>| {
        let kept = asked.0.iter().filter(|it| it.0 != "state");
        let mut kept: Vec<_> = kept.map(|it| (&*it.0, &*it.1)).collect();
        kept.retain(|it| !it.1.is_empty() && (it.0 != "q" || read.states.is_empty()));
        kept.extend(state.map(|it| ("state", it.as_str())));
        let path = frame.with_query("/jobs", &encode(&kept));
        Tab {
            name: state.map_or_else(|| "all".to_owned(), |it| format::words(it.as_str())),
            path,
            count: state.filter(|_| is_plain).map(|it| counts.of(it)),
            is_here: match &read.states[..] {
                [] => asked.get("state") == state.map(JobState::as_str),
                [one] => state == Some(*one),
                _ => false,
            },
        }
    };
    std::iter::once(None).chain(JobState::ALL.map(Some)).map(tab).collect()
}

/// Conditions that the line suggests, as a list of JSON.
async fn suggestions(here: &Here) -> Result<String, Error> {
    let page: QueuePage = here.get(&format!("/queues?limit={SUGGESTED_QUEUES}")).await?;
    let states = JobState::ALL.into_iter().map(|it| format!("state:{}", it.as_str()));
    let queues = page.queues.iter().map(|it| search::condition("queue", &it.queue));
    let others =
        ["type:", "tag:", "label:", "batch:", "age:>5m", "age:<1h", "error:"].map(str::to_owned);
    let all: Vec<_> = states.chain(queues).chain(others).collect();
    serde_json::to_string(&all).map_err(Error::internal)
}

/// A page of the list. Where a page found too few among the jobs that it examined, the next ones
/// follow, up to [`MAX_SEARCHED_PAGES`].
async fn find(here: &Here, asked: &form::Fields, is_refused: bool) -> Result<JobPage, Error> {
    if is_refused {
        return Ok(JobPage {
            jobs: Vec::new(),
            has_more: false,
            scanned_until: None,
            next_cursor: None,
            cursor: None,
        });
    }
    let mut query = vec![("limit", PAGE_JOBS.to_owned()), ("payloads", "false".to_owned())];
    for name in OWN_FILTERS {
        if let Some(value) = asked.get(name) {
            let is_time = name.starts_with("created");
            query.push((name, if is_time { form::utc(value) } else { value.to_owned() }));
        }
    }
    query.extend(here.asked.get("cursor").map(|it| ("cursor", it.to_owned())));
    let mut found: Option<JobPage> = None;
    for _ in 0..MAX_SEARCHED_PAGES {
        let pairs: Vec<_> = query.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let page: JobPage = here.get(&format!("/jobs?{}", encode(&pairs))).await?;
        let page = match found.take() {
            Some(mut earlier) => {
                earlier.jobs.extend(page.jobs);
                JobPage { jobs: earlier.jobs, ..page }
            }
            None => page,
        };
        let is_short = page.scanned_until.is_some() && page.jobs.len() < MAX_SHOWN_JOBS;
        let further = page.next_cursor.clone().filter(|_| is_short);
        found = Some(page);
        let Some(cursor) = further else { break };
        query.retain(|it| it.0 != "cursor");
        query.push(("cursor", cursor));
    }
    found.ok_or(Error::NoSuchRoute)
}

#[derive(Template)]
#[template(path = "new_job.html")]
struct NewJob {
    frame: Frame,
    job_type: String,
    queue: String,
    queues: Vec<Queue>,
}

/// The form of a new job.
pub async fn new(here: Here) -> Result<Response, Error> {
    let page: QueuePage = here.get(&format!("/queues?limit={SUGGESTED_QUEUES}")).await?;
    let job_type = here.asked.text("job_type").to_owned();
    let queue = here.asked.get("queue").unwrap_or(DEFAULT_QUEUE).to_owned();
    render(&NewJob { frame: here.frame, job_type, queue, queues: page.queues })
}
