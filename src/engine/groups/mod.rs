//! Groups of jobs: what they wait for, pausing and unblocking them; `admission.rs` opens their
//! jobs.

pub mod admission;

use chrono::{DateTime, Utc};
use fencepost_domain::{
    actor::ChangedBy,
    error::{Error, QueueError},
    group::{GroupOverride, HeadAction},
    ids::{JobId, JobKey, ProjectId},
    job::StoredState,
    limits::{
        MAX_COMPARED_GROUPS, MAX_GROUP_OVERRIDES, MAX_GROUP_PAUSE_SECONDS, MAX_PAUSED_GROUPS,
    },
};
use fencepost_signals::wakeups::BackgroundTask;
use fencepost_store::{
    groups::{self, overrides},
    queues,
};
use sqlx::{Acquire, PgConnection};

use crate::{
    Engine,
    jobs::{control, dead_letters},
};

pub use fencepost_store::groups::{GroupKey, GroupRow, Listed, PauseEnd};

/// Groups of a queue after `after`, in the order of their names.
pub async fn list(
    engine: &Engine,
    project_id: ProjectId,
    queue: &str,
    listed: Listed,
    (after, limit): (&str, i64),
) -> Result<Vec<GroupRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let names = groups::names(&mut conn, project_id, queue, listed, after, limit).await?;
    Ok(groups::find(&mut conn, project_id, queue, &names).await?)
}

/// Groups of a queue whose first job has waited longest, among the first [`MAX_COMPARED_GROUPS`]
/// with waiting jobs by name.
pub async fn longest_waiting(
    engine: &Engine,
    project_id: ProjectId,
    queue: &str,
    limit: i64,
) -> Result<Vec<GroupRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let compared = MAX_COMPARED_GROUPS;
    let names = groups::longest_waiting(&mut conn, project_id, queue, compared, limit).await?;
    Ok(groups::find(&mut conn, project_id, queue, &names).await?)
}

/// One group.
///
/// # Errors
/// [`QueueError::GroupNotFound`] when no job of it waits, runs or blocks it, and it is not paused.
pub async fn get(engine: &Engine, group: &GroupKey) -> Result<GroupRow, Error> {
    let mut conn = engine.pools.read_for(group.project_id).await?;
    find(&mut conn, group).await
}

/// One group, whether it has jobs or not.
pub async fn get_any(engine: &Engine, group: &GroupKey) -> Result<GroupRow, Error> {
    let mut conn = engine.pools.read_for(group.project_id).await?;
    find_any(&mut conn, group).await
}

async fn find(conn: &mut PgConnection, group: &GroupKey) -> Result<GroupRow, Error> {
    let found = find_any(conn, group).await?;
    let is_known =
        found.head_id.is_some() || found.paused_at.is_some() || found.own_weight.is_some();
    if is_known { Ok(found) } else { Err(QueueError::GroupNotFound.into()) }
}

async fn find_any(conn: &mut PgConnection, group: &GroupKey) -> Result<GroupRow, Error> {
    let names = [group.group.clone()];
    let found = groups::find(conn, group.project_id, &group.queue, &names).await?;
    found.into_iter().next().ok_or(QueueError::GroupNotFound.into())
}

/// Pauses a group. A later end stays. Running jobs continue.
///
/// # Errors
/// [`Error::QuotaExceeded`] when [`MAX_PAUSED_GROUPS`] groups of the project are paused, and as for
/// [`crate::queues::change_settings`].
pub async fn pause(engine: &Engine, group: &GroupKey, end: PauseEnd) -> Result<(), Error> {
    crate::queues::admit_group_rules(engine, group.project_id, &group.queue).await?;
    let mut conn = engine.pools.read_for(group.project_id).await?;
    let mut tx = conn.begin().await?;
    queues::lock_settings(&mut tx, group.project_id, &group.queue).await?;
    pause_in(&mut tx, group, end).await?;
    tx.commit().await?;
    admit(engine, group);
    Ok(())
}

/// The settings of the queue must be locked.
async fn pause_in(tx: &mut PgConnection, group: &GroupKey, end: PauseEnd) -> Result<(), Error> {
    if !groups::may_pause(tx, group, MAX_PAUSED_GROUPS).await? {
        let (what, max) = ("paused groups", MAX_PAUSED_GROUPS);
        return Err(Error::QuotaExceeded { what, max });
    }
    groups::pause(tx, group, end).await?;
    Ok(())
}

