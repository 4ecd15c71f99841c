//! Queues: pausing and resuming a whole queue or one job type; reading their state.

use std::{iter::once, sync::Arc};

use fencepost_domain::{
    callbacks::Callbacks,
    error::{Error, FieldError, QueueError},
    ids::ProjectId,
    limits::{MAX_PAUSED_TYPES, MAX_PROJECT_QUEUES},
    text::{self, misleading_char},
};
use fencepost_signals::wakeups::BackgroundTask;
use fencepost_store::{
    connection::{deadline::detached_query, nodes},
    queues::{self, counts, removal, settings},
    shared_limits::names_of,
    sweep::counts::merge_counts,
};
use moka::sync::Cache;
use sqlx::{Acquire, PgConnection};

use super::{Engine, shared_limits};

pub use fencepost_store::queues::{
    counts::{QueueRow, Totals},
    settings::{GroupRulesChange, SettingsChange},
};

/// Nodes of version 0.2.0 do not know groups: their claims would ignore the rules.
const AN_EARLIER_NODE: &str =
    "cannot have rules while a node of version 0.2.0 runs: upgrade all nodes first";

/// Changes the settings of a queue.
///
/// # Errors
/// [`Error::Invalid`] when groups are to have rules, and a node runs that does not know them.
/// [`Error::QuotaExceeded`] when [`MAX_PROJECT_QUEUES`] other queues of the project have settings.
pub async fn change_settings(
    engine: &Engine,
    project_id: ProjectId,
    queue: &str,
    change: &SettingsChange,
) -> Result<(), Error> {
    check_new_names(engine, project_id, once(("", queue))).await?;
    let has_rules = change.groups.as_ref().is_some_and(|it| *it != GroupRulesChange::END)
        || change.shared_limits.as_ref().is_some_and(Option::is_some);
    if has_rules && has_earlier_nodes(engine).await? {
        let field = if change.groups.is_some() { "groups" } else { "shared_limits" };
        return Err(Error::invalid(field, AN_EARLIER_NODE));
    }
    let mut conn = engine.pools.read_for(project_id).await?;
    check_room(&mut conn, project_id, queue).await?;
    let sharing = match change.groups.is_some() || change.shared_limits.is_some() {
        true => change_and_share(&mut conn, project_id, queue, change).await?,
        false => {
            settings::change_settings(&mut conn, project_id, queue, change).await?;
            Vec::new()
        }
    };
    if change.brake_after.flatten().is_some() {
        engine.breakers.add(project_id);
    }
    if change.groups.is_some() || change.shared_limits.is_some() {
        engine.notifier.wake.ask(BackgroundTask::Groups);
    }
    shared_limits::look(engine, project_id, &sharing);
    engine.notifier.wake.queue_changed(project_id, queue);
    Ok(())
}

/// Changes settings that decide about shared limits. Returns the queues that share with it a limit
/// that it has begun or ceased to name.
async fn change_and_share(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    change: &SettingsChange,
) -> Result<Vec<String>, Error> {
    let mut tx = conn.begin().await?;
    let before = names_of(&mut tx, project_id, queue).await?;
    settings::change_settings(&mut tx, project_id, queue, change).await?;
    let sharing = shared_limits::note_naming(&mut tx, project_id, queue, &before).await?;
    tx.commit().await?;
    Ok(sharing)
}

/// Checks that a queue may have settings, and rules of groups among them.
///
/// # Errors
/// The errors of [`change_settings`].
pub async fn admit_group_rules(
    engine: &Engine,
    project_id: ProjectId,
    queue: &str,
) -> Result<(), Error> {
    if has_earlier_nodes(engine).await? {
        return Err(Error::invalid("group", AN_EARLIER_NODE));
    }
    check_new_names(engine, project_id, once(("", queue))).await?;
    let mut conn = engine.pools.read_for(project_id).await?;
    check_room(&mut conn, project_id, queue).await
}

async fn has_earlier_nodes(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    nodes::has_earlier(&mut conn).await
}

