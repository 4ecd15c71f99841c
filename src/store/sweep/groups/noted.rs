//! Notes: which groups admission looks at next.

use fencepost_domain::ids::ProjectId;
use sqlx::PgConnection;

use crate::groups::GroupKey;

/// Notes of which the groups of a pass are chosen. The statement carries the same number as a
/// literal.
pub const MAX_SEEN_NOTES: i64 = 20_000;
/// Groups of a pass: each is a lock, and PostgreSQL has few thousand for everybody.
pub const MAX_PASS_GROUPS: i64 = 200;

/// A group with notes.
#[derive(Debug, Clone)]
pub struct NotedGroup {
    pub key: GroupKey,
    /// The transactions that wrote its first and its last note, of those that were seen.
    pub noted_by: (i64, i64),
}

/// What there is to do.
#[derive(Debug, Clone, Default)]
pub struct Noted {
    pub groups: Vec<NotedGroup>,
    /// Groups whose notes were about nothing to decide, and are gone.
    pub forgotten: usize,
    /// No transaction before this one has left a note.
    pub all_since: i64,
    /// Milliseconds until the next pause ends, negative if it has; none: none ends by itself.
    pub next_end_ms: Option<f64>,
    /// Whether the groups of a queue must be noted.
    pub has_walk: bool,
}

impl Noted {
    /// Whether there may be more groups.
    #[must_use]
    pub fn is_full(&self) -> bool {
        (self.groups.len() + self.forgotten) as i64 == MAX_PASS_GROUPS
    }
}

/// Groups with notes, of projects in turn, and what else is due. Notes of transactions before
/// `since` are gone, so dead rows of them are not read.
///
/// Most ends leave nothing to decide: no job waits, and at most one is open that its group let run
/// or that runs; in a queue that limits how many run, all open ones run. The notes of such a group
/// are deleted here. Later ones are about what this statement does not see.
pub async fn find_and_forget(conn: &mut PgConnection, since: i64) -> sqlx::Result<Noted> {
    let rows = sqlx::query!(
        r#"
        with clock as materialized (
            select pg_snapshot_xmin(pg_current_snapshot())::text::bigint as oldest
        ), first as materialized (
            select project_id, queue, group_key, made_by, exists (
                       select from set_aside
                       where project_id = group_notes.project_id and work = 'groups'
                           and item = queue || '/' || group_key and next_try_at > now()
                   ) as is_aside
            from group_notes
            where made_by >= (select case when $1 <= oldest then $1 else 0 end from clock)
            limit 20000
        ), noted as materialized (
            select *
            from (
                select project_id, queue, group_key, min(made_by) as first_by,
                       max(made_by) as last_by, exists (
                           select from queues
                           where project_id = first.project_id and name = first.queue
                               and group_order <> 'strict' and not group_fair
                               and (group_max_running is not null or group_rate_counts is not null)
                       ) as is_limited, takes_turns(project_id, queue) as has_turns,
                       row_number() over (partition by project_id order by min(made_by)) as turn
                from first
                where not is_aside
                group by project_id, queue, group_key
            ) named
            order by turn, first_by
            limit $2
        ), idle as materialized (
            select project_id, queue, group_key, first_by, last_by
            from noted
            where not exists (
                select
                from jobs
                where project_id = noted.project_id and queue = noted.queue
                    and group_key = noted.group_key and waits_for_group
            ) and not exists (
                select
                from (
                    select waits_for_group, lease_id
                    from jobs
                    where project_id = noted.project_id and queue = noted.queue
                        and group_key = noted.group_key and group_key is not null
                        and waits_for_group is not true and completed_at is null
                    limit 2
                ) open
                having not noted.is_limited and not noted.has_turns and count(*) > 1
                    or bool_or(waits_for_group is null and lease_id is null)
            ) and not (noted.is_limited and exists (
                select from jobs
                where project_id = noted.project_id and queue = noted.queue
                    and group_key = noted.group_key and waits_for_group is false
                    and state = 'pending'
            )) and not (noted.is_limited and exists (
                -- After a change jobs may be open beyond the limit, behind those that run.
                select from queues
                where project_id = noted.project_id and name = noted.queue and group_walks > 0
            )) and not is_group_paused(project_id, queue, group_key)
                and not (noted.has_turns and has_turn_jobs(project_id, queue, group_key))
                -- The end of a job may let one of the same group start in another queue.
                and not (noted.has_turns and exists (
                    select from queues_sharing_groups(project_id, queue)
                ))
        ), spent as materialized (
            select *
            from idle
            where pg_try_advisory_xact_lock(group_lock(project_id, queue, group_key))
        ), forgotten as (
            delete from group_notes
            using spent
            where group_notes.made_by >= (select min(first_by) from spent)
                and group_notes.made_by <= (select max(last_by) from spent)
                and group_notes.project_id = spent.project_id
                and group_notes.queue = spent.queue and group_notes.group_key = spent.group_key
        ), next as (
            select *
            from noted
            where not exists (
                select from spent
                where project_id = noted.project_id and queue = noted.queue
                    and group_key = noted.group_key
            )
        )
        select clock.oldest "oldest!", seen.notes "notes!", seen.first_by,
               (select count(*) from spent) "forgotten!",
               (extract(epoch from least((
                   select paused_until
                   from job_groups
                   where paused_until < 'infinity'
                   order by paused_until
                   limit 1
               ), (
                   select rate_limited_until
                   from queues
                   where rate_limited_until is not null
                   order by rate_limited_until
                   limit 1
               ), (
                   select look_at from group_handouts order by look_at limit 1
               ), (
                   select rest_until
                   from group_turns
                   where rest_until is not null
                   order by rest_until
                   limit 1
               ), (
                   select expires_at
                   from group_overrides
                   where expires_at is not null
                   order by expires_at
                   limit 1
               )) - now()) * 1000)::float8 as next_end_ms,
               exists (select from queues where group_walk_at <= now()) "has_walk!",
               next.project_id "project_id?: ProjectId", next.queue "queue?",
               next.group_key "group?", next.first_by "noted_first?", next.last_by "noted_last?"
        from clock
        cross join (select count(*) as notes, min(made_by) as first_by from first) seen
        left join next on true
        order by next.turn, next.first_by
        "#,
        since,
        MAX_PASS_GROUPS,
    )
    .fetch_all(conn)
    .await?;
    let all_since = rows.first().map_or(0, |it| match it.first_by {
        // Notes are not read in their order.
        _ if it.notes >= MAX_SEEN_NOTES => since,
        first_by => first_by.unwrap_or(it.oldest).min(it.oldest),
    });
    let next_end_ms = rows.first().and_then(|it| it.next_end_ms);
    let has_walk = rows.first().is_some_and(|it| it.has_walk);
    let forgotten = rows.first().map_or(0, |it| usize::try_from(it.forgotten).unwrap_or(0));
    let groups = rows.into_iter().filter_map(|row| {
        let key = GroupKey { project_id: row.project_id?, queue: row.queue?, group: row.group? };
        Some(NotedGroup { key, noted_by: (row.noted_first?, row.noted_last?) })
    });
    Ok(Noted { groups: groups.collect(), forgotten, all_since, next_end_ms, has_walk })
}
