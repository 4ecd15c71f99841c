//! Bulk operations: the number of matching jobs is shown before anything is done.

use askama::Template;
use axum::{extract::Path, http::Method, response::Response};
use fencepost_domain::error::Error;
use fencepost_http::routes::operations::bulk::BulkResult;

use super::{
    action_table::{self, Plane},
    dead_letters,
    form::{self, Fields},
    format, job_list,
    page::{Frame, Here, render},
};

/// A kind of bulk operation.
struct Bulk {
    /// The operation of the API.
    operation: &'static str,
    /// The filters of its list.
    filters: &'static [&'static str],
    list: &'static str,
    verb: &'static str,
    one: &'static str,
    many: &'static str,
    effect: &'static str,
    /// The word that must be typed as a confirmation.
    confirm: Option<&'static str>,
}

/// Query parameter: the id of a selected job; may be repeated.
const IDS: &str = "ids";
/// Query parameter: the visitor selects jobs one by one. Without ids, no job is selected then; the
/// filter alone would select every match.
const CHOSEN: &str = "chosen";
const JOBS: &str = "/jobs";

const BULK: [Bulk; 7] = [
    Bulk {
        operation: "jobs_bulk_cancel",
        filters: &job_list::FILTERS,
        list: JOBS,
        verb: "Cancel",
        one: "job",
        many: "jobs",
        effect: "Waiting jobs are cancelled; the workers of running ones are asked to stop.",
        confirm: None,
    },
    Bulk {
        operation: "jobs_bulk_retry",
        filters: &job_list::FILTERS,
        list: JOBS,
        verb: "Retry",
        one: "job",
        many: "jobs",
        effect: "Dead letters and cancelled jobs are retried; failures count from 0 again.",
        confirm: None,
    },
    Bulk {
        operation: "jobs_bulk_pause",
        filters: &job_list::FILTERS,
        list: JOBS,
        verb: "Pause",
        one: "job",
        many: "jobs",
        effect: "Waiting jobs start when you resume them.",
        confirm: None,
    },
    Bulk {
        operation: "jobs_bulk_resume",
        filters: &job_list::FILTERS,
        list: JOBS,
        verb: "Resume",
        one: "job",
        many: "jobs",
        effect: "Paused jobs wait again for their time and their parents, or are ready.",
        confirm: None,
    },
    Bulk {
        operation: "jobs_bulk_replay",
        filters: &job_list::FILTERS,
        list: JOBS,
        verb: "Replay",
        one: "job",
        many: "jobs",
        effect: "A new job is enqueued for each one that has ended; those stay as they are.",
        confirm: None,
    },
    Bulk {
        operation: "dead_letters_bulk_retry",
        filters: &dead_letters::FILTERS,
        list: "/dead-letters/list",
        verb: "Retry",
        one: "dead letter",
        many: "dead letters",
        effect: "Oldest first; failures count from 0 again.",
        confirm: None,
    },
    Bulk {
        operation: "dead_letters_purge",
        filters: &dead_letters::FILTERS,
        list: "/dead-letters/list",
        verb: "Delete",
        one: "dead letter",
        many: "dead letters",
        effect: "With payloads, histories and logs. This cannot be undone.",
        confirm: Some("purge"),
    },
];

#[derive(Template)]
#[template(path = "bulk.html")]
struct BulkPage {
    frame: Frame,
    bulk: &'static Bulk,
    counted: BulkResult,
    /// The filters, as the API names them.
    filters: Vec<(&'static str, String)>,
    shown: Vec<(String, String)>,
    /// Number of jobs that were chosen one by one; 0: all that match.
    chosen: i64,
    back: String,
}

/// The number of matching jobs, and the button for all of them.
///
/// # Errors
/// The API's errors; [`Error::NoSuchRoute`] when there is no such bulk operation.
pub async fn page(
    here: Here,
    Path((_, operation)): Path<(String, String)>,
) -> Result<Response, Error> {
    let bulk = BULK.iter().find(|it| it.operation == operation).ok_or(Error::NoSuchRoute)?;
    let action = action_table::find(bulk.operation, Plane::Project).ok_or(Error::NoSuchRoute)?;
    let kept = bulk.filters.iter();
    let kept = kept.filter_map(|name| Some((*name, here.asked.get(name)?.to_owned())));
    let mut filters: Vec<_> = kept.collect();
    let chosen: Vec<_> = here.asked.all(IDS).collect();
    if chosen.is_empty() && here.asked.get(CHOSEN).is_some() {
        return Err(Error::invalid(IDS, "choose at least one job first"));
    }
    if bulk.list == JOBS && !chosen.is_empty() {
        filters.push((IDS, chosen.join(",")));
    }
    let chosen = chosen.len() as i64;
    let named = filters.iter().map(|(name, value)| (format!("filter.{name}"), value.clone()));
    let dry_run = ("dry_run".to_owned(), "true".to_owned());
    let body = form::body(action.fields, &Fields(named.chain([dry_run]).collect()))?;
    let counted = here.api.send(Method::POST, &here.at(action.path), Some(body)).await?;
    let group = dead_letters::group_words(&here).await?;
    let shown = filters.iter().filter(|it| it.0 != IDS);
    let shown = shown.map(|(name, value)| match (*name, &group) {
        ("fingerprint", Some(group)) => ("error".to_owned(), group.clone()),
        ("q", _) => ("search".to_owned(), value.clone()),
        (name, _) => (format::words(name), value.clone()),
    });
    let shown = shown.collect();
    let back = here.frame.to(&format!("{}?{}", bulk.list, here.asked.query(bulk.filters)));
    render(&BulkPage { frame: here.frame, bulk, counted, filters, shown, chosen, back })
}
