//! Usage of all projects: bytes that are stored from hour to hour, reports, and old days.

use chrono::NaiveDate;
use futures_util::stream::BoxStream;
use sqlx::PgConnection;

use fencepost_domain::{
    ids::{ProjectId, ProjectPublicId},
    usage::Used,
};

/// Projects whose stored bytes one statement adds.
const MAX_ADDED_PROJECTS: i64 = 1_000;

/// Begins the present hour, unless it was begun. What is missing of an earlier one stays so: a
/// project pays for no hour that was not looked at.
pub async fn begin_hour(conn: &mut PgConnection) -> sqlx::Result<()> {
    let begun = sqlx::query!(
        "
        update usage_hour
        set hour = date_trunc('hour', now()), after_project = 0
        where hour < date_trunc('hour', now())
        ",
    );
    begun.execute(conn).await?;
    Ok(())
}

/// The project after which the bytes of this hour are added next, locked until the end of the
/// transaction; none: all are added, or another node is at it.
pub async fn next_projects(conn: &mut PgConnection) -> sqlx::Result<Option<ProjectId>> {
    sqlx::query_scalar!(
        r#"
        select after_project "after_project!: ProjectId"
        from usage_hour
        where after_project is not null
        for update skip locked
        "#,
    )
    .fetch_optional(conn)
    .await
}

/// Adds the stored bytes of the projects after this one to the day of the hour. Returns the last of
/// these projects; none: there are no more.
pub async fn add_byte_hours(
    conn: &mut PgConnection,
    after: ProjectId,
) -> sqlx::Result<Option<ProjectId>> {
    sqlx::query_scalar!(
        r#"
        with page as materialized (
            select project_id
            from (
                (
                    select project_id from stored_bytes
                    where project_id > $1
                    order by project_id
                    limit $2
                )
                union
                (
                    select distinct project_id from queue_counts
                    where project_id > $1
                    order by project_id
                    limit $2
                )
            ) storing
            order by project_id
            limit $2
        ), stored as (
            -- An outbox stores for its project.
            select coalesce(owner_project_id, page.project_id) project_id,
                   coalesce((
                       select sum(scheduled + active + dead_letter + succeeded + cancelled) * 1024
                       from queue_counts
                       where queue_counts.project_id = page.project_id
                   ), 0)
                   + coalesce((
                       select bytes from stored_bytes
                       where stored_bytes.project_id = page.project_id
                   ), 0) bytes
            from page
            join projects on projects.id = page.project_id
            where kind <> 'canary'
        ), added as (
            insert into usage_days (project_id, day, byte_hours)
            select project_id, (select (hour at time zone 'UTC')::date from usage_hour),
                   sum(bytes)::bigint
            from stored
            where bytes > 0
            group by project_id
            order by project_id
            on conflict (project_id, day) do update
            set byte_hours = usage_days.byte_hours + excluded.byte_hours
        )
        select max(project_id) "last: ProjectId" from page
        "#,
        after.0,
        MAX_ADDED_PROJECTS,
    )
    .fetch_one(conn)
    .await
}

/// Notes that the bytes of projects up to this one are added; none: of all.
pub async fn note_added(conn: &mut PgConnection, last: Option<ProjectId>) -> sqlx::Result<()> {
    sqlx::query!("update usage_hour set after_project = $1", last.map(|it| it.0))
        .execute(conn)
        .await?;
    Ok(())
}

/// Adds days that are older than this to their months, up to [`super::MAX_SWEEP_ROWS`] days of
/// projects, a number that the statement carries as a literal. Returns how many.
pub async fn fold_days(conn: &mut PgConnection, keep_days: i32) -> sqlx::Result<u64> {
    let folded = sqlx::query_scalar!(
        r#"
        with old as (
            delete from usage_days
            where (project_id, day) in (
                select project_id, day from usage_days
                where day < (now() at time zone 'UTC')::date - $1::integer
                order by day, project_id
                limit 500
                for update skip locked
            )
            returning *
        ), folded as (
            insert into usage_months (project_id, month, enqueued, claimed, succeeded,
                                      dead_lettered, requests, poll_ms, log_bytes, byte_hours)
            select project_id, date_trunc('month', day)::date, sum(enqueued)::bigint,
                   sum(claimed)::bigint, sum(succeeded)::bigint, sum(dead_lettered)::bigint,
                   sum(requests)::bigint, sum(poll_ms)::bigint, sum(log_bytes)::bigint,
                   sum(byte_hours)::bigint
            from old
            group by 1, 2
            order by 1, 2
            on conflict (project_id, month) do update
            set enqueued = usage_months.enqueued + excluded.enqueued,
                claimed = usage_months.claimed + excluded.claimed,
                succeeded = usage_months.succeeded + excluded.succeeded,
                dead_lettered = usage_months.dead_lettered + excluded.dead_lettered,
                requests = usage_months.requests + excluded.requests,
                poll_ms = usage_months.poll_ms + excluded.poll_ms,
                log_bytes = usage_months.log_bytes + excluded.log_bytes,
                byte_hours = usage_months.byte_hours + excluded.byte_hours
        )
        select count(*) "count!" from old
        "#,
        keep_days,
    );
    Ok(folded.fetch_one(conn).await?.unsigned_abs())
}

/// A row of a report.
#[derive(Debug)]
pub struct ReportedDay {
    pub public_id: ProjectPublicId,
    pub slug: String,
    pub plan: String,
    pub is_deleted: bool,
    /// None: what the days of the month no more show.
    pub day: Option<NaiveDate>,
    pub used: Used,
}

/// What all projects used in a month, on each day, and without a day what the days no more show:
/// those that are too old, and what was counted before days were. One statement: a day that becomes
/// a part of its month meanwhile must not count twice.
pub fn report(
    conn: &mut PgConnection,
    month: NaiveDate,
) -> BoxStream<'_, sqlx::Result<ReportedDay>> {
    let rows = sqlx::query!(
        r#"
        select public_id "public_id: ProjectPublicId", slug, plan,
               deleted_at is not null "is_deleted!", day "day?", enqueued "enqueued!",
               claimed "claimed!", succeeded "succeeded!", dead_lettered "dead_lettered!",
               requests "requests!", poll_ms "poll_ms!", log_bytes "log_bytes!",
               byte_hours "byte_hours!"
        from (
            select project_id, null::date as day, enqueued, claimed, succeeded, dead_lettered,
                   requests, poll_ms, log_bytes, byte_hours
            from usage_months
            where month = $1
            union all
            select project_id, day, enqueued, claimed, succeeded, dead_lettered, requests, poll_ms,
                   log_bytes, byte_hours
            from usage_days
            where day >= $1 and day < $1 + interval '1 month'
        ) used
        join projects on projects.id = used.project_id
        where kind = 'user'
        order by day nulls first, used.project_id
        "#,
        month,
    );
    let rows = rows.map(|row| ReportedDay {
        public_id: row.public_id,
        slug: row.slug,
        plan: row.plan,
        is_deleted: row.is_deleted,
        day: row.day,
        used: Used {
            enqueued: row.enqueued,
            claimed: row.claimed,
            succeeded: row.succeeded,
            dead_lettered: row.dead_lettered,
            requests: row.requests,
            poll_ms: row.poll_ms,
            log_bytes: row.log_bytes,
            byte_hours: row.byte_hours,
        },
    });
    rows.fetch(conn)
}
