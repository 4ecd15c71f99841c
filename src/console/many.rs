//! Work on all that match: how many that are is asked before it is done.

use axum::http::Method;

use super::{
    actions::{self, Plane},
    form::{self, Fields},
    page::Here,
};
use crate::{error::Error, http::many::ManyReply};

/// How many an operation would deal with, and the filters of the page's query that say which.
///
/// # Errors
/// What the API answers.
pub async fn count(
    here: &Here,
    operation: &str,
    names: &[&'static str],
) -> Result<(ManyReply, Vec<(&'static str, String)>), Error> {
    let action = actions::find(operation, Plane::Project).ok_or(Error::NoSuchRoute)?;
    let kept = names.iter().filter_map(|name| Some((*name, here.asked.get(name)?.to_owned())));
    let filters: Vec<_> = kept.collect();
    let named = filters.iter().map(|(name, value)| (format!("filter.{name}"), value.clone()));
    let dry_run = ("dry_run".to_owned(), "true".to_owned());
    let wish = Fields(named.chain([dry_run]).collect());
    let body = form::body(action.fields, &wish)?;
    let counted = here.api.send(Method::POST, &here.at(action.path), Some(body)).await?;
    Ok((counted, filters))
}
