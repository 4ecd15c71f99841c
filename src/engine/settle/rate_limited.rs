//! A worker has met a rate limit: its job goes back without a failure, and nothing of the group or
//! the queue starts for a while. In a transaction of its project: the group commits are shared.

use fencepost_domain::{
    error::Error,
    group::RateLimitScope,
    ids::{JobKey, ProjectId},
    job::OutcomeCause,
    lease::Fence,
    limits::MAX_PAUSED_GROUPS,
};
use fencepost_signals::{telemetry, wakeups::BackgroundTask};
use fencepost_store::{
    groups::{self, GroupKey, PauseEnd},
    queues,
    settle::{
        settle_failure,
        uncounted::{self, Uncounted},
    },
    shared_limits::keys,
};
use metrics::counter;
use sqlx::{Acquire, PgConnection};

use super::{Acked, KEPT_UNCOUNTED_ATTEMPTS, Settling, explain_left, failure};
use crate::{Engine, jobs::control};

/// What a worker says about a rate limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RateLimited {
    pub retry_after_seconds: u32,
    /// None: the group, if the job has one.
    pub scope: Option<RateLimitScope>,
}

/// A pause that has begun.
struct Pause {
    queue: String,
    scope: RateLimitScope,
}

/// Ends an attempt, if its fence holds.
///
/// # Errors
/// [`Error::Invalid`] when the job has no group to be paused.
pub async fn settle(
    engine: &Engine,
    key: JobKey,
    fence: &Fence,
    limited: RateLimited,
    duration_ms: Option<i64>,
) -> Result<Settling<Acked>, Error> {
    let mut conn = engine.pools.read_for(key.project_id).await?;
    let mut tx = conn.begin().await?;
    let done = settle_in(&mut tx, key, fence, limited, duration_ms).await;
    let Some((outcome, after, pause)) = control::finish(tx, done).await? else {
        let mut left = explain_left(&mut conn, std::iter::once((key, fence))).await?;
        return Ok(left.remove(&key).unwrap_or(Settling::NoJob));
    };
    drop(conn);
    failure::publish(&engine.notifier, &[outcome], std::slice::from_ref(&after));
    engine.notifier.wake.ask(BackgroundTask::Groups);
    if let Some(pause) = &pause {
        counter!(telemetry::RATE_LIMIT_PAUSES, "scope" => pause.scope.kind()).increment(1);
        engine.notifier.wake.queue_changed(key.project_id, &pause.queue);
    }
    let acked = match after.retry_at {
        Some(at) => Acked::Retry { at, paused: pause.map(|it| it.scope) },
        None => Acked::Done { children_activated: None },
    };
    Ok(Settling::Done(acked))
}

type Done = (settle_failure::OutcomeToWrite, settle_failure::AfterOutcome, Option<Pause>);

/// None: the fence does not hold.
async fn settle_in(
    tx: &mut PgConnection,
    key: JobKey,
    fence: &Fence,
    limited: RateLimited,
    duration_ms: Option<i64>,
) -> Result<Option<Done>, Error> {
    let held = settle_failure::lock_held(tx, std::iter::once((key, fence))).await?;
    let Some(held) = held.first() else { return Ok(None) };
    let Some((queue, group)) = groups::of_job(tx, key).await? else { return Ok(None) };
    if group.is_none() && limited.scope == Some(RateLimitScope::Group) {
        return Err(Error::invalid("scope", "must be queue: the job has no group"));
    }
    let cause = OutcomeCause::RateLimited { retry_after_seconds: limited.retry_after_seconds };
    let outcome = failure::decide(held, &cause, failure::unreported(held, &cause), duration_ms);
    let after = failure::write(tx, std::slice::from_ref(&outcome)).await?;
    let Some(after) = after.into_iter().next() else { return Ok(None) };
    uncounted::note(tx, key, Uncounted::RateLimit, KEPT_UNCOUNTED_ATTEMPTS).await?;
    let seconds = i32::try_from(limited.retry_after_seconds).unwrap_or(i32::MAX);
    let pause = pause(tx, key.project_id, (queue, group), limited.scope, seconds).await?;
    Ok(Some((outcome, after, pause)))
}

/// What is to be paused: the queue, where the job has no group or its queue does not name the
/// limit.
async fn scope(
    tx: &mut PgConnection,
    project_id: ProjectId,
    (queue, group): (&str, Option<&str>),
    asked: Option<RateLimitScope>,
) -> sqlx::Result<RateLimitScope> {
    let is_named = match &asked {
        Some(RateLimitScope::SharedLimit(name)) => {
            let by_group = keys::named_by(tx, project_id, queue, name).await?;
            by_group.is_some_and(|by_group| group.is_some() || !by_group)
        }
        _ => false,
    };
    Ok(match asked {
        Some(RateLimitScope::SharedLimit(name)) if is_named => RateLimitScope::SharedLimit(name),
        None | Some(RateLimitScope::Group) if group.is_some() => RateLimitScope::Group,
        _ => RateLimitScope::Queue,
    })
}

async fn pause(
    tx: &mut PgConnection,
    project_id: ProjectId,
    (queue, group): (String, Option<String>),
    asked: Option<RateLimitScope>,
    seconds: i32,
) -> Result<Option<Pause>, Error> {
    queues::lock_settings(tx, project_id, &queue).await?;
    let scope = scope(tx, project_id, (&queue, group.as_deref()), asked).await?;
    let group = group.unwrap_or_default();
    let is_new = match &scope {
        RateLimitScope::Queue => groups::rate_limit_queue(tx, project_id, &queue, seconds).await?,
        RateLimitScope::SharedLimit(name) => {
            // Its queue names it and is locked, so it exists.
            let is_new = keys::pause(tx, (project_id, name), &group, seconds).await?;
            is_new.unwrap_or_default()
        }
        RateLimitScope::Group => {
            let group = GroupKey { project_id, queue: queue.clone(), group };
            if !groups::may_pause(tx, &group, MAX_PAUSED_GROUPS).await? {
                // The job itself waits.
                return Ok(None);
            }
            groups::pause(tx, &group, PauseEnd::After(seconds)).await?
        }
    };
    Ok(is_new.then_some(Pause { queue, scope }))
}
