//! The group commits of successes: of jobs whose success leads to nothing more, and of the others.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use fencepost_domain::{
    error::{self, Error},
    history,
    ids::{JobKey, ProjectId},
};
use fencepost_signals::{telemetry, wakeups::BackgroundTask};
use fencepost_store::{
    self as store,
    connection::pools::{self, Pool},
    settle::settle_success::{SettledRow, Success},
};
use metrics::{counter, histogram};
use sqlx::Acquire;

use super::{Settling, explain_left, may_write};
use crate::{
    group_commit::GroupCommit,
    known::KnownProjects,
    notify::{Notifier, job_event},
};

/// Work after a success.
#[derive(Clone)]
pub struct SuccessNotes {
    pub notifier: Notifier,
    pub settled: Arc<AtomicU64>,
    pub breakers: Arc<KnownProjects>,
}

impl SuccessNotes {
    /// Counts, notifies, and indexes the results by job.
    fn publish(&self, moved: &[SettledRow]) -> HashMap<JobKey, Option<i32>> {
        let (mut done, mut freed) = (HashMap::with_capacity(moved.len()), Vec::new());
        let ran = histogram!(telemetry::RUN_SECONDS);
        for it in moved {
            if let SettledRow::Job(it) = it {
                done.insert(it.key, it.children_activated);
                freed.extend(it.held_slot.then_some(it.key.project_id));
                if it.has_follow_ups {
                    self.notifier.wake.ask(BackgroundTask::Cascade);
                }
                if it.has_noted_groups {
                    self.notifier.wake.ask(BackgroundTask::Groups);
                }
                ran.record(it.ran_ms as f64 / 1_000.0);
            }
        }
        self.settled.fetch_add(done.len() as u64, Ordering::Relaxed);
        counter!(telemetry::JOBS_SETTLED, "outcome" => "succeeded").increment(done.len() as u64);
        self.notifier.waiting(moved.iter().filter_map(|it| match it {
            SettledRow::FreedChild(child) => Some(child),
            SettledRow::Job(_) => None,
        }));
        self.notifier.tally.succeeded(moved.iter().filter_map(|it| match it {
            SettledRow::Job(settled) => Some(settled),
            SettledRow::FreedChild(_) => None,
        }));
        self.notifier.wake.slots_freed(freed);
        self.notifier.notify_endpoints(done.keys().map(|it| it.project_id));
        self.notifier.feed.publish(|| {
            let done = done.keys();
            done.map(|key| job_event(*key, history::SUCCEEDED)).collect()
        });
        done
    }

    /// Publishes committed successes, explains the others, and answers all.
    async fn conclude(
        &self,
        conn: &mut sqlx::PgConnection,
        items: &[Success],
        is_in_doubt: bool,
        moved: &[SettledRow],
    ) -> Vec<Result<Settling<Option<i32>>, Error>> {
        let done = self.publish(moved);
        let left = items.iter().filter(|it| may_write(&it.fence, is_in_doubt));
        let left = left.filter(|it| !done.contains_key(&it.key()));
        // The successes stay committed, also if the explanations fail.
        let left = explain_left(conn, left.map(|it| (it.key(), &it.fence))).await;
        self.end_streaks(conn, &done).await;
        items.iter().map(|it| answer(it, is_in_doubt, &done, &left)).collect()
    }

    /// Ends the streaks of dead letters of the settled jobs' types.
    async fn end_streaks(
        &self,
        conn: &mut sqlx::PgConnection,
        done: &HashMap<JobKey, Option<i32>>,
    ) {
        let braked: Vec<_> =
            done.keys().filter(|it| self.breakers.has(it.project_id)).copied().collect();
        if braked.is_empty() {
            return;
        }
        // The acks are recorded. A streak that continues by mistake is harmless.
        if let Err(error) = store::jobs::dead_letters::end_streaks(conn, &braked).await {
            counter!(telemetry::STORE_ERRORS, "kind" => "succeed").increment(1);
            tracing::warn!(error = error::chain(&error), "dead-letter streak was not reset");
        }
    }
}

