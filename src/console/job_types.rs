//! Job types: what they did in the last 24 hours.

use askama::Template;
use axum::{extract::Path, response::Response};
use fencepost_domain::{error::Error, search};
use fencepost_http::routes::job_types::{JobTypeList, JobTypeStats, schema::JobType};

use super::{
    form::encode,
    format,
    location::segment,
    page::{Frame, Here, render},
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

#[derive(Template)]
#[template(path = "job_type.html")]
struct OneType {
    frame: Frame,
    job_type: JobType,
}

/// The schema of a type.
pub async fn detail(
    Path((_, job_type)): Path<(String, String)>,
    here: Here,
) -> Result<Response, Error> {
    let job_type: JobType = here.get(&format!("/job-types/{}", segment(&job_type))).await?;
    render(&OneType { frame: here.frame, job_type })
}

impl OneType {
    /// As it was sent; empty: it has none.
    fn schema(&self) -> &str {
        self.job_type.schema.as_ref().map_or("", |it| it.get())
    }
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
