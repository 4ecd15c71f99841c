//! Where the jobs of a request come from.

use axum::http::HeaderMap;
use fencepost_domain::{
    error::Error,
    webhook::{HOP_HEADER, MAX_HOPS},
};
use fencepost_engine::enqueue::Origin;

use super::Caller;

impl<P> Caller<P> {
    /// The origin of jobs that this request enqueues.
    #[must_use]
    pub fn origin(&self) -> Origin {
        Origin::request(self.who.binding().cloned(), self.hop)
    }

    /// How many deliveries of webhooks have led to this request.
    #[must_use]
    pub fn hop(&self) -> Option<i16> {
        self.hop
    }
}

/// How many deliveries of webhooks have led to a request, as its header says.
///
/// # Errors
/// [`Error::Invalid`] for a malformed one: without it a loop of webhooks would not end.
pub(super) fn hop(headers: &HeaderMap) -> Result<Option<i16>, Error> {
    let Some(value) = headers.get(HOP_HEADER) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|it| it.trim().parse::<u32>().ok());
    let number = number.ok_or_else(|| {
        Error::invalid("Fencepost-Hop", "must be the number of the delivery that led to this")
    })?;
    let number = i16::try_from(number).map_or(MAX_HOPS, |it| it.min(MAX_HOPS));
    Ok((number > 0).then_some(number))
}
