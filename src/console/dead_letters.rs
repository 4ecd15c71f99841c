//! Dead letters: groups of what failed alike, the letters of one, and what can be done with all of them.

use askama::Template;
use axum::response::Response;

use super::{
    form::Fields,
    many,
    page::{Frame, Here, render},
    show,
};
use crate::{
    error::Error,
    http::{
        dead_letters::{DeadLetterGroup, DeadLetterPage, GroupPage},
        many::ManyReply,
    },
};

const FILTERS: [&str; 3] = ["fingerprint", "queue", "job_type"];

#[derive(Template)]
#[template(path = "dead_letters.html")]
struct Groups {
    frame: Frame,
    groups: Vec<DeadLetterGroup>,
    next: Option<String>,
}

/// The groups.
pub async fn groups(here: Here) -> Result<Response, Error> {
    let cursor = here.asked.query(&["cursor"]);
    let page: GroupPage = here.get(&format!("/dead-letters/groups?{cursor}")).await?;
    let frame = here.frame;
    let next = frame.next("/dead-letters", "", page.next_cursor.as_deref());
    render(&Groups { frame, groups: page.groups, next })
}

#[derive(Template)]
#[template(path = "letters.html")]
struct Letters {
    frame: Frame,
    page: DeadLetterPage,
    asked: Fields,
    filters: String,
    next: Option<String>,
}

/// The dead letters of a group, or of all.
pub async fn letters(here: Here) -> Result<Response, Error> {
    let filters = here.asked.query(&FILTERS);
    let query = here.asked.query(&["fingerprint", "queue", "job_type", "cursor"]);
    let page: DeadLetterPage = here.get(&format!("/dead-letters?payloads=false&{query}")).await?;
    let Here { frame, asked, .. } = here;
    let next = frame.next("/dead-letters/list", &filters, page.next_cursor.as_deref());
    render(&Letters { frame, page, asked, filters, next })
}

#[derive(Template)]
#[template(path = "redrive.html")]
struct Redrive {
    frame: Frame,
    is_purge: bool,
    counted: ManyReply,
    filters: Vec<(&'static str, String)>,
}

/// How many dead letters match, and the button that brings all of them back, or deletes them.
pub async fn redrive(here: Here) -> Result<Response, Error> {
    let (is_purge, operation) = match here.asked.get("what") {
        Some("retry") => (false, "dead_letters_retry_many"),
        Some("purge") => (true, "dead_letters_purge"),
        _ => return Err(Error::NoSuchRoute),
    };
    let (counted, filters) = many::count(&here, operation, &FILTERS).await?;
    render(&Redrive { frame: here.frame, is_purge, counted, filters })
}
