//! What the background loops could not process: they skip it until its next try.

use sqlx::PgConnection;

use fencepost_domain::ids::ProjectId;

/// The first pause before an item is tried again, in seconds. It doubles with each try.
const FIRST_PAUSE_SECONDS: f64 = 10.0;
/// The longest pause, in seconds.
const MAX_PAUSE_SECONDS: f64 = 3_600.0;
/// Seconds after its next try for which an item stays listed. It has been tried by then, unless it
/// is gone.
const KEEP_SECONDS: f64 = 600.0;

/// The work that failed, as it stands in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Firing a schedule's tick.
    Tick,
    /// Computing a schedule's next tick.
    Plan,
    /// Making a due job claimable.
    Promote,
    /// Ending an expired lease.
    Reap,
    /// Releasing or cancelling the children of an ended parent.
    Cascade,
    /// Cancelling a job past its `expires_at`.
    Expire,
    /// Ending the leases of a worker that timed out.
    LostWorker,
    /// Deleting a finished job past its retention.
    Retention,
    /// Merging the counts of a queue.
    Counts,
    /// Storing the callbacks of an end.
    Callbacks,
    /// Making deliveries of an event.
    Events,
    /// Looking for what alarms find in a project.
    Alarms,
    /// Opening the jobs of a group.
    Groups,
    /// Sealing a batch that no job joins any more.
    Seal,
}

impl Work {
    /// Each of them.
    pub const ALL: [Self; 14] = [
        Self::Tick,
        Self::Plan,
        Self::Promote,
        Self::Reap,
        Self::Cascade,
        Self::Expire,
        Self::LostWorker,
        Self::Retention,
        Self::Counts,
        Self::Callbacks,
        Self::Events,
        Self::Alarms,
        Self::Groups,
        Self::Seal,
    ];

    /// As stored, and as a label of metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tick => "tick",
            Self::Plan => "plan",
            Self::Promote => "promote",
            Self::Reap => "reap",
            Self::Cascade => "cascade",
            Self::Expire => "expire",
            Self::LostWorker => "lost_worker",
            Self::Retention => "retention",
            Self::Counts => "counts",
            Self::Callbacks => "callbacks",
            Self::Events => "events",
            Self::Alarms => "alarms",
            Self::Groups => "groups",
            Self::Seal => "seal",
        }
    }
}

/// An item, and why it failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    pub project_id: ProjectId,
    pub item: String,
    pub problem: String,
}

/// Sets items aside until their next try.
pub async fn insert(conn: &mut PgConnection, work: Work, failed: &[Failed]) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into set_aside (project_id, work, item, problem, next_try_at)
        select project_id, $1, item, problem, now() + make_interval(secs => $5)
        from unnest($2::int[], $3::text[], $4::text[]) as sent(project_id, item, problem)
        on conflict (project_id, work, item) do update
        set problem = excluded.problem,
            tries = set_aside.tries + 1,
            next_try_at
                = now() + make_interval(secs => least($6, $5 * 2 ^ least(set_aside.tries, 20)))
        ",
        work.as_str(),
        &failed.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &failed.iter().map(|it| it.item.as_str()).collect::<Vec<_>>() as &[&str],
        &failed.iter().map(|it| it.problem.as_str()).collect::<Vec<_>>() as &[&str],
        FIRST_PAUSE_SECONDS,
        MAX_PAUSE_SECONDS,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Removes items that have succeeded. One whose next try is not due was skipped: another node has
/// just set it aside.
pub async fn clear(
    conn: &mut PgConnection,
    work: Work,
    done: &[(ProjectId, String)],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        delete from set_aside
        using unnest($2::int[], $3::text[]) as done(project_id, item)
        where set_aside.project_id = done.project_id and set_aside.work = $1
            and set_aside.item = done.item and set_aside.next_try_at <= now()
        ",
        work.as_str(),
        &done.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &done.iter().map(|it| it.1.as_str()).collect::<Vec<_>>() as &[&str],
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Removes items that were not tried again when they could have been: they are gone. Returns how
/// many.
pub async fn prune(conn: &mut PgConnection) -> sqlx::Result<u64> {
    let pruned = sqlx::query!(
        "
        delete from set_aside
        using (
            select project_id, work, item
            from set_aside
            where next_try_at < now() - make_interval(secs => $1)
            order by next_try_at
            limit 500
            for update skip locked
        ) old
        where set_aside.project_id = old.project_id and set_aside.work = old.work
            and set_aside.item = old.item
        ",
        KEEP_SECONDS,
    )
    .execute(conn)
    .await?;
    Ok(pruned.rows_affected())
}

/// The number of items by kind of work, counted up to 10,000 in all.
pub async fn count(conn: &mut PgConnection) -> sqlx::Result<Vec<(String, i64)>> {
    let rows = sqlx::query!(
        r#"
        select work, count(*) "items!"
        from (select work from set_aside limit 10000) listed
        group by work
        "#,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.work, it.items)).collect())
}
