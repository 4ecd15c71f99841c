//! Deadlines for borrowed connections.
//!
//! A database can fall silent without closing its connections: its host died, or the network drops
//! packets. No statement timeout helps then. [`bounded`] runs work that borrows connections, and
//! stops it when one of them has been silent for too long. Connections that are stopped in the
//! middle of a statement are closed at once, and never reach another borrower.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use futures_util::task::AtomicWaker;
use tokio::{
    sync::{Notify, watch},
    task::JoinError,
    time::{Instant, sleep_until},
};
use tokio_util::task::TaskTracker;

use fencepost_domain::error::Error;

tokio::task_local! {
    /// The work that runs in this task, if it is bounded.
    static WORK: Arc<Work>;
    /// The work of this task must not borrow connections.
    static LENDS_NONE: ();
}

/// The database did not answer in time. What was being written may have been written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the database did not answer in time")]
pub struct Overdue;

impl From<Overdue> for sqlx::Error {
    fn from(_: Overdue) -> Self {
        Self::Io(std::io::ErrorKind::TimedOut.into())
    }
}

impl From<Overdue> for Error {
    fn from(overdue: Overdue) -> Self {
        sqlx::Error::from(overdue).into()
    }
}

/// A time of this process in milliseconds.
fn now_ms() -> u64 {
    /// Any instant, the same for all.
    static BEGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    let begin = BEGIN.get_or_init(Instant::now);
    u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// The known health of the database.
#[derive(Debug)]
pub struct Health {
    /// How often all connections were replaced, because those before were silent. Watched by the
    /// work that has borrowed some.
    generation: watch::Sender<u64>,
    /// A statement got no answer.
    suspected: Notify,
    /// When a returned connection last answered, in milliseconds of this process.
    answered_at_ms: AtomicU64,
}

impl Default for Health {
    fn default() -> Self {
        let generation = watch::channel(0).0;
        Self { generation, suspected: Notify::new(), answered_at_ms: AtomicU64::new(0) }
    }
}

impl Health {
    /// Work whose connections were replaced is stopped after this wait.
    const SILENCE: Duration = Duration::from_secs(1);

    fn generation(&self) -> u64 {
        *self.generation.borrow()
    }

    fn alarm(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    pub(super) fn replaced(&self) {
        self.generation.send_modify(|it| *it += 1);
    }

    fn suspect(&self) {
        self.suspected.notify_one();
    }

    /// The database has answered.
    pub(super) fn note_answer(&self) {
        self.answered_at_ms.store(now_ms(), Ordering::Relaxed);
    }

    pub(super) fn has_answered_within(&self, time: Duration) -> bool {
        let answered_at_ms = self.answered_at_ms.load(Ordering::Relaxed);
        u128::from(now_ms().saturating_sub(answered_at_ms)) <= time.as_millis()
    }

    /// Resolves when a statement got no answer.
    pub(super) async fn suspected(&self) {
        self.suspected.notified().await;
    }
}

/// A borrowed connection, as its deadline sees it.
#[derive(Debug)]
pub(super) struct Loan {
    /// Longer than any statement of its pool may take.
    max_silence: Duration,
    is_exempt: AtomicBool,
    generation: u64,
    health: Arc<Health>,
}

impl Loan {
    pub fn new(max_silence: Duration, health: &Arc<Health>) -> Arc<Self> {
        let (generation, health) = (health.generation(), Arc::clone(health));
        Arc::new(Self { max_silence, is_exempt: AtomicBool::new(false), generation, health })
    }

    /// Whether all connections have been replaced since.
    pub fn is_stale(&self) -> bool {
        self.generation != self.health.generation()
    }

    /// A statement may take any time.
    pub fn exempt(&self) {
        self.is_exempt.store(true, Ordering::Relaxed);
    }

    /// Puts the loan on the account of the work that runs in this task.
    pub fn enter(self: &Arc<Self>) {
        let _ = WORK.try_with(|work| {
            work.loans().push(Arc::downgrade(self));
            work.borrowed.notify_one();
        });
        debug_assert!(
            LENDS_NONE.try_with(|()| ()).is_err(),
            "this work may be dropped at any point: borrow in `detached`"
        );
    }

    fn max_silence(&self) -> Duration {
        match self.is_exempt.load(Ordering::Relaxed) {
            _ if self.is_stale() => Health::SILENCE,
            true => Duration::MAX,
            false => self.max_silence,
        }
    }
}

/// Whether the work of this task was stopped, so that its connections may be in the middle of a
/// statement.
pub(super) fn is_stopped() -> bool {
    WORK.try_with(|work| work.is_stopped.load(Ordering::Relaxed)).unwrap_or(false)
}

#[derive(Debug, Default)]
struct Work {
    loans: Mutex<Vec<Weak<Loan>>>,
    /// A connection was borrowed: there is a deadline now.
    borrowed: Notify,
    /// When the work last made progress.
    moved_at_ms: AtomicU64,
    is_stopped: AtomicBool,
}

impl Work {
    fn loans(&self) -> std::sync::MutexGuard<'_, Vec<Weak<Loan>>> {
        self.loans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The loans that are not returned yet.
    fn open(&self) -> Vec<Arc<Loan>> {
        let mut loans = self.loans();
        loans.retain(|it| it.strong_count() > 0);
        loans.iter().filter_map(Weak::upgrade).collect()
    }

    fn silence(&self) -> Duration {
        let moved_at_ms = self.moved_at_ms.load(Ordering::Relaxed);
        Duration::from_millis(now_ms().saturating_sub(moved_at_ms))
    }

    /// Returns when a connection has been silent for too long.
    async fn overdue(&self) {
        loop {
            let open = self.open();
            let Some(first) = open.first() else {
                self.borrowed.notified().await;
                continue;
            };
            // Before the silence is measured, so that no alarm is missed.
            let mut alarm = first.health.alarm();
            let silence = self.silence();
            let max_silence = open.iter().map(|it| it.max_silence()).min();
            let max_silence = max_silence.unwrap_or(Duration::MAX);
            if silence >= max_silence {
                open.iter().for_each(|it| it.health.suspect());
                return;
            }
            let left = max_silence.saturating_sub(silence).min(MAX_SLEEP);
            drop(open);
            tokio::select! {
                () = sleep_until(Instant::now() + left) => (),
                () = self.borrowed.notified() => (),
                // The database is known to be silent: shorter silences count.
                _ = alarm.changed() => (),
            }
        }
    }
}

/// Wakes the task, and remembers that it was the work that moved and not its deadline.
#[derive(Debug, Default)]
struct Progress {
    task: AtomicWaker,
    has_moved: AtomicBool,
}

impl Wake for Progress {
    fn wake(self: Arc<Self>) {
        self.has_moved.store(true, Ordering::Release);
        self.task.wake();
    }
}

/// A sleep that is long enough to be none.
const MAX_SLEEP: Duration = Duration::from_secs(3_600);

/// Runs work, and stops it when a connection that it has borrowed is silent for too long: without
/// any progress of the work for longer than a statement may take. The work is boxed at once: its
/// size is no part of its callers' futures.
///
/// # Errors
/// [`Overdue`]: the work was dropped, and its connections are closed.
pub fn bounded<F: Future>(work: F) -> impl Future<Output = Result<F::Output, Overdue>> {
    let mut work = Box::pin(work);
    let state = Arc::new(Work::default());
    WORK.scope(Arc::clone(&state), async move {
        let mut overdue = pin!(state.overdue());
        let progress = Arc::new(Progress::default());
        progress.has_moved.store(true, Ordering::Relaxed);
        let waker = Waker::from(Arc::clone(&progress));
        let output = poll_fn(|context| {
            progress.task.register(context.waker());
            if progress.has_moved.swap(false, Ordering::Acquire) {
                state.moved_at_ms.store(now_ms(), Ordering::Relaxed);
                if let Poll::Ready(output) = work.as_mut().poll(&mut Context::from_waker(&waker)) {
                    return Poll::Ready(Ok(output));
                }
            }
            overdue.as_mut().poll(context).map(|()| Err(Overdue))
        })
        .await;
        // Whatever `work` still holds is dropped while the flag is set.
        state.is_stopped.store(output.is_err(), Ordering::Relaxed);
        drop(work);
        output
    })
}

/// The same in a task of its own: the work completes even if its caller is dropped. A future that
/// is dropped in the middle of a statement would leave its connection there.
///
/// # Errors
/// [`Overdue`], as for [`bounded`].
pub fn detached<F>(work: F) -> impl Future<Output = Result<F::Output, Overdue>>
where
    F: Future<Output: Send + 'static> + Send + 'static,
{
    let work = bounded(work);
    async move { joined(tokio::spawn(work).await) }
}

/// [`detached`] work that must complete before the node stops, in the tasks that it waits for.
pub fn detached_in<F>(
    tasks: &TaskTracker,
    work: F,
) -> impl Future<Output = Result<F::Output, Overdue>> + use<F>
where
    F: Future<Output: Send + 'static> + Send + 'static,
{
    let (tasks, work) = (tasks.clone(), bounded(work));
    async move { joined(tasks.spawn(work).await) }
}

fn joined<T>(ended: Result<Result<T, Overdue>, JoinError>) -> Result<T, Overdue> {
    match ended {
        Ok(output) => output,
        Err(failed) => match failed.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down.
            Err(_) => Err(Overdue),
        },
    }
}

/// Runs work that may be dropped at any point: it must not borrow connections, except in
/// [`detached`]. Builds with debug assertions panic if it does.
pub async fn without_connections<F: Future>(work: F) -> F::Output {
    match cfg!(debug_assertions) {
        true => LENDS_NONE.scope((), work).await,
        false => work.await,
    }
}

/// [`detached`] for work that can fail: no answer in time is one of its errors.
pub fn detached_query<T: Send + 'static>(
    work: impl Future<Output = sqlx::Result<T>> + Send + 'static,
) -> impl Future<Output = sqlx::Result<T>> {
    let work = detached(work);
    async move { work.await.unwrap_or_else(|overdue| Err(overdue.into())) }
}

