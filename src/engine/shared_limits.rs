//! Limits that several queues of a project keep together. `dispatch/shared_claim.rs` counts under
//! them.

use fencepost_domain::{
    error::{Error, QueueError},
    ids::ProjectId,
    limits::MAX_GROUP_OVERRIDES,
    shared_limit::{KeyRules, MAX_QUEUES_OF_LIMIT, MAX_SHARED_LIMITS, NewSharedLimit, SharedBy},
};
use fencepost_signals::wakeups::BackgroundTask;
use fencepost_store::shared_limits::{self, MAX_FORGOTTEN, Put, keys};
use sqlx::PgConnection;

pub use fencepost_store::shared_limits::{SharedLimitRow, keys::LimitGroupRow};

use crate::Engine;

/// Limits of a project after `after`, by name.
///
/// # Errors
/// [`Error::Unavailable`] when the database does not answer.
pub async fn list(
    engine: &Engine,
    project_id: ProjectId,
    page: (&str, i64),
) -> Result<Vec<SharedLimitRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(shared_limits::find(&mut conn, project_id, None, page).await?)
}

/// One limit.
///
/// # Errors
/// [`QueueError::SharedLimitNotFound`].
pub async fn get(
    engine: &Engine,
    project_id: ProjectId,
    name: &str,
) -> Result<SharedLimitRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    find(&mut conn, project_id, name).await
}

async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    name: &str,
) -> Result<SharedLimitRow, Error> {
    let names = [name.to_owned()];
    let found = shared_limits::find(conn, project_id, Some(&names), ("", 1)).await?;
    found.into_iter().next().ok_or(QueueError::SharedLimitNotFound.into())
}

/// Stores a limit, or changes the numbers of the one that has its name.
///
/// # Errors
/// [`Error::Invalid`] when that one counts other jobs together. [`Error::QuotaExceeded`] when the
/// project has [`MAX_SHARED_LIMITS`] others.
pub async fn put(
    engine: &Engine,
    project_id: ProjectId,
    new: &NewSharedLimit,
) -> Result<SharedLimitRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    match shared_limits::put(&mut conn, project_id, new, MAX_SHARED_LIMITS).await? {
        Put::Stored => {}
        Put::IsOtherwise => {
            return Err(Error::invalid("by", "cannot be changed: delete the limit first"));
        }
        Put::IsTooMany => {
            return Err(Error::QuotaExceeded { what: "shared limits", max: MAX_SHARED_LIMITS });
        }
    }
    let stored = find(&mut conn, project_id, &new.name).await?;
    look(engine, project_id, &stored);
    Ok(stored)
}

/// Deletes a limit that no queue names.
///
/// # Errors
/// [`QueueError::SharedLimitNotFound`]. [`QueueError::SharedLimitInUse`].
pub async fn delete(engine: &Engine, project_id: ProjectId, name: &str) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    while shared_limits::forget_keys(&mut conn, project_id, name).await? == MAX_FORGOTTEN {}
    if shared_limits::delete(&mut conn, project_id, name).await? {
        return Ok(());
    }
    find(&mut conn, project_id, name).await?;
    Err(QueueError::SharedLimitInUse.into())
}

/// Forgets the counted starts and the pause of all jobs of a limit.
///
/// # Errors
/// [`QueueError::SharedLimitNotFound`]. [`Error::Invalid`] when each group has it for itself.
pub async fn reset(
    engine: &Engine,
    project_id: ProjectId,
    name: &str,
) -> Result<SharedLimitRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    if find(&mut conn, project_id, name).await?.by == SharedBy::Group {
        return Err(Error::invalid(
            "shared_limit",
            "is one of each group: reset its groups one by one",
        ));
    }
    keys::reset(&mut conn, (project_id, name), "").await?;
    let after = find(&mut conn, project_id, name).await?;
    look(engine, project_id, &after);
    Ok(after)
}

