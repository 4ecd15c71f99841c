//! Answers that can be stored and repeated. Those that show jobs are stored without payloads, which
//! would be in the database twice; a repeated answer takes them from the jobs.

use std::collections::HashMap;

use axum::{
    body::Body,
    http::{
        HeaderValue, StatusCode,
        header::{CONTENT_TYPE, LOCATION},
    },
    response::Response,
};
use fencepost_domain::{error::Error, ids::ProjectId};
use fencepost_engine::jobs;
use fencepost_store::idempotency::StoredBody;
use fencepost_web::{app::App, auth::Caller, wire::validate::stored_json};
use serde::{Deserialize, Serialize};

use crate::{
    job::Job,
    redact::{hidden, shown},
};

/// An answer that can be stored.
#[derive(Debug)]
pub struct Answer {
    pub(super) status: StatusCode,
    pub(super) location: Option<String>,
    body: AnswerBody,
}

#[derive(Debug)]
enum AnswerBody {
    Json(String),
    Job(Box<Job>),
    Jobs(JobList),
}

#[derive(Debug, Serialize, Deserialize)]
struct JobList {
    jobs: Vec<Job>,
}

impl Answer {
    /// Something was created; `location` is its path.
    ///
    /// # Errors
    /// [`Error::Internal`] when the body is not JSON.
    pub fn new(
        status: StatusCode,
        location: Option<String>,
        body: &impl Serialize,
    ) -> Result<Self, Error> {
        let body = AnswerBody::Json(serde_json::to_string(body).map_err(Error::internal)?);
        Ok(Self { status, location, body })
    }

    /// A job was created, or exists.
    #[must_use]
    pub fn job(status: StatusCode, job: Job) -> Self {
        let location = Some(format!("/v1/jobs/{}", job.id));
        Self { status, location, body: AnswerBody::Job(Box::new(job)) }
    }

    /// Jobs were created, or exist.
    #[must_use]
    pub fn jobs(status: StatusCode, jobs: Vec<Job>) -> Self {
        Self { status, location: None, body: AnswerBody::Jobs(JobList { jobs }) }
    }

    /// The answer as it is stored.
    ///
    /// # Errors
    /// [`Error::Internal`] when the body is not JSON.
    pub(super) fn stored(&self) -> Result<StoredBody, Error> {
        let without_payload = |job: &Job| Job { payload: hidden(), result: None, ..job.clone() };
        let text = match &self.body {
            AnswerBody::Json(text) => Ok(text.clone()),
            AnswerBody::Job(job) => serde_json::to_string(&without_payload(job)),
            AnswerBody::Jobs(JobList { jobs }) => {
                let jobs = jobs.iter().map(without_payload).collect();
                serde_json::to_string(&JobList { jobs })
            }
        };
        let text = text.map_err(Error::internal)?;
        let has_payloads = matches!(self.body, AnswerBody::Json(_));
        Ok(StoredBody { text, has_payloads })
    }

    /// A stored answer. The payload of a job that was deleted since is null.
    ///
    /// # Errors
    /// [`Error::Internal`] when the body cannot be read.
    pub(super) async fn read(
        app: &App,
        project_id: ProjectId,
        (status, location): (StatusCode, Option<String>),
        StoredBody { text, has_payloads }: StoredBody,
    ) -> Result<Self, Error> {
        let mut body = if has_payloads {
            AnswerBody::Json(text)
        } else {
            let list = serde_json::from_str(&text).map(AnswerBody::Jobs);
            let read = list.or_else(|_| serde_json::from_str(&text).map(AnswerBody::Job));
            read.map_err(Error::internal)?
        };
        let jobs = match &mut body {
            AnswerBody::Json(_) => &mut [],
            AnswerBody::Job(job) => std::slice::from_mut(&mut **job),
            AnswerBody::Jobs(list) => &mut list.jobs[..],
        };
        let ids: Vec<_> = jobs.iter().filter_map(|it| it.id.parse().ok()).collect();
        if !ids.is_empty() {
            let rows = jobs::find_all(&app.engine, project_id, &ids).await?;
            let payloads = rows.into_iter().map(|it| (it.id.to_string(), it.payload));
            let payloads: HashMap<_, _> = payloads.collect();
            for job in jobs {
                // Several jobs of a request may be the same one.
                let Some(payload) = payloads.get(&job.id) else { continue };
                job.payload = stored_json(payload.clone())?;
            }
        }
        Ok(Self { status, location, body })
    }

    /// As this caller may see it. A request to a path below a project's is answered with such a
    /// `Location`: a session can read no other.
    ///
    /// # Errors
    /// [`Error::Internal`] when the body is not JSON.
    pub(super) fn into_response<P>(
        self,
        caller: &Caller<P>,
        project_path: Option<&str>,
    ) -> Result<Response, Error> {
        let text = match self.body {
            AnswerBody::Json(text) => Ok(text),
            AnswerBody::Job(job) => serde_json::to_string(&shown(&caller.who, *job)),
            AnswerBody::Jobs(JobList { jobs }) => {
                serde_json::to_string(&JobList { jobs: shown(&caller.who, jobs) })
            }
        };
        let mut response = Response::new(Body::from(text.map_err(Error::internal)?));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let location = self.location.map(|it| match (project_path, it.strip_prefix("/v1")) {
            (Some(project_path), Some(below)) => format!("{project_path}{below}"),
            _ => it,
        });
        if let Some(location) = location.and_then(|it| HeaderValue::try_from(it).ok()) {
            headers.insert(LOCATION, location);
        }
        Ok(response)
    }
}
