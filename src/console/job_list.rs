//! The list of jobs: a tab for each state, one search line, and bulk operations on what it shows;
//! and the form of a new job.

use std::collections::BTreeSet;

use askama::Template;
use axum::response::Response;
use fencepost_domain::{
    error::Error,
    explain::Reason,
    ids::JobId,
    job::JobState,
    operation::Kind,
    search::{self, Search},
};
use fencepost_http::routes::{
    job_types::{JobTypeList, schema::JobType},
    jobs::{Job, read::JobPage},
    metrics::{MetricsSummary, StateCounts},
    queues::{Queue, QueuePage},
};

use super::{
    form::{self, encode},
    format,
    location::segment,
    page::{Frame, Here, refused_page, render},
    payload_form::{self, PayloadField},
    session::go,
};

/// The filters of bulk operations on jobs, as the API names them.
pub const FILTERS: [&str; 8] =
    ["q", "state", "queue", "job_type", "tag", "batch_id", "created_after", "created_before"];
/// The filters of the page: its line has the others.
const OWN_FILTERS: [&str; 4] = ["q", "state", "created_after", "created_before"];
/// The order of those that were stored first, as the API names it.
const OLDEST: &str = "oldest";
const PAGE_JOBS: &str = "50";
/// With this many, a page searches no further: one request can choose all of them.
const MAX_SHOWN_JOBS: usize = 50;
/// Names of tags whose value a word without a name may be.
const MAX_HINTED_TAGS: usize = 5;
/// Pages that one search reads at most. Each examines a bounded number of jobs.
const MAX_SEARCHED_PAGES: usize = 5;
const DEFAULT_QUEUE: &str = "default";
/// Queues that the line suggests.
const SUGGESTED_QUEUES: u32 = 50;

/// The order of the jobs, as the page says it.
struct OrderWords {
    first: &'static str,
    last: &'static str,
    sort: &'static str,
    arrow: &'static str,
    next: &'static str,
    until: &'static str,
}

const NEWEST_FIRST: OrderWords = OrderWords {
    first: "newest",
    last: "oldest",
    sort: "descending",
    arrow: "↓",
    next: "Older",
    until: "since",
};
const OLDEST_FIRST: OrderWords = OrderWords {
    first: "oldest",
    last: "newest",
    sort: "ascending",
    arrow: "↑",
    next: "Newer",
    until: "until",
};

#[derive(Template)]
#[template(path = "jobs.html")]
struct Jobs {
    frame: Frame,
    page: JobPage,
    asked: form::Fields,
    /// The mistake in the line.
    refused: Option<String>,
    /// Meanings of a word of the line that was read as a part of an id, when no job matches.
    hints: Vec<Hint>,
    filters: String,
    /// The filters and the order.
    shown_filters: String,
    /// The filters and the other order.
    other_order: String,
    order: &'static OrderWords,
    next: Option<String>,
    tabs: Vec<Tab>,
    suggestions: String,
    is_first_page: bool,
    may_cancel: bool,
    may_retry: bool,
    may_replay: bool,
    may_pause: bool,
    may_resume: bool,
}

/// A search that was perhaps meant.
struct Hint {
    line: String,
    path: String,
}

/// A state to choose.
struct Tab {
    name: String,
    path: String,
    /// None: other conditions hold, too.
    count: Option<i64>,
    is_here: bool,
}

/// The search of a visitor.
struct Asked {
    /// The filters of the page.
    fields: form::Fields,
    /// The line, as far as it can be read.
    line: Search,
    /// The states that the line and the tab name; none: any.
    states: Vec<JobState>,
}

impl Asked {
    /// A line that names states does without the tab.
    fn of(here: &Here, line: String) -> Self {
        let read = search::read(&line, here.frame.now).unwrap_or_default();
        let mut fields = vec![("q".to_owned(), line)];
        for name in OWN_FILTERS.into_iter().filter(|it| *it != "q") {
            fields.extend(here.asked.get(name).map(|it| (name.to_owned(), it.to_owned())));
        }
        fields.retain(|it| it.0 != "state" || read.states.is_empty());
        let fields = form::Fields(fields);
        let of_tab = JobState::ALL.into_iter().find(|it| fields.get("state") == Some(it.as_str()));
        let states = read.states.iter().copied().chain(of_tab).collect();
        Self { fields, line: read, states }
    }

