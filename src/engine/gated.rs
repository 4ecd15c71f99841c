//! Looks at queues with gates: a transaction that locks the keys it counts under, then claims.

use rand::Rng;
use sqlx::{Acquire, PgConnection};
use uuid::Uuid;

use crate::store::{
    claims::{LeasedJob, Look},
    gates::{self, GateSeen, MAX_PAGE_GATES},
};

/// Pages of gates one look goes through at the most.
const MAX_PAGES: usize = 5;

/// What a look at a queue with gates has found.
#[derive(Debug, Default)]
pub(super) struct GatedFinding {
    /// The jobs, leased.
    pub jobs: Vec<LeasedJob>,
    /// How many were chosen; others may have taken some of them.
    pub chosen: usize,
    /// Whether somebody else holds locks, so that there may be more.
    pub was_contended: bool,
}

/// Claims from a queue with gates: the best of what is behind open gates and of what is before them.
///
/// With more gates than fit in a page it begins anywhere among them, so that none is passed over for
/// ever.
pub(super) async fn claim(conn: &mut PgConnection, look: &Look<'_>) -> sqlx::Result<GatedFinding> {
    let mut tx = conn.begin().await?;
    let limit = gates::lock_queue(&mut tx, look.project_id, look.queue).await?;
    if limit.is_some_and(|it| !it.is_locked) {
        return Ok(GatedFinding { was_contended: true, ..GatedFinding::default() });
    }
    let mut seen = gates::lock_gates(&mut tx, look, Uuid::nil()).await?;
    if seen.len() == MAX_PAGE_GATES {
        let anywhere = Uuid::from_u128(rand::rng().next_u64().into()).as_u128() << 64;
        let mut after = Uuid::from_u128(anywhere);
        for _ in 0..MAX_PAGES {
            let page = gates::lock_gates(&mut tx, look, after).await?;
            after = match page.last() {
                Some(last) if page.len() == MAX_PAGE_GATES => last.gate,
                // Around the end, back to the beginning.
                _ => Uuid::nil(),
            };
            seen.extend(page);
        }
        seen.sort_by_key(|it| it.gate);
        seen.dedup_by_key(|it| it.gate);
    }
    let was_contended = seen.iter().any(|it| it.is_fitting && !it.is_locked);
    let passable = |it: &&GateSeen| it.is_fitting && it.is_locked;
    let open: Vec<_> = seen.iter().filter(passable).map(|it| it.gate).collect();
    let max_concurrency = limit.map(|it| it.max_concurrency);
    let (jobs, chosen) = gates::claim_gated(&mut tx, look, &open, max_concurrency).await?;
    tx.commit().await?;
    Ok(GatedFinding { jobs, chosen, was_contended })
}
