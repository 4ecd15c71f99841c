//! Fences that show a worker only. They count if they can mean one attempt.

use std::sync::Arc;

use fencepost_domain::{
    error::{Error, JobStatus},
    ids::{JobKey, ProjectId},
    job::JobState,
    lease::{Fence, RequireFence},
};
use fencepost_signals::telemetry;
use fencepost_store::{
    connection::pools::{self, Pool},
    jobs::fences::{self, AskedHolder, HeldAttempt},
};
use metrics::counter;

use crate::{Engine, group_commit::GroupCommit};

/// Attempts are counted from 1.
const NO_ATTEMPT: i32 = 0;

/// The fence with the attempt that its worker holds, or with none that exists. One that shows an
/// attempt or a lease stays as it is.
///
/// # Errors
/// [`Error::FenceRequired`] when all fences must show an attempt, or the worker lost an earlier
/// attempt: it may still work on that one.
pub async fn name_attempt(
    engine: &Engine,
    key: JobKey,
    fence: Fence,
    required: RequireFence,
) -> Result<Fence, Error> {
    let Some(worker_id) = fence.worker_id.as_deref().filter(|_| !fence.names_an_attempt()) else {
        return Ok(fence);
    };
    let asked = AskedHolder { key, worker_id: worker_id.into() };
    let Some(held) = engine.bare_fences.submit(asked).await? else {
        // It must not match an attempt that the worker claims from now on.
        return Ok(Fence { attempt: Some(NO_ATTEMPT), ..fence });
    };
    if held.has_lost_earlier || required == RequireFence::Always {
        counter!(telemetry::FENCES_REFUSED, "reason" => "fence_required").increment(1);
        let status = JobStatus { state: JobState::Processing, attempt: held.attempt };
        return Err(Error::FenceRequired(status));
    }
    Ok(Fence { attempt: Some(held.attempt), ..fence })
}

/// The group commit of such fences.
pub struct BareFences {
    pub(crate) pool: Pool,
}

impl GroupCommit for BareFences {
    type Item = AskedHolder;
    type Answer = Option<HeldAttempt>;
    type Key = (JobKey, Arc<str>);
    type Connection = pools::Connection;

    const KIND: &'static str = "bare_fence";
    const MAX_ROWS: usize = 500;

    fn bytes(_: &AskedHolder) -> usize {
        0
    }

    fn key(item: &AskedHolder) -> Self::Key {
        (item.key, Arc::clone(&item.worker_id))
    }

    fn project(item: &AskedHolder) -> ProjectId {
        item.key.project_id
    }

    fn is_same(one: &AskedHolder, other: &AskedHolder) -> bool {
        one == other
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[AskedHolder],
        _: bool,
    ) -> sqlx::Result<Vec<Result<Option<HeldAttempt>, Error>>> {
        let mut answers: Vec<_> = items.iter().map(|_| Ok(None)).collect();
        for held in fences::held_attempts(conn, items).await? {
            if let Some(answer) =
                usize::try_from(held.number).ok().and_then(|it| answers.get_mut(it))
            {
                *answer = Ok(Some(held));
            }
        }
        Ok(answers)
    }
}
