//! What a project used, by day and by month. Statistics of hours are not kept for as long.

use chrono::NaiveDate;
use sqlx::PgConnection;

use fencepost_domain::{ids::ProjectId, usage::Used};

/// Adds what a node counted to the present day (UTC).
pub async fn add(conn: &mut PgConnection, counted: &[(ProjectId, Used)]) -> sqlx::Result<()> {
    let column = |of: fn(&Used) -> i64| counted.iter().map(|it| of(&it.1)).collect::<Vec<_>>();
    sqlx::query!(
        "
        insert into usage_days (project_id, day, enqueued, claimed, succeeded, dead_lettered,
                                requests, poll_ms, log_bytes)
        select project_id, (now() at time zone 'UTC')::date, sum(enqueued)::bigint,
               sum(claimed)::bigint, sum(succeeded)::bigint, sum(dead_lettered)::bigint,
               sum(requests)::bigint, sum(poll_ms)::bigint, sum(log_bytes)::bigint
        from unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[],
                    $6::bigint[], $7::bigint[], $8::bigint[])
            as sent(project_id, enqueued, claimed, succeeded, dead_lettered, requests, poll_ms,
                    log_bytes)
        group by project_id
        -- One order for all nodes, so that concurrent flushes cannot deadlock.
        order by project_id
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

/// The days of a month on which a project used something.
pub async fn days(
    conn: &mut PgConnection,
    project_id: ProjectId,
    month: NaiveDate,
) -> sqlx::Result<Vec<(NaiveDate, Used)>> {
    let rows = sqlx::query!(
        "
        select day, enqueued, claimed, succeeded, dead_lettered, requests, poll_ms, log_bytes,
               byte_hours
        from usage_days
        where project_id = $1 and day >= $2 and day < $2 + interval '1 month'
        order by day
        ",
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

/// What a project used in a month without its [`days`]: those that are kept no more, and what was
/// counted before days were.
pub async fn before_days(
    conn: &mut PgConnection,
    project_id: ProjectId,
    month: NaiveDate,
) -> sqlx::Result<Used> {
    let used = sqlx::query_as!(
        Used,
        "
        select enqueued, claimed, succeeded, dead_lettered, requests, poll_ms, log_bytes, byte_hours
        from usage_months
        where project_id = $1 and month = $2
        ",
        project_id.0,
        month,
    );
    Ok(used.fetch_optional(conn).await?.unwrap_or_default())
}
