//! Bulk operations in the background.

use askama::Template;
use axum::{extract::Path, response::Response};
use fencepost_domain::{error::Error, operation::State as OperationState};
use fencepost_http::routes::operations::{Operation, OperationPage};

use super::{
    format,
    location::segment,
    page::{Frame, Here, render},
};

#[derive(Template)]
#[template(path = "operations.html")]
struct List {
    frame: Frame,
    operations: Vec<Operation>,
    next: Option<String>,
}

/// The operations, newest first.
pub async fn list(here: Here) -> Result<Response, Error> {
    let (page, _): (OperationPage, _) = here.list("/operations", &[]).await?;
    let frame = here.frame;
    let next = frame.next("/operations", "", page.next_cursor.as_deref());
    render(&List { frame, operations: page.operations, next })
}

#[derive(Template)]
#[template(path = "operation.html")]
struct Detail {
    frame: Frame,
    operation: Operation,
}

pub async fn detail(here: Here, Path((_, id)): Path<(String, String)>) -> Result<Response, Error> {
    let operation: Operation = here.get(&format!("/operations/{}", segment(&id))).await?;
    render(&Detail { frame: here.frame, operation })
}

/// Adds to [`Operation`] what pages show of it.
trait OperationExt {
    /// Whether it is running.
    fn is_running(&self) -> bool;

    /// Its progress in percent; none: its total is unknown.
    fn percent(&self) -> Option<i64>;

    /// Its kind, in words.
    fn verb(&self) -> &'static str;

    /// The numbers of skipped jobs by reason, in words.
    fn skip_words(&self) -> String;

    /// Its filter, in words.
    fn filter_words(&self) -> String;
}

impl OperationExt for Operation {
    fn is_running(&self) -> bool {
        self.state == OperationState::Running
    }

    fn percent(&self) -> Option<i64> {
        let whole = self.expected.or(self.max)?;
        let processed = self.done + self.skipped;
        Some(if self.state == OperationState::Succeeded {
            100
        } else {
            format::percent(processed, whole)
        })
    }

    fn verb(&self) -> &'static str {
        match self.kind.as_str() {
            "queue_purge" => "Purge a queue",
            "dead_letters_retry" => "Retry dead letters",
            "dead_letters_purge" => "Delete dead letters",
            "jobs_cancel" => "Cancel jobs",
            "jobs_retry" => "Retry jobs",
            "jobs_replay" => "Replay jobs",
            "jobs_pause" => "Pause jobs",
            "jobs_resume" => "Resume jobs",
            _ => "An operation that this version does not know",
        }
    }

    fn skip_words(&self) -> String {
        let reasons = self.skipped_by.iter();
        let words = reasons
            .map(|(reason, jobs)| format!("{} {}", format::count(*jobs), format::words(reason)));
        words.collect::<Vec<_>>().join(", ")
    }

    fn filter_words(&self) -> String {
        let parts = self.filter.as_object().into_iter().flatten().map(|(name, value)| {
            if let ("fingerprint", Some(error)) = (name.as_str(), &self.sample_error) {
                return format!("error “{error}”");
            }
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            format!("{} {value}", format::words(name))
        });
        let parts: Vec<_> = parts.collect();
        if parts.is_empty() { "all".to_owned() } else { parts.join(", ") }
    }
}