/// Ends the pause of a group, by a person or by a worker.
///
/// # Errors
/// [`QueueError::GroupNotFound`] when it is neither paused nor has jobs.
pub async fn resume(engine: &Engine, group: &GroupKey) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(group.project_id).await?;
    if !groups::resume(&mut conn, group).await? {
        find(&mut conn, group).await?;
    }
    admit(engine, group);
    Ok(())
}

/// Gives a group rules of its own, in place of those that it had, and pauses it until a time, if
/// there is one. A later end of its pause stays.
///
/// # Errors
/// [`Error::Invalid`] when the groups of its queue take no turns, the rules would have ended, or
/// the pause would have, or would last too long. [`Error::QuotaExceeded`] when
/// [`MAX_GROUP_OVERRIDES`] groups of the project have some, or [`MAX_PAUSED_GROUPS`] are paused. As
/// for [`crate::queues::change_settings`].
pub async fn put_rules(
    engine: &Engine,
    group: &GroupKey,
    rules: &GroupOverride,
    paused_until: Option<DateTime<Utc>>,
) -> Result<(), Error> {
    if paused_until.is_some() {
        crate::queues::admit_group_rules(engine, group.project_id, &group.queue).await?;
    }
    let mut conn = engine.pools.read_for(group.project_id).await?;
    let mut tx = conn.begin().await?;
    queues::lock_settings(&mut tx, group.project_id, &group.queue).await?;
    let ends = (rules.expires_at, paused_until);
    let may = overrides::admittance(&mut tx, group, ends, MAX_GROUP_OVERRIDES).await?;
    if !may.has_turns {
        let message = "its groups take no turns: set its `groups` to `fair` true and `order` none";
        return Err(Error::invalid("queue", message));
    }
    if !may.is_ahead {
        return Err(Error::invalid("expires_at", "must be in the future"));
    }
    if !may.may_pause_until {
        let days = MAX_GROUP_PAUSE_SECONDS / 86_400;
        let message = format!("must be in the future, and at most {days} days ahead");
        return Err(Error::invalid("paused_until", message));
    }
    if !may.has_place {
        let (what, max) = ("groups with rules of their own", MAX_GROUP_OVERRIDES);
        return Err(Error::QuotaExceeded { what, max });
    }
    overrides::put(&mut tx, group, rules).await?;
    if let Some(at) = paused_until {
        pause_in(&mut tx, group, PauseEnd::At(at)).await?;
    }
    tx.commit().await?;
    admit(engine, group);
    Ok(())
}

/// Deletes the rules of a group and its counted starts.
///
/// # Errors
/// [`QueueError::GroupNotFound`] when it has none of them, no jobs, and is not paused.
pub async fn reset(engine: &Engine, group: &GroupKey) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(group.project_id).await?;
    if !overrides::reset(&mut conn, group).await? {
        find(&mut conn, group).await?;
    }
    admit(engine, group);
    Ok(())
}

/// Unblocks a group that a dead letter blocks: this one, if it is named. Returns its id.
///
/// # Errors
/// [`QueueError::GroupNotBlocked`]. [`QueueError::GroupNotFound`]. The errors of
/// [`control::retry`].
pub async fn unblock(
    engine: &Engine,
    group: &GroupKey,
    (how, named): (HeadAction, Option<JobId>),
    by: &ChangedBy,
) -> Result<JobId, Error> {
    let head = get(engine, group).await?;
    let is_dead = head.head_state == Some(StoredState::DeadLetter);
    let dead = head.head_id.filter(|id| is_dead && named.is_none_or(|it| it == *id));
    let id = dead.ok_or(QueueError::GroupNotBlocked)?;
    let key = JobKey { project_id: group.project_id, id };
    match how {
        HeadAction::Retry => control::retry_dead_letter(engine, key, by).await?,
        HeadAction::Delete => dead_letters::delete(engine, key).await?,
        HeadAction::Skip => {
            let mut conn = engine.pools.read_for(group.project_id).await?;
            if !groups::unblock(&mut conn, key).await? {
                return Err(QueueError::GroupNotBlocked.into());
            }
        }
    }
    admit(engine, group);
    Ok(id)
}

/// Looks at a group soon, here and with the claims of other nodes.
fn admit(engine: &Engine, group: &GroupKey) {
    engine.notifier.wake.ask(BackgroundTask::Groups);
    engine.notifier.wake.queue_changed(group.project_id, &group.queue);
}
