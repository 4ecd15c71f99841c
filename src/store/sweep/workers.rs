//! Workers that are silent or too many, across projects.

use fencepost_domain::{
    ids::ProjectId,
    limits::{MIN_BEAT_SECONDS, MISSED_BEATS, WORKER_KEEP_SECONDS, WORKER_SILENCE_SECONDS},
};
use sqlx::PgConnection;

use super::REAPER_GAP_SECONDS;

/// Silent workers that one query finds at most. The statement carries the same number as a literal.
pub const MAX_SILENT_WORKERS: usize = 20;

/// The shortest silence after which a worker may be gone, in seconds.
const MIN_SILENCE_SECONDS: i32 = MIN_BEAT_SECONDS * MISSED_BEATS;

/// A worker that has been silent for longer than it may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SilentWorker {
    pub project_id: ProjectId,
    pub worker_id: String,
    /// Seconds that it may be silent.
    pub silence_seconds: i32,
    /// As in [`crate::workers::Registration`].
    pub counts_losses: bool,
}

/// Workers that send heartbeats for all of their jobs, or have registered how often they call, and
/// have been silent for longer; none right after a gap in which no node was running. A node that
/// pushes is none of them: a handler that sends heartbeats in its name says nothing of the others.
pub async fn find_silent_workers(conn: &mut PgConnection) -> sqlx::Result<Vec<SilentWorker>> {
    sqlx::query_as!(
        SilentWorker,
        r#"
        select project_id "project_id: ProjectId", worker_id,
               coalesce(beat_seconds * $4::int, $1) "silence_seconds!", counts_losses
        from workers
        where last_beat_at is not null and lost_at is null and state <> 'terminated'
            and worker_id not like 'fencepost-push-%'
            and last_beat_at <= now() - make_interval(secs => $3::int)
            and greatest(last_beat_at, last_seen_at)
                <= now() - make_interval(secs => coalesce(beat_seconds * $4::int, $1))
            and exists (
                select from reaper_state where last_pass_at > now() - make_interval(secs => $2::int)
            )
            and not exists (
                select from set_aside
                where project_id = workers.project_id and work = 'lost_worker'
                    and item = workers.worker_id and next_try_at > now()
            )
        order by last_beat_at
        limit 20
        "#,
        WORKER_SILENCE_SECONDS,
        REAPER_GAP_SECONDS,
        MIN_SILENCE_SECONDS,
        MISSED_BEATS,
    )
    .fetch_all(conn)
    .await
}

/// Workers whose labels, directive or state have changed within the last `within_seconds`: nodes
/// must refresh what they have cached.
pub async fn changed_workers(
    conn: &mut PgConnection,
    within_seconds: i32,
) -> sqlx::Result<Vec<(ProjectId, String)>> {
    let rows = sqlx::query!(
        r#"
        select project_id "project_id: ProjectId", worker_id
        from workers
        where changed_at > now() - make_interval(secs => $1::int)
        "#,
        within_seconds,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.project_id, it.worker_id)).collect())
}

/// Deletes workers that have been silent for [`WORKER_KEEP_SECONDS`].
pub async fn prune_workers(conn: &mut PgConnection) -> sqlx::Result<u64> {
    let pruned = sqlx::query!(
        "
        with old as materialized (
            select project_id, worker_id
            from workers
            where last_seen_at < now() - make_interval(secs => $1::bigint)
            order by last_seen_at
            limit 500
            for update skip locked
        )
        delete from workers
        using old
        where workers.project_id = old.project_id and workers.worker_id = old.worker_id
        ",
        WORKER_KEEP_SECONDS,
    )
    .execute(conn)
    .await?;
    Ok(pruned.rows_affected())
}

/// Projects with more workers than this, and how many they have.
pub async fn projects_with_more(
    conn: &mut PgConnection,
    max_workers: i64,
) -> sqlx::Result<Vec<(ProjectId, i64)>> {
    let rows = sqlx::query!(
        r#"
        select project_id "project_id: ProjectId", count(*) "workers!"
        from workers
        group by project_id
        having count(*) > $1
        "#,
        max_workers,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.project_id, it.workers)).collect())
}

/// A worker may be forgotten after this time without a call, in seconds. Leases end earlier.
const FORGOTTEN_AFTER_SECONDS: i32 = 120;

/// Deletes at most this many workers of a project, those first that have been silent for longest.
/// Workers stay that have called lately, or that people have asked to stop.
pub async fn forget_silent_workers(
    conn: &mut PgConnection,
    project_id: ProjectId,
    workers: i64,
) -> sqlx::Result<u64> {
    let forgotten = sqlx::query!(
        "
        with silent as materialized (
            select worker_id
            from workers
            where project_id = $1 and directive is null
                and last_seen_at < now() - make_interval(secs => $3::int)
            order by last_seen_at, worker_id
            limit $2
            for update skip locked
        )
        delete from workers
        using silent
        where workers.project_id = $1 and workers.worker_id = silent.worker_id
        ",
        project_id.0,
        workers,
        FORGOTTEN_AFTER_SECONDS,
    )
    .execute(conn)
    .await?;
    Ok(forgotten.rows_affected())
}

/// Restarts the silence of all workers: in the gap they could not send heartbeats.
pub async fn reset_silence_timers(conn: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update workers
        set last_beat_at = now()
        where last_beat_at is not null and lost_at is null and state <> 'terminated'
            and last_beat_at <= now() - make_interval(secs => $1::int)
        ",
        MIN_SILENCE_SECONDS / 2,
    )
    .execute(conn)
    .await?;
    Ok(())
}
