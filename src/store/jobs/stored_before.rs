//! Jobs that were stored before: by a commit whose answer was lost, or under the same id.

use fencepost_domain::{
    ids::{JobId, ProjectId},
    job::StoredState,
};
use sqlx::PgConnection;

use super::enqueue::{NewJob, StoredJob};

/// Which of these jobs are stored, live or ended: for a group commit whose result is in doubt. An
/// ended job has the times that it was stored with.
pub async fn find_stored(
    conn: &mut PgConnection,
    jobs: &[&NewJob],
) -> sqlx::Result<Vec<StoredJob>> {
    sqlx::query_as!(
        StoredJob,
        r#"
        select sent.id "id!: JobId",
               coalesce(live.state, ended.state) "state!: StoredState",
               coalesce(live.run_at, ended.run_at) "run_at!",
               live.waits_for_group is true "waits_for_group!", false "has_noted_turn!",
               coalesce(live.unfinished_parents - other_holds(live.waits_for_group, live.paused_at),
                        0) "unfinished_parents!",
               coalesce(live.created_at, ended.created_at) "created_at!",
               coalesce(live.attempt, ended.attempt) "attempt!",
               coalesce(live.max_attempts, ended.max_attempts) "max_attempts!", body.retry "retry?",
               setting.paused_at is not null "is_queue_paused!",
               coalesce(coalesce(live.job_type, ended.job_type) = any(setting.paused_types), false)
                   "is_type_paused!",
               false "is_leased!", 0 "lease_seconds!", now() "claimed_at!"
        from unnest($1::int[], $2::uuid[]) as sent(project_id, id)
        left join jobs live on live.project_id = sent.project_id and live.id = sent.id
        left join finished_jobs ended on ended.project_id = sent.project_id and ended.id = sent.id
        left join job_bodies body on body.project_id = sent.project_id and body.job_id = sent.id
        left join queues setting
            on setting.project_id = sent.project_id and setting.name = coalesce(live.queue, ended.queue)
        where live.id is not null or ended.id is not null
        "#,
        &jobs.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.id.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await
}

/// Lets the attempts of new jobs continue where those of a deleted job with the same id ended.
/// Returns the last attempt of each such job.
pub async fn continue_attempts(
    conn: &mut PgConnection,
    project_id: ProjectId,
    new: &[JobId],
) -> sqlx::Result<Vec<(JobId, i32)>> {
    let continued = sqlx::query!(
        r#"
        update jobs
        set attempt = deleted.attempt
        from deleted_jobs deleted
        where jobs.project_id = $1 and jobs.id = any($2)
            and deleted.project_id = $1 and deleted.job_id = jobs.id
        returning jobs.id "id: JobId", jobs.attempt
        "#,
        project_id.0,
        &new.iter().map(|it| it.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await?;
    Ok(continued.into_iter().map(|it| (it.id, it.attempt)).collect())
}