/// Refuses names of new queues that look like other names. Each has the path below which its field
/// `queue` is. Queues that have jobs on record or settings keep working, whatever they are called.
///
/// # Errors
/// [`Error::Invalid`] names the field and the character.
pub async fn check_new_names<'a>(
    engine: &Engine,
    project_id: ProjectId,
    named: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<(), Error> {
    let odd = named.filter_map(|(path, queue)| Some((path, queue, misleading_char(queue)?)));
    let odd: Vec<_> = odd.collect();
    if odd.is_empty() {
        return Ok(());
    }
    let mut names: Vec<_> = odd.iter().map(|(_, queue, _)| (*queue).to_owned()).collect();
    names.sort_unstable();
    names.dedup();
    let pools = engine.pools.clone();
    let known = detached_query(async move {
        let mut conn = pools.read_for(project_id).await?;
        queues::existing(&mut conn, project_id, &names).await
    });
    let known = known.await?;
    let new = odd.into_iter().filter(|(_, queue, _)| known.iter().all(|it| it != queue));
    let broken: Vec<_> = new
        .map(|(path, _, it)| FieldError::new(format!("{path}queue"), refused_character(it)))
        .collect();
    if broken.is_empty() { Ok(()) } else { Err(Error::Invalid(broken)) }
}

/// Checks the queues of jobs that callbacks enqueue, as [`check_new_names`] does.
///
/// # Errors
/// [`Error::Invalid`] names the field and the character.
pub async fn check_new_names_of(
    engine: &Engine,
    project_id: ProjectId,
    (path, callbacks): (&str, &Callbacks),
) -> Result<(), Error> {
    let jobs = callbacks.jobs(path);
    let named = jobs.iter().map(|(path, job)| (path.as_str(), job.queue.as_str()));
    check_new_names(engine, project_id, named).await
}

fn refused_character(character: char) -> String {
    let code = u32::from(character);
    match character {
        '.' => text::PATH_STEP.to_owned(),
        ' ' => "must not begin or end with a space, U+0020".to_owned(),
        _ => format!("must not contain U+{code:04X}, which is not shown or looks like another"),
    }
}

/// Deletes a queue with its settings. If jobs come at the same time, it is a new one.
///
/// # Errors
/// [`Error::QueueNotFound`]. [`QueueError::InUse`] while it has jobs, finished ones among them, or
/// is pushed.
pub async fn delete(engine: &Engine, project_id: ProjectId, queue: &str) -> Result<(), Error> {
    // What counts its jobs must be merged first, which is for the login of the loops.
    let mut conn = engine.pools.background.acquire_for(project_id).await?;
    merge_counts(&mut conn, Some(&[(project_id, queue.to_owned())])).await?;
    drop(conn);
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    let held = removal::lock_counts(&mut tx, project_id, queue).await?;
    if held.has_jobs {
        return Err(Error::OfQueue(QueueError::InUse(
            "the queue has jobs, or had some a moment ago; finished ones count until they expire",
        )));
    }
    if held.is_pushed {
        return Err(Error::OfQueue(QueueError::InUse("the queue has a push: end it first")));
    }
    if !removal::delete(&mut tx, project_id, queue).await? {
        return Err(Error::QueueNotFound);
    }
    tx.commit().await?;
    engine.used_queues.0.invalidate(&(project_id, queue.into()));
    engine.notifier.wake.queue_changed(project_id, queue);
    Ok(())
}