/// [`bounded`] for work that can fail: no answer in time is one of its errors.
pub fn bounded_query<T>(
    work: impl Future<Output = sqlx::Result<T>>,
) -> impl Future<Output = sqlx::Result<T>> {
    let work = bounded(work);
    async move { work.await.unwrap_or_else(|overdue| Err(overdue.into())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENCE: Duration = Duration::from_millis(500);

    fn borrow(max_silence: Duration, health: &Arc<Health>) -> Arc<Loan> {
        let loan = Loan::new(max_silence, health);
        loan.enter();
        loan
    }

    async fn rest() {
        tokio::time::sleep(SILENCE / 2).await;
    }

    #[tokio::test]
    async fn work_that_borrows_nothing_may_take_any_time() {
        let work = async {
            drop(borrow(SILENCE, &Arc::default()));
            tokio::time::sleep(SILENCE * 2).await;
        };
        assert_eq!(bounded(work).await, Ok(()));
    }

    #[tokio::test]
    async fn a_silent_connection_stops_its_work() {
        let work = async {
            let _loan = borrow(SILENCE, &Arc::default());
            std::future::pending::<()>().await;
        };
        assert_eq!(bounded(work).await, Err(Overdue));
    }

    #[tokio::test]
    async fn progress_does_not_count_as_silence() {
        let work = async {
            let _loan = borrow(SILENCE, &Arc::default());
            for _ in 0..4 {
                rest().await;
            }
        };
        assert_eq!(bounded(work).await, Ok(()));
    }

    #[tokio::test]
    async fn a_statement_that_may_take_any_time_is_not_stopped() {
        let work = async {
            let loan = borrow(SILENCE, &Arc::default());
            loan.exempt();
            tokio::time::sleep(SILENCE * 2).await;
        };
        assert_eq!(bounded(work).await, Ok(()));
    }

    #[tokio::test]
    async fn what_is_dropped_with_stopped_work_knows_it() {
        struct Notes(Arc<AtomicBool>);
        impl Drop for Notes {
            fn drop(&mut self) {
                self.0.store(is_stopped(), Ordering::Relaxed);
            }
        }
        let was_stopped = Arc::new(AtomicBool::new(false));
        let notes = Notes(Arc::clone(&was_stopped));
        let work = async {
            let _loan = borrow(SILENCE, &Arc::default());
            let _notes = notes;
            std::future::pending::<()>().await;
        };
        assert_eq!(bounded(work).await, Err(Overdue));
        assert!(was_stopped.load(Ordering::Relaxed));
    }

    #[tokio::test]
    async fn a_known_silence_stops_work_sooner() {
        let health = Arc::new(Health::default());
        let work = async {
            let _loan = borrow(Duration::from_secs(3_600), &health);
            std::future::pending::<()>().await;
        };
        let alarm = async {
            rest().await;
            health.replaced();
        };
        assert_eq!(tokio::join!(bounded(work), alarm).0, Err(Overdue));
    }
}
