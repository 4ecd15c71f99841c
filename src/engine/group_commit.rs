//! Group commit: many concurrent calls, one statement. Calls that arrive while a commit is being
//! written form the next commit.
//!
//! There is no timer: an idle server adds no delay, a busy one groups by itself. Callers are
//! answered after the commit. No statement runs in a caller's future, so a caller that is dropped
//! cannot leave a connection in the middle of a transaction.

mod intake;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    future::Future,
    hash::Hash,
    sync::Arc,
    time::{Duration, Instant},
};

use fencepost_domain::{
    error::{Error, is_faulty_statement, is_lock_timeout, is_unique_violation},
    ids::ProjectId,
};
use fencepost_signals::telemetry;
use fencepost_store::{
    connection::{deadline::bounded_query, pools::Kept},
    faults,
};
use metrics::{counter, histogram};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};

use self::intake::{Cut, Entry, Intake, Room, Waiter};

/// A second commit starts beside one in flight only if at least this many items wait: two small
/// commits cost more than one.
const SECOND_COMMIT_ITEMS: usize = 64;
/// Commits of one kind in flight, beside a heavy one.
const MAX_COMMITS_IN_FLIGHT: usize = 2;
/// Bytes of one commit; a single larger item is a commit of its own, and one of these at a time is
/// in flight.
const MAX_COMMIT_BYTES: usize = 1024 * 1024;
/// Tries of a commit whose failure may pass.
const MAX_TRIES: u32 = 3;
/// After this a commit is tried again only after a duplicate id: its callers must be answered.
const RETRY_TIME: Duration = Duration::from_secs(1);
/// The longest pause before the next try, in milliseconds.
const MAX_RETRY_PAUSE_MS: u64 = 50;
/// While other projects write, a heavy commit is followed by a rest of this many times its length.
const HEAVY_REST_PARTS: u32 = 4;
/// The longest rest after a heavy commit.
const MAX_HEAVY_REST: Duration = Duration::from_millis(250);

/// A kind of write that can be done for many callers at once.
pub trait GroupCommit: Send + Sync + 'static {
    /// The write of one caller.
    type Item: Clone + Send + Sync + 'static;
    /// The answer to that caller.
    type Answer: Clone + Send + 'static;
    /// Items with the same key never share a commit.
    type Key: Eq + Hash + Send;
    /// The connection that a commit is written through.
    type Connection: Kept + 'static;

    /// The name of this kind in metrics.
    const KIND: &'static str;
    /// Rows of one commit; a single larger item is a commit of its own.
    const MAX_ROWS: usize;

    /// Rows that the item becomes.
    fn rows(_item: &Self::Item) -> usize {
        1
    }

    /// Bytes that the item carries.
    fn bytes(item: &Self::Item) -> usize;

    /// See [`Self::Key`].
    fn key(item: &Self::Item) -> Self::Key;

    /// Whose item it is.
    fn project(item: &Self::Item) -> ProjectId;

    /// Whether two items of one key ask for the same thing and may get the same answer.
    fn is_same(_one: &Self::Item, _other: &Self::Item) -> bool {
        false
    }

    /// A connection to write through. It is kept from commit to commit while there is work.
    fn connect(&self) -> impl Future<Output = sqlx::Result<Self::Connection>> + Send;

    /// Writes the items in one commit and returns answers in their order. All or nothing: after an
    /// `Err` nothing was written, or the outcome is unknown. In the second case it is called again
    /// with `is_in_doubt`, and must find out.
    fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[Self::Item],
        is_in_doubt: bool,
    ) -> impl Future<Output = sqlx::Result<Vec<Result<Self::Answer, Error>>>> + Send;
}

/// The callers' side of one kind of commit.
pub struct Coalescer<B: GroupCommit> {
    entries: mpsc::UnboundedSender<Entry<B>>,
    room: Arc<Room>,
}