    /// Whether it has no conditions but states.
    fn is_plain(&self) -> bool {
        let others = Search { states: Vec::new(), ..self.line.clone() };
        let has_time = |name| self.fields.get(name).is_some();
        others == Search::default() && !has_time("created_after") && !has_time("created_before")
    }
}

/// The list; or one job, if its id is the whole line.
pub async fn list(here: Here) -> Result<Response, Error> {
    let line = line(&here);
    if line.parse::<JobId>().is_ok() {
        return Ok(go(false, &here.frame.to(&format!("/jobs/{}", segment(&line)))));
    }
    let asked = Asked::of(&here, line);
    let (found, summary, suggestions) = tokio::try_join!(
        async { Ok(find(&here, &asked.fields).await) },
        here.get::<MetricsSummary>("/metrics/summary?period=1h"),
        suggestions(&here)
    )?;
    // The visitor corrects a search where it was typed.
    let (page, refused) = match found {
        Err(error @ (Error::Invalid(_) | Error::Forbidden { .. })) => {
            (JobPage::default(), Some(error))
        }
        found => (found?, None),
    };
    let bare = search::bare_word(asked.fields.text("q")).filter(|_| page.jobs.is_empty());
    let hints = match bare {
        Some(word) => hints(&here, &word).await?,
        None => Vec::new(),
    };
    let is_first_page = here.asked.get("cursor").is_none();
    let frame = here.frame;
    let filters = asked.fields.query(&OWN_FILTERS);
    let (order, shown_filters, other_order) = match here.asked.get("order") {
        Some(OLDEST) => (&OLDEST_FIRST, with_order(&filters), filters.clone()),
        _ => (&NEWEST_FIRST, filters.clone(), with_order(&filters)),
    };
    let next = frame.next("/jobs", &shown_filters, page.next_cursor.as_deref());
    let can_be = |kind: Kind| asked.states.iter().all(|it| kind.states().contains(it));
    let may = |kind: Kind| frame.may_manage() && refused.is_none() && can_be(kind);
    let [may_cancel, may_retry, may_replay] =
        [Kind::JobsCancel, Kind::JobsRetry, Kind::JobsReplay].map(may);
    // A button that could do nothing to the jobs of this page would be in the way.
    let is_paused = |it: &Job| it.paused_at.is_some();
    let waits = |it: &Job| matches!(it.state, JobState::Scheduled | JobState::Pending);
    let may_resume = may(Kind::JobsResume) && page.jobs.iter().any(is_paused);
    let may_pause = may(Kind::JobsPause)
        && !asked.line.is_paused
        && page.jobs.iter().any(|it| waits(it) && !is_paused(it));
    let shown = render(&Jobs {
        tabs: tabs(&frame, &asked, &summary.current),
        asked: asked.fields,
        refused: refused.as_ref().map(words),
        hints,
        frame,
        page,
        filters,
        shown_filters,
        other_order,
        order,
        next,
        suggestions,
        is_first_page,
        may_cancel,
        may_retry,
        may_replay,
        may_pause,
        may_resume,
    })?;
    Ok(match refused {
        Some(error) => refused_page(shown, error),
        None => shown,
    })
}

fn with_order(filters: &str) -> String {
    let and = if filters.is_empty() { "" } else { "&" };
    format!("{filters}{and}order={OLDEST}")
}

