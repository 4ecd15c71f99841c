//! Attempts that do not count towards the claims of a job: it was put off, or met a rate limit.

use fencepost_domain::{
    ids::JobKey,
    job::{AttemptOutcome, RATE_LIMITED, SNOOZED},
};
use sqlx::PgConnection;

/// Why an attempt does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Uncounted {
    /// Its worker has put the job off.
    Snooze,
    /// Its worker has met a rate limit.
    RateLimit,
}

impl Uncounted {
    const ALL: [Self; 2] = [Self::Snooze, Self::RateLimit];

    /// The error type of such an attempt.
    const fn kind(self) -> &'static str {
        match self {
            Self::Snooze => SNOOZED,
            Self::RateLimit => RATE_LIMITED,
        }
    }

    /// Why an attempt with this outcome and error type does not count; none: it does.
    #[must_use]
    pub fn of(outcome: AttemptOutcome, error_kind: Option<&str>) -> Option<Self> {
        let is_released = outcome == AttemptOutcome::Released;
        Self::ALL.into_iter().find(|why| is_released && Some(why.kind()) == error_kind)
    }
}

/// Counts an attempt that has just ended so, and deletes the rows of all but the last `kept` of the
/// job that did.
pub async fn note(
    conn: &mut PgConnection,
    key: JobKey,
    why: Uncounted,
    kept: i64,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with old as materialized (
            select attempt
            from attempts
            where project_id = $1 and job_id = $2 and outcome = 'released' and error_kind = $4
            order by attempt desc
            offset $3
        ), gone as (
            delete from attempts
            using old
            where attempts.project_id = $1 and attempts.job_id = $2
                and attempts.attempt = old.attempt
        ), put_off as (
            update job_bodies
            set snoozes = coalesce(snoozes, 0) + 1
            where project_id = $1 and job_id = $2 and $5
        )
        update jobs
        set rate_limited_claims = coalesce(rate_limited_claims, 0) + 1
        where project_id = $1 and id = $2 and not $5
        ",
        key.project_id.0,
        key.id.0,
        kept,
        why.kind(),
        why == Uncounted::Snooze,
    )
    .execute(conn)
    .await?;
    Ok(())
}