impl<B: GroupCommit> Clone for Coalescer<B> {
    fn clone(&self) -> Self {
        Self { entries: self.entries.clone(), room: Arc::clone(&self.room) }
    }
}

impl<B: GroupCommit> Coalescer<B> {
    /// Starts the task that writes. It ends when the last caller's side is dropped and everything
    /// is written.
    pub fn start(commit: B) -> Self {
        // Bounded by `room`: every entry holds some until it is answered.
        let (entries, receiver) = mpsc::unbounded_channel();
        tokio::spawn(run(Arc::new(commit), Intake::new(receiver)));
        Self { entries, room: Arc::default() }
    }

    /// Writes one item, together with others that wait.
    ///
    /// # Errors
    /// [`Error::Overloaded`] when too many items wait, of all projects or of this one: nothing was
    /// written. [`Error::Unavailable`] when the database did not answer, after retries. Otherwise
    /// the commit's answer for this item.
    pub async fn submit(&self, item: B::Item) -> Result<B::Answer, Error> {
        let Some(room) = self.room.take(B::project(&item), B::bytes(&item)) else {
            counter!(telemetry::SHED, "kind" => B::KIND).increment(1);
            return Err(Error::Overloaded);
        };
        let (answer, answered) = oneshot::channel();
        let waiter = Waiter { since: Instant::now(), answer, _room: room };
        let entry = Entry { item, waiters: vec![waiter] };
        self.entries.send(entry).map_err(|_| Error::NotReady("the node is stopping"))?;
        // No answer: the commit panicked.
        answered.await.map_err(Error::internal)?
    }
}

/// Starts a commit whenever the last one is done, and keeps its connection while there is something
/// to write.
async fn run<B: GroupCommit>(commit: Arc<B>, mut intake: Intake<B>) {
    let mut commits_in_flight: JoinSet<CompletedCommit<B>> = JoinSet::new();
    // The heavy commit in flight holds a second reference, also while it panics.
    let heavy = Arc::new(());
    let (mut idle, mut is_open) = (Vec::new(), true);
    loop {
        let in_flight = commits_in_flight.len();
        let has_heavy = Arc::strong_count(&heavy) > 1;
        // A heavy commit delays no others.
        let light_in_flight = in_flight.saturating_sub(usize::from(has_heavy));
        let may_cut = light_in_flight == 0 || intake.waiting() >= SECOND_COMMIT_ITEMS;
        let cut =
            (may_cut && light_in_flight < MAX_COMMITS_IN_FLIGHT).then(|| intake.cut(!has_heavy));
        if let Some(Cut { entries, is_heavy, is_shared }) = cut.flatten() {
            let (commit, conn, heavy) = (Arc::clone(&commit), idle.pop(), Arc::clone(&heavy));
            // In a task of its own: a panic costs only this commit its answers.
            match is_heavy {
                true => {
                    commits_in_flight.spawn(write_heavy(commit, conn, entries, heavy, is_shared))
                }
                false => commits_in_flight.spawn(write(commit, conn, entries)),
            };
            continue;
        }
        if in_flight == 0 {
            if !is_open {
                return;
            }
            idle.clear();
        }
        tokio::select! {
            Some(completed) = commits_in_flight.join_next() => match completed {
                Ok(CompletedCommit { conn, no_connection }) => {
                    idle.extend(conn);
                    if let Some(error) = no_connection {
                        refuse_all(&mut intake, &error);
                    }
                }
                Err(_) => counter!(telemetry::PANICS).increment(1),
            },
            more = intake.receive(), if is_open && light_in_flight == 0 => is_open = more,
        }
    }
}

/// Fails every waiting caller: nothing of theirs is written.
fn refuse_all<B: GroupCommit>(intake: &mut Intake<B>, error: &Error) {
    for waiter in intake.take_all().flat_map(|it| it.waiters) {
        let _ = waiter.answer.send(Err(error.clone()));
    }
}

