//! Push of a queue: where its jobs are sent.

use askama::Template;
use axum::{extract::Path, http::Method, response::Response};
use fencepost_domain::{error::Error, limits};
use fencepost_http::routes::queues::push::{Push, PushWithSecret};

use super::{
    form::{self, Field, Fields},
    format,
    location::segment,
    page::{Frame, Here, render},
};

#[derive(Template)]
#[template(path = "push.html")]
struct Page {
    frame: Frame,
    queue: String,
    push: Option<Push>,
    /// Shown once.
    secret: Option<String>,
}

/// The page; also of a queue that is not pushed.
pub async fn page(here: Here, Path((_, queue)): Path<(String, String)>) -> Result<Response, Error> {
    let push = match here.get(&format!("/queues/{}/push", segment(&queue))).await {
        Ok(push) => Some(push),
        Err(Error::PushNotFound) => None,
        Err(error) => return Err(error),
    };
    render(&Page { frame: here.frame, queue, push, secret: None })
}

/// Stores where the jobs are sent, and shows the secret if it is new.
pub async fn put(
    here: Here,
    Path((_, queue)): Path<(String, String)>,
    form: Fields,
) -> Result<Response, Error> {
    const FIELDS: &[Field] = &[
        Field::Text("url"),
        Field::Number("timeout_seconds"),
        Field::Number("max_in_flight"),
        Field::Json("headers"),
        Field::Flag("paused"),
    ];
    let body = form::body(FIELDS, &form)?;
    let path = here.at(&format!("/queues/{}/push", segment(&queue)));
    let made: PushWithSecret = here.api.send(Method::PUT, &path, Some(body)).await?;
    made_page(here, queue, made)
}

/// Rotates the secret, and shows the new one.
pub async fn rotate(
    here: Here,
    Path((_, queue)): Path<(String, String)>,
    form: Fields,
) -> Result<Response, Error> {
    let body = form::body(&[Field::Number("overlap_seconds")], &form)?;
    let path = here.at(&format!("/queues/{}/push/secret/rotate", segment(&queue)));
    let made: PushWithSecret = here.api.send(Method::POST, &path, Some(body)).await?;
    made_page(here, queue, made)
}

fn made_page(here: Here, queue: String, made: PushWithSecret) -> Result<Response, Error> {
    let mut frame = here.frame;
    frame.place = frame.to(&format!("/queues/{}/push", segment(&queue)));
    render(&Page { frame, queue, push: Some(made.push), secret: made.secret })
}

impl Page {
    /// The path of a page of this queue.
    fn at(&self, below: &str) -> String {
        self.frame.to(&format!("/queues/{}{below}", segment(&self.queue)))
    }
}