/// Settings of a queue outlive its jobs, so they are bounded by themselves.
async fn check_room(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> Result<(), Error> {
    let max = MAX_PROJECT_QUEUES;
    if queues::may_have_settings(conn, project_id, queue, max).await? {
        return Ok(());
    }
    Err(Error::QuotaExceeded { what: "queues with settings", max })
}

/// Pauses or resumes a queue. A paused queue accepts jobs, but none is claimed.
///
/// # Errors
/// The errors of [`change_settings`].
pub async fn set_paused(
    engine: &Engine,
    project_id: ProjectId,
    queue: &str,
    is_paused: bool,
) -> Result<(), Error> {
    check_new_names(engine, project_id, once(("", queue))).await?;
    let mut conn = engine.pools.read_for(project_id).await?;
    check_room(&mut conn, project_id, queue).await?;
    queues::set_paused(&mut conn, project_id, queue, is_paused).await?;
    engine.notifier.wake.queue_changed(project_id, queue);
    Ok(())
}

/// Pauses or resumes one job type of a queue. Resuming also ends a pause by the circuit breaker,
/// and resets the streak of dead letters.
///
/// # Errors
/// [`Error::QuotaExceeded`] when [`MAX_PAUSED_TYPES`] types of the queue are paused, and as for
/// [`change_settings`].
pub async fn set_type_paused(
    engine: &Engine,
    project_id: ProjectId,
    queue: &str,
    job_type: &str,
    is_paused: bool,
) -> Result<(), Error> {
    check_new_names(engine, project_id, once(("", queue))).await?;
    let mut conn = engine.pools.read_for(project_id).await?;
    check_room(&mut conn, project_id, queue).await?;
    let mut tx = conn.begin().await?;
    // The type first and then its queue, as the circuit breaker locks them.
    queues::set_type_paused(&mut tx, project_id, queue, job_type, is_paused).await?;
    queues::lock_settings(&mut tx, project_id, queue).await?;
    let paused = queues::count_paused_types(&mut tx, project_id, queue).await?;
    if is_paused && paused > MAX_PAUSED_TYPES {
        return Err(Error::QuotaExceeded {
            what: "paused types in a queue",
            max: MAX_PAUSED_TYPES,
        });
    }
    queues::keep_paused_types(&mut tx, project_id, queue).await?;
    tx.commit().await?;
    engine.notifier.wake.queue_changed(project_id, queue);
    Ok(())
}

/// Number of jobs by state, over all queues of a project.
pub async fn totals(engine: &Engine, project_id: ProjectId) -> Result<Totals, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(counts::totals(&mut conn, project_id).await?)
}

/// Names of queues of a project after `after`, in order.
pub async fn names(
    engine: &Engine,
    project_id: ProjectId,
    after: &str,
    limit: i64,
) -> Result<Vec<String>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(counts::queue_names(&mut conn, project_id, after, limit).await?)
}

/// The state of these queues, whether they exist or not.
pub async fn find(
    engine: &Engine,
    project_id: ProjectId,
    names: &[String],
) -> Result<Vec<QueueRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(counts::queues(&mut conn, project_id, names).await?)
}

/// Names that one node remembers.
const MAX_CACHED_NAMES: u64 = 100_000;

/// Queues that are known to have had a job, so that polls of them ask nothing.
pub struct UsedQueues(Cache<(ProjectId, Arc<str>), ()>);

impl Default for UsedQueues {
    fn default() -> Self {
        Self(Cache::new(MAX_CACHED_NAMES))
    }
}

/// Queues among these without a job on record: their names may be misspelt. None if the database
/// does not answer, because it is advice.
pub async fn never_used(engine: &Engine, project_id: ProjectId, names: &[String]) -> Vec<String> {
    let is_known = |it: &str| engine.used_queues.0.contains_key(&(project_id, it.into()));
    let unknown: Vec<_> = names.iter().filter(|it| !is_known(it)).cloned().collect();
    if unknown.is_empty() {
        return Vec::new();
    }
    let (pools, asked) = (engine.pools.clone(), unknown.clone());
    let read = detached_query(async move {
        let mut conn = pools.read_for(project_id).await?;
        let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
        counts::used_queues(&mut conn, project_id, &asked).await
    });
    let Ok(used) = read.await else { return Vec::new() };
    for queue in &used {
        engine.used_queues.0.insert((project_id, queue.as_str().into()), ());
    }
    unknown.into_iter().filter(|it| !used.contains(it)).collect()
}
