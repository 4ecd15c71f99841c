//! Live events of jobs, for watchers of one job and listeners of a whole project. Published after
//! each commit of this node, never stored: missed events are read from the jobs themselves.
//!
//! Without watchers and listeners an event costs one read of a counter.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::{Notify, broadcast};

use fencepost_domain::{
    ids::{EventId, JobId, ProjectId},
    limits,
};

/// Events that a slow listener may lag behind; then it learns that it has missed some.
const MAX_BEHIND: usize = 1_024;

/// How long a project's events are kept after its last listener has left, so that a stream that
/// reconnects finds what it missed.
const FEED_KEEP: Duration = Duration::from_secs(300);

/// An event of a job.
#[derive(Debug, Clone)]
pub struct JobEvent {
    pub project_id: ProjectId,
    pub job_id: JobId,
    pub id: EventId,
    /// Its name: one of `domain::history`, or a worker's own.
    pub kind: String,
    /// Its attempt, if it belongs to one.
    pub attempt: Option<i32>,
    /// The worker that ran the attempt.
    pub worker_id: Option<String>,
    /// Details as JSON.
    pub payload: Option<String>,
}

impl JobEvent {
    /// An event without details.
    #[must_use]
    pub fn new(project_id: ProjectId, job_id: JobId, kind: &str) -> Self {
        let (attempt, worker_id, payload) = (None, None, None);
        let id = EventId::generate();
        Self { project_id, job_id, id, kind: kind.to_owned(), attempt, worker_id, payload }
    }
}

impl JobEvent {
    /// Size of the event in memory.
    fn bytes(&self) -> usize {
        let texts = [Some(&self.kind), self.worker_id.as_ref(), self.payload.as_ref()];
        size_of::<Self>() + texts.into_iter().flatten().map(String::len).sum::<usize>()
    }
}

impl Feed {
    /// Forgets the oldest events beyond these bounds.
    fn trim(&mut self, max_events: usize, max_bytes: usize) {
        while self.recent.len() > max_events || self.bytes > max_bytes {
            let Some(oldest) = self.recent.pop_front() else { return };
            self.bytes -= oldest.bytes();
        }
    }
}

/// Bytes of events that one project's feed may remember: an equal part of the bytes of all feeds.
fn bytes_per_feed(feeds: usize) -> usize {
    (limits::MAX_REMEMBERED_BYTES / feeds.max(1)).min(limits::MAX_PROJECT_REMEMBERED_BYTES)
}

type Watched = HashMap<(ProjectId, JobId), (Arc<Notify>, usize)>;

struct Feed {
    sender: broadcast::Sender<Arc<JobEvent>>,
    recent: VecDeque<Arc<JobEvent>>,
    /// Bytes of the events in `recent`.
    bytes: usize,
    /// Since when it has no listeners, as of the last check.
    unheard_since: Option<Instant>,
}

#[derive(Default)]
struct Inner {
    /// Number of watchers and feeds: nothing is published while it is 0.
    watched: AtomicUsize,
    jobs: Mutex<Watched>,
    feeds: Mutex<HashMap<ProjectId, Feed>>,
}

/// Publishes and subscribes. Cheap to clone.
#[derive(Clone, Default)]
pub struct EventFeed(Arc<Inner>);

impl EventFeed {
    /// Publishes events, if there are watchers. Call it after the commit.
    pub fn publish(&self, job_events: impl FnOnce() -> Vec<JobEvent>) {
        if self.0.watched.load(Ordering::Relaxed) == 0 {
            return;
        }
        let job_events = job_events();
        let jobs = lock(&self.0.jobs);
        for job_event in &job_events {
            if let Some((notify, _)) = jobs.get(&(job_event.project_id, job_event.job_id)) {
                notify.notify_waiters();
            }
        }
        drop(jobs);
        let mut feeds = lock(&self.0.feeds);
        let part = bytes_per_feed(feeds.len());
        for job_event in job_events {
            let Some(feed) = feeds.get_mut(&job_event.project_id) else { continue };
            let job_event = Arc::new(job_event);
            feed.bytes += job_event.bytes();
            feed.recent.push_back(Arc::clone(&job_event));
            feed.trim(limits::MAX_REMEMBERED_EVENTS, part);
            let _ = feed.sender.send(job_event);
        }
    }

    #[must_use]
    pub fn watch(&self, project_id: ProjectId, job_id: JobId) -> Watch {
        let key = (project_id, job_id);
        let mut jobs = lock(&self.0.jobs);
        let (notify, watchers) = jobs.entry(key).or_default();
        *watchers += 1;
        self.0.watched.fetch_add(1, Ordering::Relaxed);
        Watch { feed: self.clone(), key, notify: Arc::clone(notify) }
    }

    #[must_use]
    pub fn watched_jobs(&self) -> Vec<(ProjectId, JobId)> {
        lock(&self.0.jobs).keys().copied().collect()
    }

    /// Wakes the watchers of a job that another node has changed: they read it again.
    pub fn nudge(&self, project_id: ProjectId, job_id: JobId) {
        if let Some((notify, _)) = lock(&self.0.jobs).get(&(project_id, job_id)) {
            notify.notify_waiters();
        }
    }

    /// Drops projects without listeners for five minutes.
    pub fn prune_idle(&self) {
        let mut feeds = lock(&self.0.feeds);
        let before = feeds.len();
        feeds.retain(|_, feed| {
            if feed.sender.receiver_count() > 0 {
                feed.unheard_since = None;
                return true;
            }
            feed.unheard_since.get_or_insert_with(Instant::now).elapsed() < FEED_KEEP
        });
        self.0.watched.fetch_sub(before - feeds.len(), Ordering::Relaxed);
    }