/// The group commit of successes of jobs without children, callbacks and a batch.
pub struct Successes {
    pub pool: Pool,
    pub notes: SuccessNotes,
}

impl GroupCommit for Successes {
    type Item = Success;
    /// None: the job has no children to activate.
    type Answer = Settling<Option<i32>>;
    type Key = JobKey;
    type Connection = pools::Connection;

    const KIND: &'static str = "succeed";
    const MAX_ROWS: usize = 500;

    fn bytes(item: &Success) -> usize {
        item.result.as_ref().map_or(0, String::len)
    }

    fn key(item: &Success) -> JobKey {
        item.key()
    }

    fn project(item: &Success) -> ProjectId {
        item.project_id
    }

    /// Repeating an ack is safe only if it shows its attempt.
    fn is_same(one: &Success, other: &Success) -> bool {
        one.fence.names_an_attempt() && one == other
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[Success],
        is_in_doubt: bool,
    ) -> sqlx::Result<Vec<Result<Self::Answer, Error>>> {
        let sure: Vec<_> = items.iter().filter(|it| may_write(&it.fence, is_in_doubt)).collect();
        let moved = store::settle::settle_success::succeed(conn, &sure).await?;
        Ok(self.notes.conclude(conn, items, is_in_doubt, &moved).await)
    }
}

/// The group commit of successes of jobs with children, callbacks or a batch. It is apart, because
/// it locks the children too: one family must not delay the successes of all.
pub struct Parents {
    pub pool: Pool,
    pub notes: SuccessNotes,
}

impl GroupCommit for Parents {
    type Item = Success;
    /// The number of activated children.
    type Answer = Settling<Option<i32>>;
    type Key = JobKey;
    type Connection = pools::Connection;

    const KIND: &'static str = "succeed_parents";
    /// Each may activate a thousand others.
    const MAX_ROWS: usize = 20;

    fn bytes(item: &Success) -> usize {
        Successes::bytes(item)
    }

    fn key(item: &Success) -> JobKey {
        item.key()
    }

    fn project(item: &Success) -> ProjectId {
        item.project_id
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[Success],
        is_in_doubt: bool,
    ) -> sqlx::Result<Vec<Result<Self::Answer, Error>>> {
        let sure: Vec<_> = items.iter().filter(|it| may_write(&it.fence, is_in_doubt)).collect();
        let mut tx = conn.begin().await?;
        // Locked first, so that the second statement sees every child.
        let fences = sure.iter().map(|it| (it.key(), &it.fence));
        let held = store::settle::settle_failure::lock_held(&mut tx, fences).await?;
        let is_held = |it: &&&Success| held.iter().any(|held| held.key() == it.key());
        let held: Vec<_> = sure.iter().filter(is_held).copied().collect();
        let moved = match held.as_slice() {
            [] => Vec::new(),
            held => store::settle::settle_success::succeed_parents(&mut tx, held).await?,
        };
        tx.commit().await?;
        Ok(self.notes.conclude(conn, items, is_in_doubt, &moved).await)
    }
}

fn answer(
    item: &Success,
    is_in_doubt: bool,
    done: &HashMap<JobKey, Option<i32>>,
    left: &sqlx::Result<HashMap<JobKey, Settling<Option<i32>>>>,
) -> Result<Settling<Option<i32>>, Error> {
    if !may_write(&item.fence, is_in_doubt) {
        return Err(Error::InDoubt);
    }
    match (done.get(&item.key()), left) {
        (Some(children_activated), _) => Ok(Settling::Done(*children_activated)),
        (None, Ok(left)) => Ok(left.get(&item.key()).cloned().unwrap_or(Settling::NoJob)),
        (None, Err(_)) => Err(Error::InDoubt),
    }
}
