//! What the alarm about lost jobs finds.

use fencepost_domain::{
    alarm::{LOST_MINUTES, LosingWorker, MAX_LOSING_WORKERS, MAX_LOST_JOBS},
    ids::ProjectId,
};
use sqlx::PgConnection;
use uuid::Uuid;

use super::Found;

/// Jobs that were lost again in the last [`LOST_MINUTES`], live or dead-lettered: of each type in
/// each queue the one that was lost most, and at most 100 of them for an alarm. The last
/// [`MAX_LOST_JOBS`] of a project are looked at.
pub async fn jobs_lost(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<Found>> {
    sqlx::query_as!(
        Found,
        r#"
        select alarm.project_id "project_id!: ProjectId", alarm.name "alarm!",
               alarm.rule "rule!", alarm.mail_to "mail_to!", lost.queue || '/' || lost.job_type as subject,
               null::uuid as subject_id, true "is_beyond!", 0 "for_seconds!", lost.queue "queue?",
               lost.job_type "job_type?", null as error_type, lost.job_id "job_id?", null as name,
               lost.in_row::bigint as value, false "shares_cause!", null::timestamptz as return_by
        from effective_alarms alarm
        cross join lateral (
            select distinct on (job.queue, job.job_type) job.queue, job.job_type, newest.job_id,
                   newest.losses_in_row as in_row
            from (
                select job_id, losses_in_row
                from job_bodies
                where project_id = alarm.project_id
                    and lost_again_at > now() - make_interval(mins => $2)
                order by lost_again_at desc
                limit $3
            ) newest
            cross join lateral (
                select queue, job_type
                from jobs
                where project_id = alarm.project_id and id = newest.job_id
                -- Row by row, by its key.
                offset 0
            ) job
            where newest.losses_in_row >= alarm.threshold
                and (alarm.queues = '{}' or job.queue = any(alarm.queues))
            order by job.queue, job.job_type, newest.losses_in_row desc, newest.job_id
            limit 100
        ) lost
        where alarm.project_id = any($1) and alarm.rule = 'jobs_lost' and alarm.is_enabled
        "#,
        projects,
        LOST_MINUTES,
        MAX_LOST_JOBS,
    )
    .fetch_all(conn)
    .await
}

/// Workers that have lost these jobs of a project: of each the last [`MAX_LOSING_WORKERS`], the
/// last first, among its last 100 losses.
pub async fn losing_workers(
    conn: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[Uuid],
) -> sqlx::Result<Vec<(Uuid, LosingWorker)>> {
    let rows = sqlx::query!(
        r#"
        select sought.id "job_id!", past.worker_id "worker_id!", known.hostname "hostname?",
               known.last_seen_at "last_seen_at?"
        from unnest($2::uuid[]) as sought(id)
        cross join lateral (
            select worker_id, max(attempt) as attempt
            from (
                select worker_id, attempt
                from attempts
                where project_id = $1 and job_id = sought.id
                    and error_kind in ('lease_expired', 'worker_gone')
                order by attempt desc
                limit 100
            ) newest
            group by worker_id
            order by attempt desc
            limit $3
        ) past
        left join workers known on known.project_id = $1 and known.worker_id = past.worker_id
        order by sought.id, past.attempt desc
        "#,
        project_id.0,
        jobs,
        MAX_LOSING_WORKERS,
    )
    .fetch_all(conn)
    .await?;
    let worker = rows.into_iter().map(|row| {
        let (worker_id, hostname, last_seen_at) = (row.worker_id, row.hostname, row.last_seen_at);
        (row.job_id, LosingWorker { worker_id, hostname, last_seen_at })
    });
    Ok(worker.collect())
}
