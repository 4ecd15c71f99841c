//! The page after sign-up: the key, shown once, a job to enqueue, a worker to run, and the state of
//! the first job.

use askama::Template;
use axum::{extract::State, http::HeaderMap, response::Response};
use fencepost_domain::error::Error;
use fencepost_http::routes::{
    jobs::{Job, read::JobPage},
    projects::Project,
};
use fencepost_web::app::App;

use super::{
    format,
    page::{Frame, Here, render},
    session,
};

/// Shown in place of the key.
const NO_KEY: &str = "fp_live_…";

/// The page.
#[derive(Template)]
#[template(path = "start.html")]
pub struct Start {
    frame: Frame,
    url: String,
    key: Option<String>,
    shown_key: String,
    job: Option<Job>,
    base: String,
}

#[derive(Template)]
#[template(path = "first.html")]
struct First {
    job: Option<Job>,
    base: String,
}

impl Start {
    /// For a new project, with its key.
    pub fn of(project: Project, url: &str, key: Option<String>) -> Self {
        let mut frame = Frame {
            project,
            place: String::new(),
            done: None,
            dead_letters: None,
            now: format::now(),
        };
        frame.place = frame.to("/start");
        Self::framed(frame, url, key, None)
    }

    fn framed(frame: Frame, url: &str, key: Option<String>, job: Option<Job>) -> Self {
        let shown_key = key.clone().unwrap_or_else(|| NO_KEY.to_owned());
        let (url, base) = (url.to_owned(), frame.to(""));
        Self { frame, url, key, shown_key, job, base }
    }
}

/// The page: the first time with the key, then without.
pub async fn page(
    here: Here,
    State(app): State<App>,
    headers: HeaderMap,
) -> Result<Response, Error> {
    let job = newest(&here).await?;
    let key = session::new_key(&headers, &here.frame.project.slug);
    let is_shown = key.is_some();
    let mut response = render(&Start::framed(here.frame, &app.accounts.public_url, key, job))?;
    if is_shown {
        session::forget_key(response.headers_mut());
    }
    Ok(response)
}

#[derive(Template)]
#[template(path = "first_lost.html")]
struct FirstLost;

/// The fragment with the state of the first job. A visitor without a session must not be led away
/// from a key that is shown once.
pub async fn first_job(here: Result<Here, Error>) -> Result<Response, Error> {
    let here = match here {
        Err(error) if error.is_without_credential() => return render(&FirstLost),
        other => other?,
    };
    let job = newest(&here).await?;
    render(&First { job, base: here.frame.to("") })
}

async fn newest(here: &Here) -> Result<Option<Job>, Error> {
    let JobPage { jobs, .. } = here.get("/jobs?limit=1&payloads=false").await?;
    Ok(jobs.into_iter().next())
}
