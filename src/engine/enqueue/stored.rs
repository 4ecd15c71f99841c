//! Storing new jobs: one statement for all requests that wait.

use std::{collections::HashMap, sync::Arc};

use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    history,
    ids::{JobId, ProjectId},
    job::StoredState,
    limits,
};
use fencepost_signals::{
    events_feed::JobEvent,
    telemetry,
    wakeups::{Arrival, BackgroundTask},
};
use fencepost_store::{
    self as store,
    claims::LeaseRequest,
    connection::pools::{self, Pool},
};
use metrics::counter;

use super::alone::Alone;
use crate::{
    Engine,
    group_commit::{GroupCommit, leaves_doubt},
    notify::Notifier,
    sync_match::{Candidate, Matcher, Reservation, ReservedPoll},
};

use fencepost_store::jobs::enqueue::StoredJob;
pub use fencepost_store::jobs::enqueue::{Extras, NewJob, Start};

/// Stores the jobs of one request, all or none, and returns them in their order.
///
/// # Errors
/// [`Error::Invalid`] when a `run_at` lies too far ahead, and [`Error::Overloaded`] when too many
/// requests wait: nothing is stored. [`Error::Unavailable`] when the database did not answer.
pub(super) async fn enqueue(engine: &Engine, jobs: Arc<[NewJob]>) -> Result<Vec<StoredJob>, Error> {
    engine.enqueues.submit(jobs).await
}

/// The group commit of new jobs.
pub struct Enqueues {
    pool: Pool,
    notifier: Notifier,
    matcher: Matcher,
    alone: Alone,
}

impl Enqueues {
    pub(crate) fn new(pool: Pool, notifier: Notifier, matcher: Matcher) -> Self {
        Self { pool, notifier, matcher, alone: Alone::default() }
    }
}

impl GroupCommit for Enqueues {
    type Item = Arc<[NewJob]>;
    type Answer = Vec<StoredJob>;
    type Key = Option<JobId>;
    type Connection = pools::Connection;

    const KIND: &'static str = "enqueue";
    const MAX_ROWS: usize = 500;

    fn rows(item: &Self::Item) -> usize {
        item.len()
    }

    fn bytes(item: &Self::Item) -> usize {
        item.iter().map(bytes_of).sum()
    }

    /// Ids are new, so no two requests collide.
    fn key(item: &Self::Item) -> Self::Key {
        item.first().map(|it| it.id)
    }

    fn project(item: &Self::Item) -> ProjectId {
        // A request without jobs is refused before.
        item.first().map_or(ProjectId(0), |it| it.project_id)
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[Self::Item],
        is_in_doubt: bool,
    ) -> sqlx::Result<Vec<Result<Vec<StoredJob>, Error>>> {
        let mut stored = HashMap::new();
        if is_in_doubt {
            let all: Vec<_> = items.iter().flat_map(|it| it.iter()).collect();
            let found = store::jobs::stored_before::find_stored(conn, &all).await?;
            stored.extend(found.into_iter().map(|it| (it.id, it)));
        }
        let (mut jobs, mut latest) = (Vec::new(), Vec::new());
        for item in items {
            let latest_run_at = latest_run_at(item);
            for job in item.iter().filter(|it| !stored.contains_key(&it.id)) {
                jobs.push(job);
                latest.push(latest_run_at);
            }
        }
        let mut matched = Matched::default();
        if !jobs.is_empty() {
            // Whether a try whose outcome is unknown has leased them is not known either.
            if !is_in_doubt && self.matcher.has_polls() {
                matched = Matched::reserve(&self.matcher, &jobs).await;
            }
            let leases = matched.leases(jobs.len());
            let alone = self.alone.choose(&jobs);
            let inserted = match store::jobs::enqueue::insert_jobs(
                conn, &jobs, &latest, &leases, &alone,
            )
            .await
            {
                Ok(inserted) => inserted,
                Err(error) => {
                    drop(leases);
                    matched.fail(&error);
                    return Err(error);
                }
            };
            stored.extend(inserted.into_iter().map(|it| (it.id, it)));
        }
        publish(&self.notifier, items.iter().flat_map(|it| it.iter()), &stored);
        matched.settle(&jobs, &stored);
        Ok(items.iter().map(|it| answer(it, &stored)).collect())
    }
}

/// Polls that are reserved for jobs of a group commit.
#[derive(Default)]
struct Matched {
    reservation: Option<Reservation>,
    /// The jobs that polls were wanted for, by their number in the commit, in the order of the
    /// polls.
    candidates: Vec<usize>,
}

impl Matched {
    /// Jobs that may run at once, and whose lease depends on nothing but the queue's settings: the
    /// best first.
    async fn reserve(matcher: &Matcher, jobs: &[&NewJob]) -> Self {
        let is_plain = |it: &NewJob| {
            let extras = it.extras.as_deref();
            it.start == Start::After(0)
                && extras.is_none_or(|it| it.constraint_key.is_none() && it.group.is_none())
        };
        let plain = jobs.iter().enumerate().filter(|(_, it)| is_plain(it));
        let mut plain: Vec<_> = plain.map(|(number, it)| (it.rank, number)).collect();
        plain.sort_unstable();
        let candidates: Vec<_> = plain.into_iter().map(|(_, number)| number).collect();
        let candidate = |number: &usize| {
            let job = jobs[*number];
            Candidate {
                project_id: job.project_id,
                queue: job.queue.as_str().into(),
                job_type: job.job_type.as_str().into(),
                rank: job.rank,
            }
        };
        let reservation = matcher.reserve(candidates.iter().map(candidate).collect()).await;
        Self { reservation, candidates }
    }

