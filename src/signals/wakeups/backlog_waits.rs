//! Wake-ups of requests that wait for the first job of a queue. Without such requests, arrivals
//! cost one read of a counter.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use fencepost_domain::ids::ProjectId;
use tokio::sync::{Notify, futures::Notified};

use super::{Arrival, keyed::KeyedNotify};

/// The waits of this node. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct BacklogWaits(Arc<Waits>);

#[derive(Debug, Default)]
struct Waits {
    number: AtomicUsize,
    of_queue: KeyedNotify<(ProjectId, Arc<str>)>,
}

impl BacklogWaits {
    /// Begins to wait for jobs of a queue.
    #[must_use]
    pub fn watch(&self, project_id: ProjectId, queue: &str) -> Watch {
        self.0.number.fetch_add(1, Ordering::Relaxed);
        Watch { waits: self.clone(), arrival: self.0.of_queue.of((project_id, queue.into())) }
    }

    /// Wakes the waits for queues in which jobs have arrived.
    pub fn arrived(&self, arrivals: &[Arrival]) {
        if self.0.number.load(Ordering::Relaxed) == 0 {
            return;
        }
        let is_same = |one: &Arrival, next: &Arrival| {
            (one.project_id, &one.queue) == (next.project_id, &next.queue)
        };
        for first in arrivals.chunk_by(is_same).filter_map(<[Arrival]>::first) {
            self.0.of_queue.wake(&(first.project_id, Arc::clone(&first.queue)));
        }
    }

    /// Wakes all waits: hints were lost.
    pub fn everywhere(&self) {
        if self.0.number.load(Ordering::Relaxed) > 0 {
            self.0.of_queue.wake_all();
        }
    }

    /// Wakes the waits for a queue whose settings have changed: it may have been resumed.
    pub fn changed(&self, project_id: ProjectId, queue: &Arc<str>) {
        if self.0.number.load(Ordering::Relaxed) > 0 {
            self.0.of_queue.wake(&(project_id, Arc::clone(queue)));
        }
    }
}

/// A wait, until it is dropped.
#[derive(Debug)]
pub struct Watch {
    waits: BacklogWaits,
    arrival: Arc<Notify>,
}

impl Watch {
    /// The next wake-up. Enable it before you read the backlog, so that none is missed.
    pub fn arrival(&self) -> Notified<'_> {
        self.arrival.notified()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.waits.0.number.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::DateTime;
    use futures_util::FutureExt;

    fn arrival(project_id: i32, queue: &str) -> Arrival {
        Arrival {
            project_id: ProjectId(project_id),
            queue: queue.into(),
            job_type: "t".into(),
            rank: 0,
            run_at: DateTime::UNIX_EPOCH,
            is_constrained: false,
        }
    }

    #[test]
    fn an_arrival_wakes_the_waits_for_its_queue_only() {
        let waits = BacklogWaits::default();
        let watches = [(1, "a"), (1, "b"), (2, "a")]
            .map(|(project_id, queue)| waits.watch(ProjectId(project_id), queue));
        let mut arrivals: Vec<_> = watches.iter().map(|it| Box::pin(it.arrival())).collect();
        arrivals.iter_mut().for_each(|it| _ = it.as_mut().enable());
        waits.arrived(&[arrival(1, "b"), arrival(1, "b"), arrival(3, "a"), arrival(2, "a")]);
        let woken: Vec<_> = arrivals.into_iter().map(|it| it.now_or_never().is_some()).collect();
        assert_eq!(woken, [false, true, true]);
    }

    #[test]
    fn a_wait_that_has_ended_is_not_counted() {
        let waits = BacklogWaits::default();
        drop(waits.watch(ProjectId(1), "a"));
        assert_eq!(waits.0.number.load(Ordering::Relaxed), 0);
    }
}
