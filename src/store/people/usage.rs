//! What a project used, by day and by month. Statistics of hours are not kept for as long.

use chrono::NaiveDate;
use sqlx::PgConnection;

use fencepost_domain::{ids::ProjectId, usage::Used};

/// Adds what a node counted to the present day (UTC). Deliveries and the canary's jobs are jobs of
/// projects that no customer has.
pub async fn add(conn: &mut PgConnection, counted: &[(ProjectId, Used)]) -> sqlx::Result<()> {
    let column = |of: fn(&Used) -> i64| counted.iter().map(|it| of(&it.1)).collect::<Vec<_>>();
    sqlx::query!(
        "
        insert into usage_days (project_id, day, enqueued, claimed, succeeded, dead_lettered,
                                requests, poll_ms, log_bytes)
        select sent.project_id, (now() at time zone 'UTC')::date, sum(enqueued)::bigint,
               sum(claimed)::bigint, sum(succeeded)::bigint, sum(dead_lettered)::bigint,
               sum(requests)::bigint, sum(poll_ms)::bigint, sum(log_bytes)::bigint
        from unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[],
                    $6::bigint[], $7::bigint[], $8::bigint[])
            as sent(project_id, enqueued, claimed, succeeded, dead_lettered, requests, poll_ms,
                    log_bytes)
        join projects on projects.id = sent.project_id
        where kind = 'user'
        group by sent.project_id
        -- One order for all nodes, so that concurrent flushes cannot deadlock.
        order by sent.project_id
        on conflict (project_id, day) do update
        set enqueued = usage_days.enqueued + excluded.enqueued,
            claimed = usage_days.claimed + excluded.claimed,
            succeeded = usage_days.succeeded + excluded.succeeded,
            dead_lettered = usage_days.dead_lettered + excluded.dead_lettered,
            requests = usage_days.requests + excluded.requests,
            poll_ms = usage_days.poll_ms + excluded.poll_ms,
            log_bytes = usage_days.log_bytes + excluded.log_bytes
        ",
        &counted.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &column(|it| it.enqueued),
        &column(|it| it.claimed),
        &column(|it| it.succeeded),
        &column(|it| it.dead_lettered),
        &column(|it| it.requests),
        &column(|it| it.poll_ms),
        &column(|it| it.log_bytes),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The first day of the present month (UTC).
pub async fn present_month(conn: &mut PgConnection) -> sqlx::Result<NaiveDate> {
    sqlx::query_scalar!(r#"select date_trunc('month', now() at time zone 'UTC')::date "month!""#)
        .fetch_one(conn)
        .await
}

/// What a project used in a month: on each of its days, and without a day what its days no more
/// show, as they are too old, or were not counted yet.
pub async fn days(
    conn: &mut PgConnection,
    project_id: ProjectId,
    month: NaiveDate,
) -> sqlx::Result<Vec<(Option<NaiveDate>, Used)>> {
    let rows = sqlx::query!(
        r#"
        select day "day?", enqueued "enqueued!", claimed "claimed!", succeeded "succeeded!",
               dead_lettered "dead_lettered!", requests "requests!", poll_ms "poll_ms!",
               log_bytes "log_bytes!", byte_hours "byte_hours!"
        from (
            select null::date as day, enqueued, claimed, succeeded, dead_lettered, requests,
                   poll_ms, log_bytes, byte_hours
            from usage_months
            where project_id = $1 and month = $2
            union all
            select day, enqueued, claimed, succeeded, dead_lettered, requests, poll_ms, log_bytes,
                   byte_hours
            from usage_days
            where project_id = $1 and day >= $2 and day < $2 + interval '1 month'
        ) used
        order by day
        "#,
        project_id.0,
        month,
    );
    let rows = rows.fetch_all(conn).await?.into_iter().map(|row| {
        let used = Used {
            enqueued: row.enqueued,
            claimed: row.claimed,
            succeeded: row.succeeded,
            dead_lettered: row.dead_lettered,
            requests: row.requests,
            poll_ms: row.poll_ms,
            log_bytes: row.log_bytes,
            byte_hours: row.byte_hours,
        };
        (row.day, used)
    });
    Ok(rows.collect())
}
