//! Workers: when they were heard, their labels, their directives.

use askama::Template;
use axum::response::Response;
use fencepost_domain::error::Error;
use fencepost_http::routes::workers::registry::{WorkerPage, WorkerView};

use super::{
    form::Fields,
    format,
    page::{Frame, Here, render},
};

#[derive(Template)]
#[template(path = "workers.html")]
struct Workers {
    frame: Frame,
    workers: Vec<WorkerView>,
    asked: Fields,
    next: Option<String>,
}

/// The workers, by name.
pub async fn list(here: Here) -> Result<Response, Error> {
    let (page, filters): (WorkerPage, _) = here.list("/workers", &["queue", "label"]).await?;
    let Here { frame, asked, .. } = here;
    let next = frame.next("/workers", &filters, page.next_cursor.as_deref());
    render(&Workers { frame, workers: page.workers, asked, next })
}

/// Adds to [`WorkerView`] what pages show of it.
trait WorkerViewExt {
    /// The state in words: what it reports counts only while it is heard.
    fn shown_state(&self) -> String;
}

impl WorkerViewExt for WorkerView {
    fn shown_state(&self) -> String {
        if self.alive { format::word(&self.state) } else { "gone".to_owned() }
    }
}
