//! Deleting dead letters that are older than a project's plan keeps them: an operation of the
//! project, which it sees like any other, once a day.

use chrono::{DateTime, Days, NaiveTime, Utc};
use fencepost_domain::{
    error::{self, Error},
    ids::{OperationId, ProjectId},
    limits::{FAILED_DELIVERY_DAYS, MAX_DEAD_LETTER_DAYS},
    operation::{Filter, Kind, Which},
    plan::{Limits, Plans, Tenant},
};
use fencepost_store::{self as store, jobs::dead_letters};
use uuid::Builder;

use crate::{
    Engine,
    operations::{self, NewOperation},
};

/// Projects of one page.
const PAGE: i64 = 500;

/// One pass over all projects, and over the outboxes of their webhooks. An operation that exists is
/// not begun again, so any number of nodes may run it.
///
/// # Errors
/// When the database does not answer.
pub async fn pass(engine: &Engine, plans: &Plans) -> sqlx::Result<()> {
    let mut after = ProjectId(0);
    loop {
        let mut conn = engine.pools.background.acquire().await?;
        let page = store::people::projects::list(&mut conn, after, PAGE).await?;
        drop(conn);
        let Some(last) = page.last() else { break };
        after = last.id;
        // A plan that this node does not know counts as the strictest, which must delete nothing.
        let known = page.iter().filter(|it| plans.has(&it.plan));
        let limited = known.filter_map(|project| {
            let limits = plans.of(&project.plan, project.overrides.as_ref());
            let days = limits.dead_letter_days?.min(MAX_DEAD_LETTER_DAYS);
            Some((Tenant { project_id: project.id, limits }, days))
        });
        begin_all(engine, limited.collect()).await?;
    }
    let mut after = ProjectId(0);
    loop {
        let mut conn = engine.pools.background.acquire().await?;
        let page = store::people::projects::outboxes(&mut conn, after, PAGE).await?;
        drop(conn);
        let Some(last) = page.last() else { return Ok(()) };
        after = *last;
        let of_outbox = |it| Tenant { project_id: it, limits: Limits::default() };
        let limited = page.into_iter().map(|it| (of_outbox(it), FAILED_DELIVERY_DAYS));
        begin_all(engine, limited.collect()).await?;
    }
}

/// Begins the operations of those of these projects that have dead letters older than these days.
async fn begin_all(engine: &Engine, limited: Vec<(Tenant, i32)>) -> sqlx::Result<()> {
    let asked: Vec<_> = limited.iter().map(|(it, days)| (it.project_id, *days)).collect();
    let mut conn = engine.pools.background.acquire().await?;
    let old = dead_letters::projects_with_old(&mut conn, &asked).await?;
    let now = store::schedules::clock(&mut conn).await?;
    drop(conn);
    for (tenant, days) in limited.into_iter().filter(|it| old.contains(&it.0.project_id)) {
        if let Err(error) = begin(engine, tenant, (now, days)).await {
            let error = error::chain(&error);
            tracing::warn!(
                project.id = tenant.project_id.0,
                error,
                "old dead letters were not deleted"
            );
        }
    }
    Ok(())
}

async fn begin(
    engine: &Engine,
    tenant: Tenant,
    (now, days): (DateTime<Utc>, i32),
) -> Result<(), Error> {
    let today = now.date_naive().and_time(NaiveTime::MIN).and_utc();
    let days = u64::try_from(days).unwrap_or(u64::MAX);
    // Without a time, the filter would select all.
    let Some(died_before) = today.checked_sub_days(Days::new(days)) else { return Ok(()) };
    let new = NewOperation {
        id: id_of(tenant.project_id, today),
        kind: Kind::DeadLettersPurge,
        filter: Which::Letters(Filter { died_before: Some(died_before), ..Filter::default() }),
        expected: None,
        max_jobs: None,
        rate_per_second: None,
    };
    operations::begin(engine, tenant, &new).await.map(|_| ())
}

/// The same for all nodes on the same day.
fn id_of(project_id: ProjectId, today: DateTime<Utc>) -> OperationId {
    let mut rest = [0; 10];
    rest[..4].copy_from_slice(&project_id.0.to_be_bytes());
    let millis = today.timestamp_millis().unsigned_abs();
    OperationId::derived(Builder::from_unix_timestamp_millis(millis, &rest).into_uuid())
}
