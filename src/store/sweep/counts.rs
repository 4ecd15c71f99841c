//! Merging the deltas of queue counts.

use sqlx::{Executor, PgConnection};

use fencepost_domain::ids::ProjectId;

/// Rows that one pass merges at most. The statement carries the same number as a literal.
pub const MAX_COUNTED_ROWS: i64 = 20_000;

/// Queues with deltas that are not set aside, among the first [`MAX_COUNTED_ROWS`] deltas.
pub async fn find_queues_with_deltas(
    conn: &mut PgConnection,
) -> sqlx::Result<Vec<(ProjectId, String)>> {
    let rows = sqlx::query!(
        r#"
        select distinct project_id "project_id!: ProjectId", queue "queue!"
        from (
            select project_id, queue
            from unmerged_deltas
            where not exists (
                select from set_aside
                where project_id = unmerged_deltas.project_id and work = 'counts'
                    and item = unmerged_deltas.queue and next_try_at > now()
            )
            limit 20000
        ) first
        "#,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.project_id, it.queue)).collect())
}

/// Merges deltas, of these queues or of all that are not set aside. Returns how many. Rows that
/// another node is merging are skipped.
///
/// Whatever is older than every running transaction and than every delta that is left is merged for
/// good, which `merged_deltas` remembers. A delta that another node is merging counts as left.
pub async fn merge_counts(
    conn: &mut PgConnection,
    queues: Option<&[(ProjectId, String)]>,
) -> sqlx::Result<i64> {
    let projects = queues.map(|it| it.iter().map(|it| it.0.0).collect::<Vec<_>>());
    let names = queues.map(|it| it.iter().map(|it| it.1.as_str()).collect::<Vec<_>>());
    sqlx::query_scalar!(
        r#"
        with merged as materialized (
            select case when merged_before <= oldest_running then merged_before else 0 end as before,
                   oldest_running
            from merged_deltas
            cross join cast(
                pg_snapshot_xmin(pg_current_snapshot())::text as bigint
            ) as oldest_running
        ), found as materialized (
            select ctid as place
            from queue_deltas
            where made_by >= (select before from merged) and made_by < 9223372036854775807
                and ($1::int[] is null or (project_id, queue) in (
                    select * from unnest($1::int[], $2::text[])
                )) and not exists (
                    select from set_aside
                    where project_id = queue_deltas.project_id and work = 'counts'
                        and item = queue_deltas.queue and next_try_at > now()
                )
            limit 20000
            for update skip locked
        ), taken as (
            delete from queue_deltas
            using found
            where queue_deltas.ctid = found.place
            returning queue_deltas.*
        ), remembered as (
            update merged_deltas
            set merged_before = least(
                merged.oldest_running,
                (
                    select min(made_by)
                    from queue_deltas
                    where made_by >= (select before from merged)
                        and made_by < (select oldest_running from merged)
                        -- Not an anti join: planned for an empty table it might be a nested loop.
                        and ctid not in (select place from found)
                )
            )
            from merged
            where merged_deltas.merged_before <> merged.oldest_running
        ), counted as (
            insert into queue_counts (
                project_id, queue, scheduled, active, processing, backoff, dead_letter, succeeded,
                cancelled
            )
            select project_id, queue, sum(scheduled), sum(active), sum(processing), sum(backoff),
                   sum(dead_letter), sum(succeeded), sum(cancelled)
            from taken
            group by project_id, queue
            order by project_id, queue
            on conflict (project_id, queue) do update
            set scheduled = queue_counts.scheduled + excluded.scheduled,
                active = queue_counts.active + excluded.active,
                processing = queue_counts.processing + excluded.processing,
                backoff = queue_counts.backoff + excluded.backoff,
                dead_letter = queue_counts.dead_letter + excluded.dead_letter,
                succeeded = queue_counts.succeeded + excluded.succeeded,
                cancelled = queue_counts.cancelled + excluded.cancelled,
                updated_at = now()
        ), rated as (
            insert into queue_rates (project_id, queue, minute, enqueued, succeeded, failed)
            select project_id, queue, date_trunc('minute', at), sum(enqueued),
                   sum(greatest(succeeded, 0)), sum(failed)
            from taken
            where enqueued > 0 or succeeded > 0 or failed > 0
            group by project_id, queue, date_trunc('minute', at)
            order by project_id, queue, date_trunc('minute', at)
            on conflict (project_id, queue, minute) do update
            set enqueued = queue_rates.enqueued + excluded.enqueued,
                succeeded = queue_rates.succeeded + excluded.succeeded,
                failed = queue_rates.failed + excluded.failed
        )
        select count(*) "merged!" from taken
        "#,
        projects.as_deref(),
        names.as_deref() as Option<&[&str]>,
    )
    .fetch_one(conn)
    .await
}

/// The place of the walk over the queues, locked until the end of the transaction. None: another
/// node has it, or the walk has ended less than `pause_seconds` ago.
pub async fn lock_corrections(
    conn: &mut PgConnection,
    pause_seconds: f64,
) -> sqlx::Result<Option<(ProjectId, String)>> {
    let place = sqlx::query!(
        r#"
        select project_id "project_id: ProjectId", queue
        from count_corrections
        where ended_at < now() - make_interval(secs => $1)
        for update skip locked
        "#,
        pause_seconds,
    );
    Ok(place.fetch_optional(conn).await?.map(|it| (it.project_id, it.queue)))
}

/// Queues whose running jobs one step counts.
const MAX_CORRECTED_QUEUES: i64 = 200;

/// Counts the running jobs of up to `MAX_CORRECTED_QUEUES` queues after this one, and corrects
/// their counts: in one snapshot, without stopping anything. Moves the walk on. Returns true if
/// there were any, and the number of those that it has corrected. The place of the walk is locked:
/// two at the same time would correct twice.
pub async fn correct_processing(
    conn: &mut PgConnection,
    (project_id, queue): (ProjectId, &str),
) -> sqlx::Result<(bool, i64)> {
    let done = sqlx::query!(
        r#"
        with step as materialized (
            select project_id, queue, processing
            from queue_counts
            where (project_id, queue) > ($1, $2) and (active > 0 or processing <> 0)
            order by project_id, queue
            limit $3
        ), fresh as materialized (
            select project_id, queue, sum(processing) as processing
            from unmerged_deltas
            where (project_id, queue) in (select project_id, queue from step)
            group by project_id, queue
        ), wrong as materialized (
            select step.project_id, step.queue,
                   actual.jobs - step.processing - coalesce(fresh.processing, 0) as processing
            from step
            left join fresh on fresh.project_id = step.project_id and fresh.queue = step.queue
            cross join lateral (
                select count(*) as jobs
                from jobs
                where project_id = step.project_id and queue = step.queue
                    and state = 'processing'
            ) actual
        ), corrected as (
            -- Long ago, so that no current rate includes it.
            insert into queue_deltas (project_id, queue, at, processing)
            select project_id, queue, to_timestamp(0), processing
            from wrong
            where processing <> 0
            returning 1
        ), last as (
            select project_id, queue from step order by project_id desc, queue desc limit 1
        ), moved as (
            update count_corrections
            set project_id = coalesce((select project_id from last), 0),
                queue = coalesce((select queue from last), ''),
                ended_at = case
                    when exists (select from last) then ended_at else statement_timestamp()
                end
        )
        select exists (select from step) "is_more!",
               (select count(*) from corrected) "corrected!"
        "#,
        project_id.0,
        queue,
        MAX_CORRECTED_QUEUES,
    );
    let done = done.fetch_one(conn).await?;
    Ok((done.is_more, done.corrected))
}

/// Counts all jobs, and corrects the counts of queues that differ: in one snapshot, without
/// stopping anything. Returns how many queues it has corrected. Reads every job: for emergencies.
pub async fn recount(conn: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        with actual as (
            select project_id, queue,
                   count(*) filter (where state = 'scheduled') as scheduled,
                   count(*) filter (where state in ('pending', 'backoff', 'processing')) as active,
                   count(*) filter (where state = 'processing') as processing,
                   count(*) filter (where state = 'backoff') as backoff,
                   count(*) filter (where state = 'dead_letter') as dead_letter,
                   count(*) filter (where state = 'succeeded') as succeeded,
                   count(*) filter (where state = 'cancelled') as cancelled
            from (
                select project_id, queue, state from jobs
                union all
                select project_id, queue, state from finished_jobs
            ) all_jobs
            group by project_id, queue
        ), known as (
            select project_id, queue, sum(scheduled)::bigint as scheduled,
                   sum(active)::bigint as active, sum(processing)::bigint as processing,
                   sum(backoff)::bigint as backoff, sum(dead_letter)::bigint as dead_letter,
                   sum(succeeded)::bigint as succeeded, sum(cancelled)::bigint as cancelled
            from (
                select project_id, queue, scheduled, active, processing, backoff, dead_letter,
                       succeeded, cancelled
                from queue_counts
                union all
                select project_id, queue, scheduled, active, processing, backoff, dead_letter,
                       succeeded, cancelled
                from unmerged_deltas
            ) all_counts
            group by project_id, queue
        ), wrong as materialized (
            select project_id, queue,
                   coalesce(actual.scheduled, 0) - coalesce(known.scheduled, 0) as scheduled,
                   coalesce(actual.active, 0) - coalesce(known.active, 0) as active,
                   coalesce(actual.processing, 0) - coalesce(known.processing, 0) as processing,
                   coalesce(actual.backoff, 0) - coalesce(known.backoff, 0) as backoff,
                   coalesce(actual.dead_letter, 0) - coalesce(known.dead_letter, 0) as dead_letter,
                   coalesce(actual.succeeded, 0) - coalesce(known.succeeded, 0) as succeeded,
                   coalesce(actual.cancelled, 0) - coalesce(known.cancelled, 0) as cancelled
            from actual
            full join known using (project_id, queue)
        ), corrected as (
            -- Long ago, so that no current rate includes it.
            insert into queue_deltas (
                project_id, queue, at, scheduled, active, processing, backoff, dead_letter,
                succeeded, cancelled
            )
            select project_id, queue, to_timestamp(0), scheduled, active, processing, backoff,
                   dead_letter, succeeded, cancelled
            from wrong
            where (scheduled, active, processing, backoff, dead_letter, succeeded, cancelled)
                <> (0, 0, 0, 0, 0, 0, 0)
            returning 1
        )
        select count(*) "corrected!" from corrected
        "#,
    )
    .fetch_one(conn)
    .await
}