/// The mistake in a search, in words.
fn words(error: &Error) -> String {
    match error {
        Error::Invalid(fields) => {
            fields.iter().map(|it| it.message.as_str()).collect::<Vec<_>>().join("; ")
        }
        other => other.to_string(),
    }
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

fn tabs(frame: &Frame, asked: &Asked, counts: &StateCounts) -> Vec<Tab> {
    let is_plain = asked.is_plain();
    let in_line = &asked.line.states;
    let tab = |state: Option<JobState>| {
        let kept = asked.fields.0.iter().filter(|it| it.0 != "state");
        let mut kept: Vec<_> = kept.map(|it| (&*it.0, &*it.1)).collect();
        // A line that names states would contradict the tab.
        kept.retain(|it| !it.1.is_empty() && (it.0 != "q" || in_line.is_empty()));
        kept.extend(state.map(|it| ("state", it.as_str())));
        Tab {
            name: state.map_or_else(|| "all".to_owned(), |it| format::words(it.as_str())),
            path: frame.with_query("/jobs", &encode(&kept)),
            count: state.filter(|_| is_plain).map(|it| counts.of(it)),
            is_here: match asked.states[..] {
                [] => state.is_none(),
                [one] => state == Some(one),
                _ => false,
            },
        }
    };
    std::iter::once(None).chain(JobState::ALL.map(Some)).map(tab).collect()
}

/// Meanings of a word without a name: the value of a tag that new jobs have, a type or an error.
async fn hints(here: &Here, word: &str) -> Result<Vec<Hint>, Error> {
    let newest: JobPage = here.get(&format!("/jobs?limit={PAGE_JOBS}&payloads=false")).await?;
    let names: BTreeSet<_> = newest.jobs.iter().flat_map(|it| it.tags.keys()).collect();
    let tags = names.into_iter().take(MAX_HINTED_TAGS);
    let tags = tags.map(|name| search::condition("tag", &format!("{name}={word}")));
    let others = ["type", "error"].map(|name| search::condition(name, word));
    let hint = |line: String| {
        let path = here.frame.with_query("/jobs", &encode(&[("q", &*line)]));
        Hint { line, path }
    };
    Ok(tags.chain(others).map(hint).collect())
}

/// Conditions that the line suggests, as a list of JSON. A refresh leaves the line as it is.
async fn suggestions(here: &Here) -> Result<String, Error> {
    if here.is_fragment {
        return Ok("[]".to_owned());
    }
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
async fn find(here: &Here, asked: &form::Fields) -> Result<JobPage, Error> {
    let mut query = vec![("limit", PAGE_JOBS.to_owned()), ("payloads", "false".to_owned())];
    for name in OWN_FILTERS {
        if let Some(value) = asked.get(name) {
            let is_time = name.starts_with("created");
            query.push((name, if is_time { form::utc(value) } else { value.to_owned() }));
        }
    }
    query.extend(here.asked.get("order").map(|it| ("order", it.to_owned())));
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
    payload_fields: Vec<PayloadField>,
    /// Known types of jobs.
    job_types: Vec<String>,
    /// Job types with a form of their own.
    forms: Vec<String>,
}

impl NewJob {
    fn with_type(&self, job_type: &str) -> String {
        encode(&[("job_type", job_type), ("queue", &self.queue)])
    }
}

/// The form of a new job.
pub async fn new(here: Here) -> Result<Response, Error> {
    let page: QueuePage = here.get(&format!("/queues?limit={SUGGESTED_QUEUES}")).await?;
    let job_type = here.asked.text("job_type").to_owned();
    let queue = here.asked.get("queue").unwrap_or(DEFAULT_QUEUE).to_owned();
    let types: JobTypeList = here.get("/job-types").await?;
    let with_form = types.job_types.iter().filter(|it| it.has_schema);
    let forms: Vec<_> = with_form.map(|it| it.job_type.clone()).collect();
    let job_types = types.job_types.into_iter().map(|it| it.job_type).collect();
    let mut payload_fields = Vec::new();
    if forms.contains(&job_type) {
        let known: JobType = here.get(&format!("/job-types/{}", segment(&job_type))).await?;
        payload_fields = payload_form::fields(known.schema.as_ref().map_or("", |it| it.get()));
    }
    let (frame, queues) = (here.frame, page.queues);
    render(&NewJob { frame, job_type, queue, queues, payload_fields, job_types, forms })
}