/// A limit that each group has for itself, and groups under it after `after`, by name.
///
/// # Errors
/// [`QueueError::SharedLimitNotFound`]. [`Error::Invalid`] when all jobs have it together.
pub async fn groups(
    engine: &Engine,
    (project_id, name): (ProjectId, &str),
    page: (&str, i64),
) -> Result<(SharedLimitRow, Vec<LimitGroupRow>), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let limit = of_groups(&mut conn, project_id, name).await?;
    let found = keys::list(&mut conn, (project_id, name), &limit.queues, None, page).await?;
    Ok((limit, found))
}

/// A limit that each group has for itself, and one group under it; none: nothing is known of it.
///
/// # Errors
/// As for [`groups`].
pub async fn group(
    engine: &Engine,
    (project_id, name): (ProjectId, &str),
    group: &str,
) -> Result<(SharedLimitRow, Option<LimitGroupRow>), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let limit = of_groups(&mut conn, project_id, name).await?;
    let found = keys::list(&mut conn, (project_id, name), &limit.queues, Some(group), ("", 1));
    let found = found.await?.into_iter().next();
    Ok((limit, found))
}

async fn of_groups(
    conn: &mut PgConnection,
    project_id: ProjectId,
    name: &str,
) -> Result<SharedLimitRow, Error> {
    let limit = find(conn, project_id, name).await?;
    match limit.by {
        SharedBy::Group => Ok(limit),
        SharedBy::All => {
            Err(Error::invalid("shared_limit", "counts all jobs together: its groups have none"))
        }
    }
}

/// Gives a group numbers of its own, in place of those of the limit.
///
/// # Errors
/// As for [`groups`]. [`Error::Invalid`] when the numbers would have ended.
/// [`Error::QuotaExceeded`] when [`MAX_GROUP_OVERRIDES`] groups of the project have some.
pub async fn put_group(
    engine: &Engine,
    (project_id, name): (ProjectId, &str),
    group: &str,
    rules: &KeyRules,
) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    of_groups(&mut conn, project_id, name).await?;
    let may = (rules.expires_at, MAX_GROUP_OVERRIDES);
    let may = keys::admittance(&mut conn, (project_id, name), group, may.0, may.1).await?;
    if !may.is_ahead {
        return Err(Error::invalid("expires_at", "must be in the future"));
    }
    if !may.has_place {
        let (what, max) = ("groups with numbers of their own", MAX_GROUP_OVERRIDES);
        return Err(Error::QuotaExceeded { what, max });
    }
    keys::put(&mut conn, (project_id, name), group, rules).await?;
    engine.notifier.wake.ask(BackgroundTask::Groups);
    Ok(())
}

/// Forgets the numbers, the pause and the counted starts of a group under a limit.
///
/// # Errors
/// As for [`groups`].
pub async fn reset_group(
    engine: &Engine,
    (project_id, name): (ProjectId, &str),
    group: &str,
) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    of_groups(&mut conn, project_id, name).await?;
    keys::reset(&mut conn, (project_id, name), group).await?;
    engine.notifier.wake.ask(BackgroundTask::Groups);
    Ok(())
}

/// Has the queues of a limit claimed from at once, and their groups looked at.
fn look(engine: &Engine, project_id: ProjectId, limit: &SharedLimitRow) {
    for queue in &limit.queues {
        engine.notifier.wake.queue_changed(project_id, queue);
    }
    engine.notifier.wake.ask(BackgroundTask::Groups);
}

/// Checks the limits that a queue names, as this transaction has stored them.
pub(super) async fn check_naming(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> Result<(), Error> {
    let naming = shared_limits::check_naming(conn, project_id, queue, MAX_QUEUES_OF_LIMIT).await?;
    let refuse = |message: String| Err(Error::invalid("shared_limits", message));
    if let Some(name) = naming.missing {
        return refuse(format!("names {name}, which does not exist: put the limit first"));
    }
    if let Some(name) = naming.without_turns {
        let needs = "`groups.fair` must be true and `groups.order` none";
        return refuse(format!("names {name}, which each group has for itself: {needs}"));
    }
    if let Some(name) = naming.crowded {
        let most = format!("which {MAX_QUEUES_OF_LIMIT} queues name, as many as may");
        return refuse(format!("names {name}, {most}"));
    }
    Ok(())
}
