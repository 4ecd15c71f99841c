//! Projects in which an alarm may find something. Alarms look at no others, so an idle project
//! costs nothing.

use std::collections::BTreeSet;

use sqlx::PgConnection;

use fencepost_domain::{
    alarm::{MISSED_MINUTES, Rule},
    ids::ProjectId,
};

/// Projects that one round of alarms looks at; the next round begins with those after them.
pub const MAX_ROUND_PROJECTS: i64 = 50_000;

/// Projects after this one, in the order of their ids, with an open incident or with what may begin
/// one: at most [`MAX_ROUND_PROJECTS`].
pub async fn find(conn: &mut PgConnection, after: ProjectId) -> sqlx::Result<Vec<ProjectId>> {
    let mut found: BTreeSet<_> = with_jobs(conn, after).await?.into_iter().collect();
    found.extend(in_trouble(conn, after).await?);
    let most = usize::try_from(MAX_ROUND_PROJECTS).unwrap_or(usize::MAX);
    Ok(found.into_iter().take(most).collect())
}

/// Projects with ready or running jobs, with jobs that wait for their groups, with dead letters of
/// groups, or with kept jobs that were lost again at any time. Reads an entry of each.
async fn with_jobs(conn: &mut PgConnection, after: ProjectId) -> sqlx::Result<Vec<ProjectId>> {
    sqlx::query_scalar!(
        r#"
        with recursive ready(project_id) as (
            (
                select project_id from jobs
                where state = 'pending' and constraint_key is null and project_id > $1
                order by project_id limit 1
            )
            union all
            select (
                select project_id from jobs
                where state = 'pending' and constraint_key is null
                    and project_id > ready.project_id
                order by project_id limit 1
            )
            from ready
            where ready.project_id is not null
        ), constrained(project_id) as (
            (
                select project_id from jobs
                where state = 'pending' and constraint_key is not null and project_id > $1
                order by project_id limit 1
            )
            union all
            select (
                select project_id from jobs
                where state = 'pending' and constraint_key is not null
                    and project_id > constrained.project_id
                order by project_id limit 1
            )
            from constrained
            where constrained.project_id is not null
        ), running(project_id) as (
            (
                select project_id from jobs
                where state = 'processing' and project_id > $1
                order by project_id limit 1
            )
            union all
            select (
                select project_id from jobs
                where state = 'processing' and project_id > running.project_id
                order by project_id limit 1
            )
            from running
            where running.project_id is not null
        ), blocked(project_id) as (
            (
                select project_id from jobs
                where group_place is not null and completed_at is not null and project_id > $1
                order by project_id limit 1
            )
            union all
            select (
                select project_id from jobs
                where group_place is not null and completed_at is not null
                    and project_id > blocked.project_id
                order by project_id limit 1
            )
            from blocked
            where blocked.project_id is not null
        ), waiting(project_id) as (
            (
                select project_id from jobs
                where waits_for_group and project_id > $1
                order by project_id limit 1
            )
            union all
            select (
                select project_id from jobs
                where waits_for_group and project_id > waiting.project_id
                order by project_id limit 1
            )
            from waiting
            where waiting.project_id is not null
        ), lost(project_id) as (
            (
                select project_id from job_bodies
                where lost_again_at is not null and project_id > $1
                order by project_id limit 1
            )
            union all
            select (
                select project_id from job_bodies
                where lost_again_at is not null and project_id > lost.project_id
                order by project_id limit 1
            )
            from lost
            where lost.project_id is not null
        )
        (select project_id "project_id!: ProjectId" from ready where project_id is not null limit $2)
        union
        (select project_id from constrained where project_id is not null limit $2)
        union
        (select project_id from running where project_id is not null limit $2)
        union
        (select project_id from blocked where project_id is not null limit $2)
        union
        (select project_id from waiting where project_id is not null limit $2)
        union
        (select project_id from lost where project_id is not null limit $2)
        order by 1
        limit $2
        "#,
        after.0,
        MAX_ROUND_PROJECTS,
    )
    .fetch_all(conn)
    .await
}

/// Projects with open incidents, new dead letters, paused types, missed ticks, endpoints and pushes
/// that fail, or keys that expire. Reads the rows of these alone.
async fn in_trouble(conn: &mut PgConnection, after: ProjectId) -> sqlx::Result<Vec<ProjectId>> {
    let longest_period = Rule::DeadLetters.periods().map_or(0, |(_, greatest)| greatest);
    sqlx::query_scalar!(
        r#"
        (
            select distinct project_id "project_id!: ProjectId" from incidents
            where project_id > $1 and resolved_at is null
            order by project_id limit $2
        )
        union
        (
            select distinct project_id from (
                select project_id from dead_letter_groups
                where last_seen_at > now() - make_interval(secs => $3)
                -- By its time: else an index of projects seems as good, and leads through all.
                offset 0
            ) lately
            where project_id > $1
            order by project_id limit $2
        )
        union
        (
            select distinct project_id from queue_types
            where project_id > $1 and paused_by = 'brake'
            order by project_id limit $2
        )
        union
        (
            select distinct project_id from (
                select project_id from schedule_fires
                where outcome = 'missed' and at > now() - make_interval(mins => $4)
                offset 0
            ) lately
            where project_id > $1
            order by project_id limit $2
        )
        union
        (
            select distinct project_id from webhook_endpoints
            where project_id > $1 and deleted_at is null
                and (disabled_reason in ('failing', 'gone') or dropped_at is not null)
                and (
                    disabled_reason in ('failing', 'gone')
                    or dropped_at > now() - interval '1 minute'
                )
            order by project_id limit $2
        )
        union
        (
            select distinct project_id from queue_pushes
            where project_id > $1 and failing_since is not null and paused_at is null
            order by project_id limit $2
        )
        union
        (
            select distinct project_id from (
                select project_id from api_keys
                where revoked_at is null and not is_exchanged
                    and expires_at > now() and expires_at <= now() + (
                        select make_interval(days => max(threshold))
                        from default_alarms where rule = 'key_expiring'
                    )
                offset 0
            ) soon
            where project_id > $1
            order by project_id limit $2
        )
        union
        (
            select distinct own.project_id
            from (
                select project_id, threshold from alarms
                where project_id > $1 and rule = 'key_expiring' and is_enabled
                offset 0
            ) own
            cross join lateral (
                select expires_at from api_keys
                where project_id = own.project_id and revoked_at is null and not is_exchanged
                offset 0
            ) key
            where key.expires_at > now()
                and key.expires_at <= now() + make_interval(days => own.threshold)
            order by own.project_id limit $2
        )
        order by 1
        limit $2
        "#,
        after.0,
        MAX_ROUND_PROJECTS,
        f64::from(longest_period),
        MISSED_MINUTES,
    )
    .fetch_all(conn)
    .await
}