    /// The lease of each job of the commit, if it has one.
    fn leases(&self, jobs: usize) -> Vec<Option<LeaseRequest<'_>>> {
        let mut leases = vec![None; jobs];
        let polls = self.reservation.as_ref().map_or(&[][..], Reservation::polls);
        for (number, poll) in self.candidates.iter().zip(polls) {
            leases[*number] = poll.as_ref().map(ReservedPoll::lease_request);
        }
        leases
    }

    /// Reports to the pump that nothing was leased, unless that is in doubt.
    fn fail(self, error: &sqlx::Error) {
        if let Some(reservation) = self.reservation.filter(|_| !leaves_doubt(error)) {
            reservation.settle([]);
        }
    }

    /// Reports to the pump which jobs were leased. Call it after the commit.
    fn settle(self, jobs: &[&NewJob], stored: &HashMap<JobId, StoredJob>) {
        let Some(reservation) = self.reservation else { return };
        let mut leased = Vec::new();
        for (index, number) in self.candidates.iter().enumerate() {
            let Some(Some(poll)) = reservation.polls().get(index) else { continue };
            let job = jobs[*number];
            if let Some(stored) = stored.get(&job.id).filter(|it| it.is_leased) {
                leased.push((index, stored.leased(job, poll.lease_id)));
            }
        }
        reservation.settle(leased);
    }
}

/// Counts and notifies. Call it after the commit.
pub(crate) fn publish<'a>(
    notifier: &Notifier,
    jobs: impl Iterator<Item = &'a NewJob> + Clone,
    stored: &HashMap<JobId, StoredJob>,
) {
    let mut arrivals = Vec::new();
    let (mut is_due_later, mut has_noted_groups) = (false, false);
    for job in jobs.clone() {
        let Some(it) = stored.get(&job.id).filter(|it| !it.is_leased) else { continue };
        has_noted_groups |= it.waits_for_group || it.has_noted_turn;
        match it.state {
            StoredState::Pending => arrivals.push(Arrival {
                project_id: job.project_id,
                queue: job.queue.as_str().into(),
                job_type: job.job_type.as_str().into(),
                rank: job.rank,
                run_at: it.run_at,
                is_constrained: job.extras.as_ref().is_some_and(|it| it.constraint_key.is_some()),
            }),
            StoredState::Scheduled => is_due_later |= !it.waits_for_group,
            _ => (),
        }
    }
    counter!(telemetry::JOBS_ENQUEUED).increment(stored.len() as u64);
    notifier.tally.enqueued(jobs.clone().filter(|it| stored.contains_key(&it.id)));
    notifier.wake.arrived(arrivals);
    if is_due_later {
        notifier.wake.ask(BackgroundTask::Promote);
    }
    if has_noted_groups {
        notifier.wake.ask(BackgroundTask::Groups);
    }
    notifier.feed.publish(|| {
        let stored = jobs.filter(|it| stored.contains_key(&it.id));
        stored.map(|it| JobEvent::new(it.project_id, it.id, history::ENQUEUED)).collect()
    });
}

/// Memory of a waiting job: its texts, and a constant for the rest.
fn bytes_of(job: &NewJob) -> usize {
    const ROW_BYTES: usize = 256;
    /// Labels, keys and a trace context, at their limits.
    const EXTRAS_BYTES: usize = 8 * 1024;
    let tags = job.tags.iter().flat_map(|it| &it.0).map(|(key, value)| key.len() + value.len());
    let types = job.retry.iter().flat_map(|it| &it.0.non_retryable_types).map(String::len);
    let texts = job.payload.len() + job.job_type.len() + job.queue.len();
    let len = |it: &Option<String>| it.as_ref().map_or(0, String::len);
    let extras = job.extras.as_ref();
    let extras = extras.map_or(0, |it| EXTRAS_BYTES + len(&it.envelope) + len(&it.callbacks));
    ROW_BYTES + texts + tags.sum::<usize>() + types.sum::<usize>() + extras
}

pub(crate) fn latest_run_at(jobs: &[NewJob]) -> Option<DateTime<Utc>> {
    jobs.iter()
        .filter_map(|it| match it.start {
            Start::At(run_at) => Some(run_at),
            Start::After(_) => None,
        })
        .max()
}

fn answer(jobs: &[NewJob], stored: &HashMap<JobId, StoredJob>) -> Result<Vec<StoredJob>, Error> {
    jobs.iter()
        .map(|it| stored.get(&it.id).cloned())
        .collect::<Option<Vec<_>>>()
        .ok_or_else(too_far_ahead)
}

/// The error for a `run_at` beyond [`limits::MAX_RUN_AT_SECONDS`].
pub(crate) fn too_far_ahead() -> Error {
    let years = limits::MAX_RUN_AT_YEARS;
    Error::invalid("run_at", format!("must be at most {years} years ahead"))
}
