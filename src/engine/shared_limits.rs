//! Limits that several queues of a project keep together. `dispatch/shared_claim.rs` counts under
//! them.

use fencepost_domain::{
    error::{Error, QueueError},
    ids::ProjectId,
    limits::MAX_GROUP_OVERRIDES,
    shared_limit::{KeyRules, MAX_QUEUES_OF_LIMIT, MAX_SHARED_LIMITS, NewSharedLimit, SharedBy},
};
use fencepost_signals::wakeups::BackgroundTask;
use fencepost_store::shared_limits::{self, MAX_FORGOTTEN, Put, claimed, keys};
use sqlx::{Acquire, PgConnection};

pub use fencepost_store::shared_limits::{SharedLimitRow, keys::LimitGroupRow};

use crate::Engine;

/// Statements that the deletion of a limit makes at most to forget its keys. What is left then ends
/// by itself.
const MAX_FORGETTING_STEPS: usize = 100;

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
    let is_changed = match shared_limits::put(&mut conn, project_id, new, MAX_SHARED_LIMITS).await?
    {
        Put::Stored { is_changed } => is_changed,
        Put::IsOtherwise => {
            return Err(Error::invalid(
                "by",
                "cannot be changed: leave it out, or use another name",
            ));
        }
        Put::IsTooMany => {
            return Err(Error::QuotaExceeded { what: "shared limits", max: MAX_SHARED_LIMITS });
        }
    };
    let stored = find(&mut conn, project_id, &new.name).await?;
    if is_changed && stored.by == SharedBy::Group {
        // Not in one transaction: those who name it lock its queues first.
        shared_limits::walk(&mut conn, project_id, &stored.queues).await?;
    }
    look(engine, project_id, &stored.queues);
    Ok(stored)
}

/// Deletes a limit that no queue names.
///
/// # Errors
/// [`QueueError::SharedLimitNotFound`]. [`QueueError::SharedLimitInUse`].
pub async fn delete(engine: &Engine, project_id: ProjectId, name: &str) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    if !shared_limits::delete(&mut conn, project_id, name).await? {
        find(&mut conn, project_id, name).await?;
        return Err(QueueError::SharedLimitInUse.into());
    }
    for _ in 0..MAX_FORGETTING_STEPS {
        if shared_limits::forget_keys(&mut conn, project_id, name).await? < MAX_FORGOTTEN {
            break;
        }
    }
    Ok(())
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
        let message = "is one of each group: reset its groups one by one";
        return Err(Error::invalid("shared_limit", message));
    }
    forget_key(&mut conn, (project_id, name), "").await?;
    let after = find(&mut conn, project_id, name).await?;
    look(engine, project_id, &after.queues);
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
    forget_key(&mut conn, (project_id, name), group).await?;
    engine.notifier.wake.ask(BackgroundTask::Groups);
    Ok(())
}

/// Forgets what is known of a key, while no claim counts under the limit: it would store again what
/// it has read.
async fn forget_key(
    conn: &mut PgConnection,
    of: (ProjectId, &str),
    group: &str,
) -> sqlx::Result<()> {
    let mut tx = conn.begin().await?;
    claimed::lock(&mut tx, of).await?;
    keys::reset(&mut tx, of, group).await?;
    tx.commit().await
}

/// Has the queues of a limit claimed from at once, and their groups looked at.
pub(super) fn look(engine: &Engine, project_id: ProjectId, queues: &[String]) {
    for queue in queues {
        engine.notifier.wake.queue_changed(project_id, queue);
    }
    engine.notifier.wake.ask(BackgroundTask::Groups);
}

/// Notes which limits a queue names, as this transaction has stored it; `before` it named these.
/// Returns the queues that share with it one that it has begun or ceased to name.
pub(super) async fn note_naming(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    before: &[String],
) -> Result<Vec<String>, Error> {
    let named = shared_limits::names_of(conn, project_id, queue).await?;
    if named.is_empty() && before.is_empty() {
        return Ok(Vec::new());
    }
    let unnamed: Vec<_> = before.iter().filter(|it| !named.contains(it)).cloned().collect();
    let limits = shared_limits::note_naming(conn, project_id, queue, (&named, &unnamed)).await?;
    let has_turns = shared_limits::has_turns(conn, project_id, queue).await?;
    for name in &named {
        let limit = limits.iter().find(|it| it.name == *name);
        let refuse = |message: String| Err(Error::invalid("shared_limits", message));
        let Some(limit) = limit else {
            return refuse(format!("names {name}, which does not exist: put the limit first"));
        };
        if limit.by_group && !has_turns {
            let needs = "`groups.fair` must be true and `groups.order` none";
            return refuse(format!("names {name}, which each group has for itself: {needs}"));
        }
        if limit.queues.len() > MAX_QUEUES_OF_LIMIT {
            let most = format!("which {MAX_QUEUES_OF_LIMIT} queues name, as many as may");
            return refuse(format!("names {name}, {most}"));
        }
    }
    let of_changed =
        limits.into_iter().filter(|it| unnamed.contains(&it.name) || !before.contains(&it.name));
    Ok(of_changed.flat_map(|it| it.queues).collect())
}
