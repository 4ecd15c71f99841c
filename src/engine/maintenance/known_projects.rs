//! Reads which projects have something rare.

use std::collections::HashSet;

use fencepost_domain::ids::ProjectId;
use fencepost_store::sweep::known::{self, MAX_PAGE_PROJECTS};
use sqlx::PgConnection;

use crate::Engine;

/// Reads all projects that have circuit breakers, or endpoints that ask for events.
///
/// # Errors
/// When the database does not answer.
pub async fn pass(engine: &Engine) -> sqlx::Result<()> {
    let mut conn = engine.pools.background.acquire().await?;
    engine.breakers.begin_reading();
    engine.breakers.learn(read_all(&mut conn, Rare::Breaker).await?);
    engine.notifier.subscribed.begin_reading();
    engine.notifier.subscribed.learn(read_all(&mut conn, Rare::Subscription).await?);
    Ok(())
}

#[derive(Clone, Copy)]
enum Rare {
    Breaker,
    Subscription,
}

async fn read_all(conn: &mut PgConnection, rare: Rare) -> sqlx::Result<HashSet<ProjectId>> {
    let mut all = HashSet::new();
    let mut last = ProjectId(0);
    loop {
        let page = match rare {
            Rare::Breaker => known::braked(conn, last).await?,
            Rare::Subscription => known::subscribed(conn, last).await?,
        };
        let is_full = page.len() as i64 == MAX_PAGE_PROJECTS;
        last = page.last().copied().unwrap_or(last);
        all.extend(page);
        if !is_full {
            return Ok(all);
        }
    }
}
