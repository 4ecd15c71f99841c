//! Batches: how far each is, and its jobs.

use askama::Template;
use axum::{extract::Path, response::Response};
use fencepost_domain::error::Error;
use fencepost_http::routes::batches::{BatchPage, BatchView};

use super::{
    form::encode,
    format,
    location::segment,
    page::{Frame, Here, render},
};

#[derive(Template)]
#[template(path = "batches.html")]
struct List {
    frame: Frame,
    batches: Vec<BatchView>,
    next: Option<String>,
}

/// The batches, newest first.
pub async fn list(here: Here) -> Result<Response, Error> {
    let (page, _): (BatchPage, _) = here.list("/batches", &[]).await?;
    let frame = here.frame;
    let next = frame.next("/batches", "", page.next_cursor.as_deref());
    render(&List { frame, batches: page.batches, next })
}

#[derive(Template)]
#[template(path = "batch.html")]
struct Detail {
    frame: Frame,
    batch: BatchView,
}

impl Detail {
    /// The batch's jobs by state: the state's name, which is empty for all, and their number.
    fn counts(&self) -> [(&'static str, i64); 4] {
        let BatchView { succeeded_jobs, dead_letter_jobs, cancelled_jobs, skipped_jobs, .. } =
            self.batch;
        // A skipped job is cancelled: a parent ended otherwise than it waited for.
        [
            ("", self.batch.total_jobs),
            ("succeeded", succeeded_jobs),
            ("dead_letter", dead_letter_jobs),
            ("cancelled", cancelled_jobs + skipped_jobs),
        ]
    }

    /// The list of the batch's jobs in a state; empty for all.
    fn jobs(&self, state: &str) -> String {
        let batch = ("batch_id", self.batch.id.as_str());
        let query = match state {
            "" => encode(&[batch]),
            state => encode(&[batch, ("state", state)]),
        };
        self.frame.with_query("/jobs", &query)
    }

    /// The confirmation of a bulk operation on the batch's jobs.
    fn bulk(&self, operation: &str) -> String {
        let query = encode(&[("batch_id", self.batch.id.as_str())]);
        self.frame.with_query(&format!("/jobs/bulk/{operation}"), &query)
    }
}

/// One batch.
pub async fn detail(here: Here, Path((_, id)): Path<(String, String)>) -> Result<Response, Error> {
    let batch: BatchView = here.get(&format!("/batches/{}", segment(&id))).await?;
    render(&Detail { batch, frame: here.frame })
}
