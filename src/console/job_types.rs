//! Job types: what they did in the last 24 hours.

use askama::Template;
use axum::response::Response;

use super::{
    form::encode,
    format,
    page::{Frame, Here, render},
};
use crate::{
    domain::search,
    error::Error,
    http::metrics::job_types::{JobTypeList, JobTypeStats},
};

#[derive(Template)]
#[template(path = "job_types.html")]
struct JobTypes {
    frame: Frame,
    job_types: Vec<JobTypeStats>,
}

/// The types, those with most jobs first.
pub async fn list(here: Here) -> Result<Response, Error> {
    let JobTypeList { job_types } = here.get("/job-types").await?;
    render(&JobTypes { frame: here.frame, job_types })
}

impl JobTypes {
    /// The jobs of a type, in one state if it is named.
    fn jobs(&self, job_type: &str, state: &str) -> String {
        let line = search::condition("type", job_type);
        let mut query = vec![("q", line.as_str())];
        if !state.is_empty() {
            query.push(("state", state));
        }
        self.frame.with_query("/jobs", &encode(&query))
    }
}

/// A time in milliseconds, if there were samples.
fn time(millis: &Option<i64>) -> String {
    millis.map_or_else(|| "–".to_owned(), format::millis)
}