/// Blocks writes to the dead letters until the end of the transaction.
pub async fn lock_dead_letters(conn: &mut PgConnection) -> sqlx::Result<()> {
    const LOCK: &str = "lock table dead_letters, dead_letter_groups in share row exclusive mode";
    conn.execute(sqlx::raw_sql(LOCK)).await.map(|_| ())
}

/// Adds missing dead letters, each to the group of its type, and removes those that are not dead
/// letters. Returns how many rows it corrected.
pub async fn relist_dead_letters(conn: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        with stale as (
            delete from dead_letters
            where not exists (
                select
                from jobs
                where jobs.project_id = dead_letters.project_id and jobs.id = dead_letters.job_id
                    and jobs.completed_at is not null
            )
            returning 1
        ), missing as (
            insert into dead_letters (project_id, job_id, fingerprint, queue, job_type, died_at)
            select project_id, id, md5(job_type)::uuid, queue, job_type, completed_at
            from jobs
            where completed_at is not null
            on conflict (project_id, job_id) do nothing
            returning 1
        )
        select (select count(*) from stale) + (select count(*) from missing) "relisted!"
        "#,
    )
    .fetch_one(conn)
    .await
}

/// Counts the dead letters of all groups again. They must be locked.
pub async fn regroup_dead_letters(conn: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with counted as (
            select project_id, fingerprint, min(job_type) as job_type, count(*) as jobs,
                   (array_agg(job_id order by died_at))[1] as first, min(died_at) as first_seen_at,
                   max(died_at) as last_seen_at
            from dead_letters
            group by project_id, fingerprint
        ), emptied as (
            delete from dead_letter_groups
            where not exists (
                select
                from counted
                where counted.project_id = dead_letter_groups.project_id
                    and counted.fingerprint = dead_letter_groups.fingerprint
            )
        )
        insert into dead_letter_groups (
            project_id, fingerprint, job_type, sample_job_id, jobs, first_seen_at, last_seen_at
        )
        select project_id, fingerprint, job_type, first, jobs, first_seen_at, last_seen_at
        from counted
        on conflict (project_id, fingerprint) do update set jobs = excluded.jobs
        ",
    )
    .execute(conn)
    .await?;
    Ok(())
}