    /// Subscribes to a project, from the event after `last` on, if this node still has it.
    #[must_use]
    pub fn listen(&self, project_id: ProjectId, last: Option<EventId>) -> Listening {
        let mut feeds = lock(&self.0.feeds);
        if !feeds.contains_key(&project_id) {
            // A further feed leaves less to each of the others.
            let part = bytes_per_feed(feeds.len() + 1);
            feeds.values_mut().for_each(|it| it.trim(limits::MAX_REMEMBERED_EVENTS, part));
        }
        let feed = feeds.entry(project_id).or_insert_with(|| {
            self.0.watched.fetch_add(1, Ordering::Relaxed);
            let sender = broadcast::channel(MAX_BEHIND).0;
            Feed { sender, recent: VecDeque::new(), bytes: 0, unheard_since: None }
        });
        let seen = last.and_then(|last| feed.recent.iter().position(|it| it.id == last));
        let missed = seen.map(|it| feed.recent.iter().skip(it + 1).cloned().collect());
        let has_gap = last.is_some() && seen.is_none();
        Listening { receiver: feed.sender.subscribe(), missed: missed.unwrap_or_default(), has_gap }
    }
}

/// A project's events.
pub struct Listening {
    pub receiver: broadcast::Receiver<Arc<JobEvent>>,
    /// Events since the last one that the listener has seen.
    pub missed: Vec<Arc<JobEvent>>,
    /// Whether missed events are lost.
    pub has_gap: bool,
}

/// A watcher of a job; ends when dropped.
pub struct Watch {
    feed: EventFeed,
    key: (ProjectId, JobId),
    notify: Arc<Notify>,
}

impl Watch {
    /// Resolves when something happens after this call. Call it before reading the job, or events
    /// in between are missed.
    pub fn changed(&self) -> tokio::sync::futures::Notified<'_> {
        self.notify.notified()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut jobs = lock(&self.feed.0.jobs);
        if let Some((_, watchers)) = jobs.get_mut(&self.key) {
            *watchers -= 1;
            if *watchers == 0 {
                jobs.remove(&self.key);
            }
        }
        self.feed.0.watched.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Code that holds these locks cannot panic in the middle of a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    const PROJECT: ProjectId = ProjectId(1);

    #[tokio::test]
    async fn a_watcher_hears_of_its_job_and_of_no_other() {
        let feed = EventFeed::default();
        let (mine, other) = (JobId::generate(), JobId::generate());
        let watch = feed.watch(PROJECT, mine);
        {
            let mut changed = std::pin::pin!(watch.changed());
            changed.as_mut().enable();
            feed.publish(|| vec![JobEvent::new(PROJECT, other, "test")]);
            assert!(changed.as_mut().now_or_never().is_none());
            feed.publish(|| vec![JobEvent::new(PROJECT, mine, "test")]);
            changed.await;
        }
        drop(watch);
        assert!(feed.watched_jobs().is_empty());
        feed.publish(|| unreachable!("there is no watcher"));
    }

    #[tokio::test]
    async fn a_listener_that_comes_back_gets_what_it_missed_or_learns_that_it_cannot() {
        let feed = EventFeed::default();
        let mut first = feed.listen(PROJECT, None);
        let job = JobId::generate();
        feed.publish(|| vec![JobEvent::new(PROJECT, job, "a"), JobEvent::new(PROJECT, job, "b")]);
        let seen = first.receiver.recv().await.expect("an event");
        assert_eq!(seen.kind, "a");
        drop(first);
        feed.publish(|| vec![JobEvent::new(PROJECT, job, "c")]);
        let again = feed.listen(PROJECT, Some(seen.id));
        let kinds: Vec<_> = again.missed.iter().map(|it| it.kind.as_str()).collect();
        assert_eq!((kinds, again.has_gap), (vec!["b", "c"], false));
        assert!(feed.listen(PROJECT, Some(EventId::generate())).has_gap);
        assert!(feed.listen(ProjectId(2), None).missed.is_empty());
    }

    #[test]
    fn what_all_feeds_remember_is_bounded_and_shared() {
        let feed = EventFeed::default();
        let text = "x".repeat(limits::MAX_STREAMED_PAYLOAD_BYTES);
        let fill = |project: i32| {
            let project_id = ProjectId(project);
            drop(feed.listen(project_id, None));
            let event = |_| JobEvent {
                payload: Some(text.clone()),
                ..JobEvent::new(project_id, JobId::generate(), "test")
            };
            feed.publish(|| (0..limits::MAX_REMEMBERED_EVENTS).map(event).collect());
        };
        let remembered = |project: i32| lock(&feed.0.feeds)[&ProjectId(project)].bytes;
        fill(0);
        let alone = remembered(0);
        assert!(alone <= limits::MAX_PROJECT_REMEMBERED_BYTES && alone > 0);
        let projects = 4 * limits::MAX_REMEMBERED_BYTES / limits::MAX_PROJECT_REMEMBERED_BYTES;
        (1..projects as i32).for_each(fill);
        let all: usize = (0..projects as i32).map(remembered).sum();
        assert!(all <= limits::MAX_REMEMBERED_BYTES, "{all}");
        assert!(remembered(0) > 0, "each has its part");
    }
}
