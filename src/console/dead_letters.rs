//! Dead letters: groups of similar failures, and the dead letters of one group.

use askama::Template;
use axum::response::Response;

use super::{
    form::Fields,
    format,
    page::{Frame, Here, render},
};
use crate::{
    error::Error,
    http::dead_letters::{DeadLetter, DeadLetterGroup, DeadLetterPage, GroupPage},
};

/// The filters of the list, as the API names them.
pub const FILTERS: [&str; 3] = ["fingerprint", "queue", "job_type"];

#[derive(Template)]
#[template(path = "dead_letters.html")]
struct Groups {
    frame: Frame,
    groups: Vec<DeadLetterGroup>,
    next: Option<String>,
}

pub async fn groups(here: Here) -> Result<Response, Error> {
    let (page, _): (GroupPage, _) = here.list("/dead-letters/groups", &[]).await?;
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
    /// The error, if all belong to one group.
    group: Option<String>,
    next: Option<String>,
}

/// The error in words, if the page is about one group that is not empty.
pub async fn group_words(here: &Here) -> Result<Option<String>, Error> {
    if here.asked.get("fingerprint").is_none() {
        return Ok(None);
    }
    let one = "/dead-letters?payloads=false&limit=1";
    let (page, _): (DeadLetterPage, _) = here.list(one, &["fingerprint"]).await?;
    Ok(page.dead_letters.first().map(DeadLetter::words))
}

impl DeadLetter {
    /// The error: the same for the whole group.
    fn words(&self) -> String {
        let kind = self.job.last_error.as_ref().and_then(|it| it.kind.as_deref());
        format!("{} in {}", kind.unwrap_or("error"), self.job.job_type)
    }
}

/// The dead letters of a group, or of all.
pub async fn letters(here: Here) -> Result<Response, Error> {
    let (page, filters): (DeadLetterPage, _) =
        here.list("/dead-letters?payloads=false", &FILTERS).await?;
    let Here { frame, asked, .. } = here;
    let group = asked.get("fingerprint").and(page.dead_letters.first()).map(DeadLetter::words);
    let next = frame.next("/dead-letters/list", &filters, page.next_cursor.as_deref());
    render(&Letters { frame, page, asked, filters, group, next })
}
