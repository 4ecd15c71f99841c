//! Ends of pauses.

use fencepost_domain::ids::ProjectId;
use sqlx::PgConnection;

/// Queues whose rate limit has ended, or some of whose groups have a pause that has ended.
pub async fn find_ended(conn: &mut PgConnection) -> sqlx::Result<Vec<(ProjectId, String)>> {
    let rows = sqlx::query!(
        r#"
        select project_id "project_id!: ProjectId", queue "queue!"
        from (
            (
                select project_id, queue
                from job_groups
                where paused_until <= statement_timestamp() and paused_until < 'infinity'
                order by paused_until
                limit 500
            )
            union
            (
                select project_id, name
                from queues
                where rate_limited_until <= statement_timestamp()
                order by rate_limited_until
                limit 500
            )
        ) due
        order by 1, 2
        "#,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.project_id, it.queue)).collect())
}

/// Ends pauses in these queues that have lasted long enough, up to 500.
pub async fn end_pauses(
    conn: &mut PgConnection,
    queues: &[(ProjectId, String)],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with due as materialized (
            select ended.project_id, ended.queue, ended.group_key
            from unnest($1::int[], $2::text[]) as named(project_id, queue)
            cross join lateral (
                select project_id, queue, group_key
                from job_groups
                where project_id = named.project_id and queue = named.queue
                    and paused_until <= statement_timestamp() and paused_until < 'infinity'
                limit 500
            ) ended
            limit 500
        ), ended as (
            delete from job_groups
            using due
            where job_groups.project_id = due.project_id and job_groups.queue = due.queue
                and job_groups.group_key = due.group_key
                and job_groups.paused_until <= statement_timestamp()
        )
        insert into group_notes (project_id, queue, group_key)
        select project_id, queue, group_key from due
        ",
        &queues.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &queues.iter().map(|it| it.1.as_str()).collect::<Vec<_>>() as &[&str],
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Locks the settings of queues until the end of the transaction, so that no group is paused, and
/// returns which. Those that another transaction has locked are skipped.
pub async fn lock_queues(
    conn: &mut PgConnection,
    queues: &[(ProjectId, String)],
) -> sqlx::Result<Vec<(ProjectId, String)>> {
    let rows = sqlx::query!(
        r#"
        select setting.project_id "project_id: ProjectId", setting.name
        from unnest($1::int[], $2::text[]) as named(project_id, queue)
        join queues setting
            on setting.project_id = named.project_id and setting.name = named.queue
        order by setting.project_id, setting.name
        for no key update of setting skip locked
        "#,
        &queues.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &queues.iter().map(|it| it.1.as_str()).collect::<Vec<_>>() as &[&str],
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.project_id, it.name)).collect())
}

/// Ends the rate limits of queues that have lasted long enough, and lets ordinary claims find the
/// jobs of those that have neither rules of groups, nor a pause of their own or of a group any
/// more. An earlier statement of this transaction must have locked them, so that this one sees all
/// pauses.
pub async fn open_gates(
    conn: &mut PgConnection,
    queues: &[(ProjectId, String)],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update queues
        set rate_limited_until = case
                when queues.rate_limited_until > statement_timestamp()
                then queues.rate_limited_until
            end,
            has_gate = queues.group_order <> 'none' or queues.group_max_running is not null
                or queues.group_rate_counts is not null or queues.group_fair
                or queues.shared_limits is not null
                or (queues.rate_limited_until > statement_timestamp()) is true
                or exists (
                    select from job_groups
                    where project_id = named.project_id and queue = named.queue
                )
        from unnest($1::int[], $2::text[]) as named(project_id, queue)
        where queues.project_id = named.project_id and queues.name = named.queue
        ",
        &queues.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &queues.iter().map(|it| it.1.as_str()).collect::<Vec<_>>() as &[&str],
    )
    .execute(conn)
    .await?;
    Ok(())
}
