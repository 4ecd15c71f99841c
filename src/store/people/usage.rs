//! What a project used in a month. Statistics of hours are not kept for as long.

use chrono::NaiveDate;
use sqlx::PgConnection;

use fencepost_domain::{ids::ProjectId, stats::Counted};

/// Counts of a month.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MonthRow {
    pub enqueued: i64,
    /// Attempts that began.
    pub claimed: i64,
    pub succeeded: i64,
    pub dead_lettered: i64,
}

/// Adds a node's counters to the present month (UTC).
pub async fn add(conn: &mut PgConnection, counted: &[Counted]) -> sqlx::Result<()> {
    let column = |of: fn(&Counted) -> i64| counted.iter().map(of).collect::<Vec<_>>();
    sqlx::query!(
        "
        insert into usage_months (project_id, month, enqueued, claimed, succeeded, dead_lettered)
        select project_id, date_trunc('month', now() at time zone 'UTC')::date, sum(enqueued)::bigint,
               sum(claimed)::bigint, sum(succeeded)::bigint, sum(dead_lettered)::bigint
        from unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[])
            as sent(project_id, enqueued, claimed, succeeded, dead_lettered)
        group by project_id
        -- One order for all nodes, so that concurrent flushes cannot deadlock.
        order by project_id
        on conflict (project_id, month) do update
        set enqueued = usage_months.enqueued + excluded.enqueued,
            claimed = usage_months.claimed + excluded.claimed,
            succeeded = usage_months.succeeded + excluded.succeeded,
            dead_lettered = usage_months.dead_lettered + excluded.dead_lettered
        ",
        &counted.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &column(|it| it.counts.enqueued),
        &column(|it| it.counts.claimed),
        &column(|it| it.counts.succeeded),
        &column(|it| it.counts.dead_lettered),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// A project's month, named by its first day; none: the present one. Returns that day, too.
pub async fn month(
    conn: &mut PgConnection,
    project_id: ProjectId,
    month: Option<NaiveDate>,
) -> sqlx::Result<(NaiveDate, MonthRow)> {
    let row = sqlx::query!(
        r#"
        select asked.month "month!", coalesce(used.enqueued, 0) "enqueued!",
               coalesce(used.claimed, 0) "claimed!", coalesce(used.succeeded, 0) "succeeded!",
               coalesce(used.dead_lettered, 0) "dead_lettered!"
        from coalesce($2, date_trunc('month', now() at time zone 'UTC')::date) as asked(month)
        left join usage_months used on used.project_id = $1 and used.month = asked.month
        "#,
        project_id.0,
        month,
    )
    .fetch_one(conn)
    .await?;
    let used = MonthRow {
        enqueued: row.enqueued,
        claimed: row.claimed,
        succeeded: row.succeeded,
        dead_lettered: row.dead_lettered,
    };
    Ok((row.month, used))
}