/// A completed commit, with its connection if it can be reused.
struct CompletedCommit<B: GroupCommit> {
    conn: Option<B::Connection>,
    /// The pool was exhausted: everything queued fails with this, instead of timing out.
    no_connection: Option<Error>,
}

/// Writes one heavy commit. While other projects write, the next one waits for a multiple of its
/// time, up to [`MAX_HEAVY_REST`].
async fn write_heavy<B: GroupCommit>(
    commit: Arc<B>,
    conn: Option<B::Connection>,
    entries: Vec<Entry<B>>,
    _heavy: Arc<()>,
    is_shared: bool,
) -> CompletedCommit<B> {
    let started = Instant::now();
    let mut completed = write(commit, conn, entries).await;
    if is_shared {
        // Nothing holds a connection while it rests.
        completed.conn = None;
        tokio::time::sleep((HEAVY_REST_PARTS * started.elapsed()).min(MAX_HEAVY_REST)).await;
    }
    completed
}

/// Writes one commit and answers its callers.
async fn write<B: GroupCommit>(
    commit: Arc<B>,
    mut conn: Option<B::Connection>,
    entries: Vec<Entry<B>>,
) -> CompletedCommit<B> {
    let since = entries.iter().flat_map(|it| it.waiters.iter().map(|it| it.since));
    if let Some(first) = since.min() {
        histogram!(telemetry::BATCH_WAIT_SECONDS, "kind" => B::KIND)
            .record(first.elapsed().as_secs_f64());
    }
    let (items, callers): (Vec<_>, Vec<_>) =
        entries.into_iter().map(|it| (it.item, it.waiters)).unzip();
    let mut no_connection = None;
    let Flushed { answers, is_in_doubt } = flush(&*commit, &mut conn, &items, false).await;
    let answers = match answers {
        Ok(answers) => answers,
        Err(error) if items.len() > 1 && is_lock_timeout(&error) => {
            let mut by_project: BTreeMap<_, Vec<_>> = BTreeMap::new();
            for (number, item) in items.iter().enumerate() {
                by_project.entry(B::project(item)).or_default().push(number);
            }
            let parts = by_project.into_values();
            flush_apart(&*commit, &mut conn, (&items, parts), is_in_doubt).await
        }
        Err(error) if items.len() > 1 && is_faulty_statement(&error) => {
            let parts = (0..items.len()).map(|it| vec![it]);
            flush_apart(&*commit, &mut conn, (&items, parts), is_in_doubt).await
        }
        Err(error) => {
            let has_no_connection = matches!(error, sqlx::Error::PoolTimedOut);
            let error = failure(error, is_in_doubt);
            no_connection = Some(error.clone()).filter(|_| has_no_connection);
            items.iter().map(|_| Err(error.clone())).collect()
        }
    };
    debug_assert_eq!(answers.len(), callers.len(), "each caller is answered");
    for (waiters, answer) in callers.into_iter().zip(answers) {
        for waiter in waiters {
            // The caller may be gone: its answer is dropped.
            let _ = waiter.answer.send(answer.clone());
        }
    }
    CompletedCommit { conn, no_connection }
}

/// Flushes parts of a commit one after the other: a locked row must not fail other projects,
/// and a bad item no other item. A part that fails for another reason ends it.
async fn flush_apart<B: GroupCommit>(
    commit: &B,
    conn: &mut Option<B::Connection>,
    (items, parts): (&[B::Item], impl Iterator<Item = Vec<usize>>),
    is_in_doubt: bool,
) -> Vec<Result<B::Answer, Error>> {
    let mut answers: Vec<Option<_>> = items.iter().map(|_| None).collect();
    let mut end = Error::InDoubt;
    for numbers in parts {
        let part: Vec<_> = numbers.iter().filter_map(|it| items.get(*it).cloned()).collect();
        let flushed = flush(commit, conn, &part, is_in_doubt).await;
        let (answered, may_continue) = match flushed.answers {
            Ok(answered) => (answered, true),
            Err(error) => {
                let may_continue = is_lock_timeout(&error) || is_faulty_statement(&error);
                end = failure(error, flushed.is_in_doubt);
                (vec![Err(end.clone()); part.len()], may_continue)
            }
        };
        for (number, answer) in numbers.into_iter().zip(answered) {
            answers[number] = Some(answer);
        }
        if !may_continue {
            break;
        }
    }
    answers.into_iter().map(|it| it.unwrap_or_else(|| Err(end.clone()))).collect()
}

