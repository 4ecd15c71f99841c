//! Dead letters: groups of what failed alike, the letters of one, and what can be done with all of them.

use askama::Template;
use axum::{http::Method, response::Response};

use super::{
    form::{self, Field, Fields, encode},
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
    let next = page
        .next_cursor
        .map(|cursor| frame.to(&format!("/dead-letters?{}", encode(&[("cursor", &cursor)]))));
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
    let separator = if filters.is_empty() { "" } else { "&" };
    let cursor = here.asked.query(&["cursor"]);
    let page: DeadLetterPage =
        here.get(&format!("/dead-letters?{filters}{separator}{cursor}")).await?;
    let Here { frame, asked, .. } = here;
    let next = page.next_cursor.as_deref().map(|cursor| {
        let cursor = encode(&[("cursor", cursor)]);
        frame.to(&format!("/dead-letters/list?{filters}{separator}{cursor}"))
    });
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
    let (is_purge, path) = match here.asked.get("what") {
        Some("retry") => (false, "/dead-letters/retry"),
        Some("purge") => (true, "/dead-letters/purge"),
        _ => return Err(Error::NoSuchRoute),
    };
    let kept = FILTERS.iter().filter_map(|name| Some((*name, here.asked.get(name)?.to_owned())));
    let filters: Vec<_> = kept.collect();
    let named = filters.iter().map(|(name, value)| (format!("filter.{name}"), value.clone()));
    let mut wish = Fields(named.collect());
    wish.0.push(("dry_run".to_owned(), "true".to_owned()));
    const WISH: &[Field] = &[
        Field::Text("filter.queue"),
        Field::Text("filter.job_type"),
        Field::Text("filter.fingerprint"),
        Field::Object("filter"),
        Field::Flag("dry_run"),
    ];
    let body = form::body(WISH, &wish)?;
    let counted = here.api.send(Method::POST, &here.at(path), Some(body)).await?;
    render(&Redrive { frame: here.frame, is_purge, counted, filters })
}
