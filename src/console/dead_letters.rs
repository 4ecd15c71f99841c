//! Dead letters: groups of similar failures, and the dead letters of one group.

use askama::Template;
use axum::response::Response;
use fencepost_domain::{error::Error, limits::MAX_PAGE_DEAD_LETTERS};
use fencepost_http::routes::dead_letters::{
    DeadLetter, DeadLetterGroup, DeadLetterPage, GroupPage,
};

use super::{
    form::Fields,
    format,
    page::{Frame, Here, render},
};

/// The filters of the list, as the API names them.
pub const FILTERS: [&str; 3] = ["fingerprint", "queue", "job_type"];

/// Groups that the page examines: the latest ones.
const MAX_GROUP_PAGES: usize = 5;
/// Groups that the page shows: the largest ones, or the latest.
const MAX_SHOWN_GROUPS: usize = 100;

#[derive(Template)]
#[template(path = "dead_letters.html")]
struct Groups {
    frame: Frame,
    groups: Vec<DeadLetterGroup>,
    /// Groups that were examined and are not shown.
    left_out: usize,
    has_more: bool,
    is_by_time: bool,
}

/// Groups, the largest first.
pub async fn groups(here: Here) -> Result<Response, Error> {
    let rows = |it: GroupPage| (it.groups, it.next_cursor);
    let path = format!("/dead-letters/groups?limit={MAX_PAGE_DEAD_LETTERS}");
    let (mut groups, has_more) = here.pages(&path, MAX_GROUP_PAGES, rows).await?;
    let is_by_time = here.asked.get("sort") == Some("latest");
    if !is_by_time {
        groups.sort_by_key(|it| std::cmp::Reverse(it.count));
    }
    let left_out = groups.len().saturating_sub(MAX_SHOWN_GROUPS);
    groups.truncate(MAX_SHOWN_GROUPS);
    render(&Groups { frame: here.frame, groups, left_out, has_more, is_by_time })
}

/// Adds to [`DeadLetterGroup`] what pages show of it.
trait DeadLetterGroupExt {
    /// The first line of its message: what people recognize it by.
    fn title(&self) -> &str;
}

impl DeadLetterGroupExt for DeadLetterGroup {
    fn title(&self) -> &str {
        let message = self.sample_message.as_deref().unwrap_or_default().trim();
        let line = message.lines().next().filter(|it| !it.is_empty());
        line.or(self.error_type.as_deref()).unwrap_or("error")
    }
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

/// Adds to [`DeadLetter`] what pages show of it.
trait DeadLetterExt {
    /// The error: the same for the whole group.
    fn words(&self) -> String;
}

impl DeadLetterExt for DeadLetter {
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