/// The answer to the callers. A statement that timed out on a lock or met a duplicate id wrote
/// nothing, but an earlier try may have been written.
fn failure(error: sqlx::Error, is_in_doubt: bool) -> Error {
    let wrote_nothing = is_lock_timeout(&error) || is_unique_violation(&error);
    if is_in_doubt && wrote_nothing { Error::InDoubt } else { error.into() }
}

/// The result of a flush, after its last try.
struct Flushed<B: GroupCommit> {
    answers: sqlx::Result<Vec<Result<B::Answer, Error>>>,
    /// Whether a failed try may have been written.
    is_in_doubt: bool,
}

/// Takes a connection if there is none, and drops one that failed.
async fn flush<B: GroupCommit>(
    commit: &B,
    conn: &mut Option<B::Connection>,
    items: &[B::Item],
    mut is_in_doubt: bool,
) -> Flushed<B> {
    let started = Instant::now();
    let mut tries = 1;
    let flushed = loop {
        let flushed = bounded_query(flush_once(commit, conn, items, is_in_doubt)).await;
        let Err(error) = flushed else { break flushed };
        is_in_doubt |= leaves_doubt(&error);
        counter!(telemetry::STORE_ERRORS, "kind" => B::KIND).increment(1);
        // The next try looks a duplicate id up, and waits for no lock: it is never too late.
        let is_late = started.elapsed() > RETRY_TIME && !is_unique_violation(&error);
        let may_retry = !is_lock_timeout(&error) && is_worth_another_try(&error);
        if is_late || tries == MAX_TRIES || !may_retry {
            break Err(error);
        }
        let pause_ms = rand::random_range(0..=MAX_RETRY_PAUSE_MS);
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        tries += 1;
    };
    let rows = items.iter().map(B::rows).sum::<usize>();
    histogram!(telemetry::BATCH_ITEMS, "kind" => B::KIND).record(rows as f64);
    histogram!(telemetry::BATCH_SECONDS, "kind" => B::KIND).record(started.elapsed().as_secs_f64());
    Flushed { answers: flushed, is_in_doubt }
}

async fn flush_once<B: GroupCommit>(
    commit: &B,
    conn: &mut Option<B::Connection>,
    items: &[B::Item],
    is_in_doubt: bool,
) -> sqlx::Result<Vec<Result<B::Answer, Error>>> {
    let mut taken = match conn.take().and_then(Kept::reuse) {
        Some(conn) => conn,
        None => commit.connect().await?,
    };
    // If a line below fails, the connection is dropped: its pool decides whether to reuse it.
    faults::before_commit(B::KIND)?;
    let answers = commit.flush(&mut taken, items, is_in_doubt).await?;
    faults::after_commit(B::KIND)?;
    *conn = Some(taken);
    Ok(answers)
}

/// Whether the commit may have happened. An error from PostgreSQL itself means no, except for a
/// duplicate id: then an earlier try committed.
pub(super) fn leaves_doubt(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(_) => is_unique_violation(error),
        sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => false,
        _ => true,
    }
}

/// Any failure but that of the statement itself. An exhausted pool has waited long enough.
fn is_worth_another_try(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => false,
        // The commit in doubt may complete while it is looked up: then its rows exist now.
        other => is_unique_violation(other) || !is_faulty_statement(other),
    }
}
