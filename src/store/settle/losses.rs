//! Losses of jobs: attempts that ended without an outcome.

use fencepost_domain::{
    ids::{JobId, JobKey, ProjectId},
    job::DeadLetterReason,
};
use sqlx::PgConnection;
use uuid::Uuid;

use super::settle_failure::LossesToWrite;

/// Writes the losses of jobs whose attempts have just ended, in the same transaction.
pub async fn write(
    conn: &mut PgConnection,
    counted: &[(JobKey, LossesToWrite)],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with counted as materialized (
            select sent.project_id, sent.job_id, sent.losses, sent.in_row, sent.death,
                   case when sent.is_loss then jobs.progress end as progress, sent.is_in_streak
            from unnest(
                $1::int[], $2::uuid[], $3::int[], $4::int[], $5::text[], $6::boolean[], $7::boolean[]
            ) as sent(project_id, job_id, losses, in_row, death, is_loss, is_in_streak)
            join jobs on jobs.project_id = sent.project_id and jobs.id = sent.job_id
        )
        update job_bodies
        set losses = counted.losses, losses_in_row = counted.in_row, death = counted.death,
            lost_progress = greatest(job_bodies.lost_progress, counted.progress),
            lost_again_at = case
                when counted.is_in_streak then statement_timestamp() else job_bodies.lost_again_at
            end
        from counted
        where job_bodies.project_id = counted.project_id and job_bodies.job_id = counted.job_id
        ",
        &counted.iter().map(|it| it.0.project_id.0).collect::<Vec<_>>(),
        &counted.iter().map(|it| it.0.id.0).collect::<Vec<Uuid>>(),
        &counted.iter().map(|it| it.1.losses.total).collect::<Vec<_>>(),
        &counted.iter().map(|it| it.1.losses.in_row).collect::<Vec<_>>(),
        &counted.iter().map(|it| it.1.death.map(DeadLetterReason::as_str)).collect::<Vec<_>>()
            as &[Option<&str>],
        &counted.iter().map(|it| it.1.is_loss).collect::<Vec<_>>(),
        &counted.iter().map(|it| it.1.is_in_streak).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Begins to count the losses of jobs anew: they are retried by request.
pub async fn reset(
    conn: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobId],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update job_bodies
        set losses = null, losses_in_row = null, lost_progress = null, death = null,
            lost_again_at = null
        where project_id = $1 and job_id = any($2) and (losses is not null or death is not null)
        ",
        project_id.0,
        &jobs.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}
