//! Turns of groups, in queues in which they take turns. Claims change them under the lock of their
//! queue.

use chrono::{DateTime, Utc};
use fencepost_domain::ids::ProjectId;
use sqlx::PgConnection;

/// Seconds that a group without a job rests at first. Each further rest is seven times as long as
/// it has had none: an enqueue that was under way when it began to rest has not noted the group.
pub const FIRST_REST_SECONDS: f64 = 0.1;
/// Seconds without a job after which a group is forgotten: no statement takes as long.
pub const FORGOTTEN_AFTER_SECONDS: f64 = 60.0;

/// What a claim changes of the groups of a queue.
#[derive(Debug, Clone, Default)]
pub struct TurnChanges {
    /// Next turns of groups of which jobs have started.
    pub turns: Vec<(String, f64)>,
    /// Groups that let nothing start before these times.
    pub rests: Vec<(String, DateTime<Utc>)>,
    /// Groups without a job.
    pub empty: Vec<String>,
}

impl TurnChanges {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self { turns, rests, empty } = self;
        turns.is_empty() && rests.is_empty() && empty.is_empty()
    }
}

/// Stores what a claim has changed. The queue must be locked, and the rows of the groups that rest.
pub async fn keep(
    conn: &mut PgConnection,
    (project_id, queue): (ProjectId, &str),
    changes: &TurnChanges,
) -> sqlx::Result<()> {
    let TurnChanges { turns, rests, empty } = changes;
    sqlx::query!(
        "
        with next as materialized (
            -- With the whole key, so that each row is read by it.
            select $1::int as project_id, $2::text as queue, sent.group_key, max(sent.turn) as turn, max(sent.rest_until) as rest_until,
                   bool_or(sent.is_empty) as is_empty
            from (
                select group_key, turn, null::timestamptz as rest_until, false as is_empty
                from unnest($3::text[], $4::float8[]) as moved(group_key, turn)
                union all
                select group_key, null, rest_until, false
                from unnest($5::text[], $6::timestamptz[]) as rested(group_key, rest_until)
                union all
                select group_key, null, statement_timestamp() + make_interval(secs => $8), true
                from unnest($7::text[]) as spent(group_key)
                -- One that was stored meanwhile found the group in line, and has not noted it.
                where not has_turn_jobs($1, $2, group_key)
            ) sent
            group by sent.group_key
        )
        update group_turns
        set turn = coalesce(next.turn, group_turns.turn),
            is_new = group_turns.is_new and next.turn is null, rest_until = next.rest_until,
            empty_since = case when next.is_empty then statement_timestamp() end
        from next
        where group_turns.project_id = next.project_id and group_turns.queue = next.queue
            and group_turns.group_key = next.group_key
        ",
        project_id.0,
        queue,
        &turns.iter().map(|it| it.0.as_str()).collect::<Vec<_>>() as &[&str],
        &turns.iter().map(|it| it.1).collect::<Vec<_>>(),
        &rests.iter().map(|it| it.0.as_str()).collect::<Vec<_>>() as &[&str],
        &rests.iter().map(|it| it.1).collect::<Vec<_>>(),
        empty,
        FIRST_REST_SECONDS,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// What is before a job whose group takes turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    /// Jobs of its group.
    pub jobs: i64,
    /// Groups whose turn comes before that of its group, as far as a claim would look.
    pub groups: i64,
}

/// What is before a job at this position in its group, each counted up to `limit`.
pub async fn ahead(
    conn: &mut PgConnection,
    (project_id, queue, group): (ProjectId, &str, Option<&str>),
    (rank, run_at): (i16, DateTime<Utc>),
    limit: i64,
) -> sqlx::Result<Ahead> {
    sqlx::query_as!(
        Ahead,
        r#"
        with least as materialized (
            -- A group that has come into line begins there.
            select coalesce((
                select turn
                from (
                    select turn, is_new
                    from group_turns
                    where project_id = $1 and queue = $2 and rest_until is null
                    order by turn, group_key
                    limit 2 * $6::bigint
                ) first
                where not is_new
                order by turn
                limit 1
            ), '-infinity') as turn
        ), own as materialized (
            select group_key, group_turns.turn,
                   case when is_new then greatest(group_turns.turn, least.turn)
                       else group_turns.turn
                   end as begins
            from group_turns
            cross join least
            where project_id = $1 and queue = $2 and group_key = coalesce($3, '')
        )
        select (
            select count(*)
            from (
                select from jobs
                where project_id = $1 and queue = $2
                    and coalesce(group_key, '') = coalesce($3, '') and takes_turns
                    and state = 'pending' and constraint_key is null
                    and (rank, run_at) < ($4::smallint, $5)
                limit $6
            ) before
        ) "jobs!", (
            select count(*)
            from (
                select
                from own
                cross join lateral (
                    select turn, is_new, group_key
                    from group_turns
                    where project_id = $1 and queue = $2 and rest_until is null
                        and turn <= own.begins
                    order by turn, group_key
                    limit 2 * $6::bigint
                ) other
                cross join least
                where other.group_key <> own.group_key and (
                    case when other.is_new then greatest(other.turn, least.turn) else other.turn end,
                    other.turn, other.group_key
                ) < (own.begins, own.turn, own.group_key)
                limit $6
            ) others
        ) "groups!"
        "#,
        project_id.0,
        queue,
        group,
        rank,
        run_at,
        limit,
    )
    .fetch_one(conn)
    .await
}
