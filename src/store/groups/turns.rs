//! Turns of groups, in queues in which they take turns. Claims change them under the lock of their
//! queue.

use chrono::{DateTime, Utc};
use fencepost_domain::ids::ProjectId;
use sqlx::PgConnection;

/// Seconds that a group without a job rests at first. Each further rest is twice as long: an
/// enqueue that was under way when it began to rest has not noted the group.
pub const FIRST_REST_SECONDS: f64 = 1.0;
/// Seconds without a job after which a group is forgotten: no statement takes as long.
pub const FORGOTTEN_AFTER_SECONDS: f64 = 60.0;

/// The turn of the group that started a job last in this queue.
pub async fn current(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<f64> {
    let found = sqlx::query_scalar!(
        "select turn from queue_turns where project_id = $1 and queue = $2",
        project_id.0,
        queue,
    );
    Ok(found.fetch_optional(conn).await?.unwrap_or(0.0))
}

/// What a claim changes of the groups of a queue.
#[derive(Debug, Clone, Default)]
pub struct TurnChanges {
    /// Next turns of groups of which jobs have started.
    pub turns: Vec<(String, f64)>,
    /// Groups that let nothing start before these times.
    pub rests: Vec<(String, DateTime<Utc>)>,
    /// Groups without a job.
    pub empty: Vec<String>,
    /// Groups of which as many jobs run as may, and how many that is. They rest, if that is still
    /// so.
    pub full: Vec<(String, i64)>,
}

impl TurnChanges {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self { turns, rests, empty, full } = self;
        turns.is_empty() && rests.is_empty() && empty.is_empty() && full.is_empty()
    }
}

/// Seconds that a group rests of which as many jobs run as may. The end of one brings it back.
const FULL_REST_SECONDS: f64 = 5.0;

/// Stores what a claim has changed, and the turn of the queue. The queue must be locked.
pub async fn keep(
    conn: &mut PgConnection,
    (project_id, queue): (ProjectId, &str),
    changes: &TurnChanges,
    current: f64,
) -> sqlx::Result<()> {
    let TurnChanges { turns, rests, empty, full } = changes;
    sqlx::query!(
        "
        with clock as (
            insert into queue_turns (project_id, queue, turn)
            values ($1, $2, $3)
            on conflict (project_id, queue) do update set turn = excluded.turn
            where queue_turns.turn < excluded.turn
        ), crowd as materialized (
            select crowded.group_key
            from unnest($9::text[], $10::bigint[]) as crowded(group_key, max_running)
            join jobs on jobs.project_id = $1 and jobs.queue = $2 and jobs.state = 'processing'
                and jobs.group_key = crowded.group_key
            group by crowded.group_key
            having count(*) >= min(crowded.max_running)
        ), next as materialized (
            select sent.group_key, max(sent.turn) as turn, max(sent.rest_until) as rest_until,
                   bool_or(sent.is_empty) as is_empty
            from (
                select group_key, turn, null::timestamptz as rest_until, false as is_empty
                from unnest($4::text[], $5::float8[]) as moved(group_key, turn)
                union all
                select group_key, null, rest_until, false
                from unnest($6::text[], $7::timestamptz[]) as rested(group_key, rest_until)
                union all
                select group_key, null, statement_timestamp() + make_interval(secs => $11), true
                from unnest($8::text[]) as spent(group_key)
                union all
                select group_key, null, statement_timestamp() + make_interval(secs => $12), false
                from crowd
            ) sent
            group by sent.group_key
        )
        update group_turns
        set turn = coalesce(next.turn, group_turns.turn), rest_until = next.rest_until,
            empty_since = case when next.is_empty then statement_timestamp() end
        from next
        where group_turns.project_id = $1 and group_turns.queue = $2
            and group_turns.group_key = next.group_key
        ",
        project_id.0,
        queue,
        current,
        &turns.iter().map(|it| it.0.as_str()).collect::<Vec<_>>() as &[&str],
        &turns.iter().map(|it| it.1).collect::<Vec<_>>(),
        &rests.iter().map(|it| it.0.as_str()).collect::<Vec<_>>() as &[&str],
        &rests.iter().map(|it| it.1).collect::<Vec<_>>(),
        empty,
        &full.iter().map(|it| it.0.as_str()).collect::<Vec<_>>() as &[&str],
        &full.iter().map(|it| it.1).collect::<Vec<_>>(),
        FIRST_REST_SECONDS,
        FULL_REST_SECONDS,
    )
    .execute(conn)
    .await?;
    Ok(())
}
