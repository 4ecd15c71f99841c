//! Where the jobs of a request come from.

use axum::http::HeaderMap;
use fencepost_domain::webhook::{HOP_HEADER, MAX_HOPS};
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

/// How many deliveries of webhooks have led to a request, as its header says. A malformed one is
/// ignored, like a trace context.
pub(super) fn hop(headers: &HeaderMap) -> Option<i16> {
    let value: i16 = headers.get(HOP_HEADER)?.to_str().ok()?.trim().parse().ok()?;
    (value > 0).then_some(value.min(MAX_HOPS))
}
