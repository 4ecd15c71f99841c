//! The group commit of failures and releases.

use std::collections::HashMap;

use fencepost_domain::{
    error::Error,
    ids::{JobKey, ProjectId},
    job::OutcomeCause,
    lease::Fence,
};
use fencepost_store::{
    self as store,
    connection::pools::{self, Pool},
    settle::settle_failure::AfterOutcome,
};
use sqlx::Acquire;

use super::{Acked, Failure, Settling, explain_left, failure, may_write};
use crate::{group_commit::GroupCommit, notify::Notifier};

/// A failure or release to record, if its fence still holds.
#[derive(Debug, Clone)]
pub struct FailureOrRelease {
    pub(crate) key: JobKey,
    pub(crate) fence: Fence,
    /// None: a release.
    pub(crate) failure: Option<Failure>,
    /// The server releases it, since it was not delivered.
    pub(crate) is_undelivered: bool,
    pub(crate) duration_ms: Option<i64>,
}

impl FailureOrRelease {
    fn cause(&self) -> OutcomeCause<'_> {
        match &self.failure {
            None if self.is_undelivered => OutcomeCause::Undelivered,
            None => OutcomeCause::Released,
            Some(it) => OutcomeCause::Failed {
                retryable: it.retryable,
                error_kind: it.error.kind.as_deref(),
                retry_after_seconds: it.retry_after_seconds,
            },
        }
    }
}

/// The group commit of failures and releases.
pub struct Failures {
    pub(crate) pool: Pool,
    pub(crate) notifier: Notifier,
}

impl GroupCommit for Failures {
    type Item = FailureOrRelease;
    type Answer = Settling<Acked>;
    type Key = JobKey;
    type Connection = pools::Connection;

    const KIND: &'static str = "end";
    const MAX_ROWS: usize = 500;

    fn bytes(item: &FailureOrRelease) -> usize {
        let Some(failure) = &item.failure else { return 0 };
        let texts = [&failure.error.kind, &failure.error.message, &failure.error.stack_trace];
        texts.iter().map(|it| it.as_ref().map_or(0, String::len)).sum()
    }

    fn key(item: &FailureOrRelease) -> JobKey {
        item.key
    }

    fn project(item: &FailureOrRelease) -> ProjectId {
        item.key.project_id
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[FailureOrRelease],
        is_in_doubt: bool,
    ) -> sqlx::Result<Vec<Result<Self::Answer, Error>>> {
        let mut tx = conn.begin().await?;
        let sure = items.iter().filter(|it| may_write(&it.fence, is_in_doubt));
        let fences = sure.map(|it| (it.key, &it.fence));
        let held = store::settle::settle_failure::lock_held(&mut tx, fences).await?;
        let requests: HashMap<_, _> = items.iter().map(|it| (it.key, it)).collect();
        let outcomes: Vec<_> = held
            .into_iter()
            .filter_map(|held| requests.get(&held.key()).map(|it| (held, *it)))
            .map(|(held, it)| {
                let error = it.failure.as_ref().map(|it| it.error.clone()).unwrap_or_default();
                failure::decide(&held, &it.cause(), error, it.duration_ms)
            })
            .collect();
        let settled = failure::write(&mut tx, &outcomes).await?;
        tx.commit().await?;
        failure::publish(&self.notifier, &outcomes, &settled);
        let done: HashMap<_, _> = settled.iter().map(|it| (it.job.key(), acked(it))).collect();
        let left = items.iter().filter(|it| !done.contains_key(&it.key));
        // What was committed stays, whatever becomes of the explanations.
        let left = explain_left(conn, left.map(|it| (it.key, &it.fence))).await;
        let answer = |it: &FailureOrRelease| {
            if !may_write(&it.fence, is_in_doubt) {
                return Err(Error::InDoubt);
            }
            match (done.get(&it.key), &left) {
                (Some(acked), _) => Ok(Settling::Done(acked.clone())),
                (None, Ok(left)) => Ok(left.get(&it.key).cloned().unwrap_or(Settling::NoJob)),
                (None, Err(_)) => Err(Error::InDoubt),
            }
        };
        Ok(items.iter().map(answer).collect())
    }
}

fn acked(settled: &AfterOutcome) -> Acked {
    settled
        .retry_at
        .map_or(Acked::Done { children_activated: None }, |at| Acked::Retry { at, paused: None })
}
