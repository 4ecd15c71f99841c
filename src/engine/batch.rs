//! Group commit: many concurrent calls, one statement. Calls that arrive while a batch is being
//! written form the next batch.
//!
//! There is no timer: an idle server adds no delay, a busy one batches by itself. Callers are
//! answered after the commit. No statement runs in a caller's future, so a caller that is dropped
//! cannot leave a connection in the middle of a transaction.

use std::{
    collections::{HashSet, VecDeque},
    future::Future,
    hash::Hash,
    sync::Arc,
    time::{Duration, Instant},
};

use metrics::{counter, histogram};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    task::JoinSet,
    time::timeout,
};

use crate::{
    error::{Error, is_faulty_statement},
    telemetry,
};

/// A second batch starts beside one in flight only if at least this many items wait: two small
/// batches cost more than one.
const SECOND_BATCH_ITEMS: usize = 64;
/// Batches of one kind in flight.
const MAX_BATCHES_IN_FLIGHT: usize = 2;
/// Bytes of one batch; a single larger item is a batch of its own.
const MAX_BATCH_BYTES: usize = 4 * 1024 * 1024;
/// Capacity for waiting items, in KiB; an item takes one and its bytes.
const MAX_WAITING_KIB: usize = 64 * 1024;
/// Tries of a batch that met a deadlock or lost its connection.
const MAX_TRIES: u32 = 3;
/// After this a batch is abandoned: the connection may be dead without an error.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(15);
/// The longest pause before the next try, in milliseconds.
const MAX_RETRY_PAUSE_MS: u64 = 50;

/// A kind of write that can be done for many callers at once.
pub trait Batch: Send + Sync + 'static {
    /// What one caller wants written.
    type Item: Send + Sync + 'static;
    /// What that caller is answered.
    type Answer: Send + 'static;
    /// Items with the same key never share a batch.
    type Key: Eq + Hash;
    /// The connection that a batch is written through.
    type Connection: Send + 'static;

    /// The name of this kind in metrics.
    const KIND: &'static str;
    /// Rows of one batch; a single larger item is a batch of its own.
    const MAX_ROWS: usize;

    /// Rows that the item becomes.
    fn rows(_item: &Self::Item) -> usize {
        1
    }

    /// Bytes that the item carries.
    fn bytes(item: &Self::Item) -> usize;

    /// See [`Self::Key`].
    fn key(item: &Self::Item) -> Self::Key;

    /// A connection to write through. It is kept from batch to batch while there is work.
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

struct Entry<B: Batch> {
    item: B::Item,
    since: Instant,
    answer: oneshot::Sender<Result<B::Answer, Error>>,
    _room: OwnedSemaphorePermit,
}

/// The callers' side of one kind of batch.
pub struct Coalescer<B: Batch> {
    entries: mpsc::UnboundedSender<Entry<B>>,
    room: Arc<Semaphore>,
}

impl<B: Batch> Clone for Coalescer<B> {
    fn clone(&self) -> Self {
        Self { entries: self.entries.clone(), room: Arc::clone(&self.room) }
    }
}

impl<B: Batch> Coalescer<B> {
    /// Starts the task that writes. It ends when the last caller's side is dropped and everything
    /// is written.
    pub fn start(batch: B) -> Self {
        // Bounded by `room`: every entry holds a permit until it is answered.
        let (entries, receiver) = mpsc::unbounded_channel();
        let intake = Intake { receiver, held_over: VecDeque::new() };
        tokio::spawn(run(Arc::new(batch), intake));
        Self { entries, room: Arc::new(Semaphore::new(MAX_WAITING_KIB)) }
    }

    /// Writes one item, together with others that wait.
    ///
    /// # Errors
    /// [`Error::Overloaded`] when too many items wait: nothing was written. [`Error::Unavailable`]
    /// when the database did not answer, after retries. Otherwise the batch's answer for this item.
    pub async fn submit(&self, item: B::Item) -> Result<B::Answer, Error> {
        let weight_kib = u32::try_from(1 + B::bytes(&item) / 1024).unwrap_or(u32::MAX);
        let Ok(room) = Arc::clone(&self.room).try_acquire_many_owned(weight_kib) else {
            counter!(telemetry::SHED, "kind" => B::KIND).increment(1);
            return Err(Error::Overloaded);
        };
        let (answer, answered) = oneshot::channel();
        let entry = Entry { item, since: Instant::now(), answer, _room: room };
        self.entries.send(entry).map_err(|_| Error::NotReady("the node is stopping"))?;
        // No answer: the batch panicked.
        answered.await.map_err(Error::internal)?
    }
}

struct Intake<B: Batch> {
    receiver: mpsc::UnboundedReceiver<Entry<B>>,
    /// Entries whose key was in the last batch already.
    held_over: VecDeque<Entry<B>>,
}

impl<B: Batch> Intake<B> {
    fn waiting(&self) -> usize {
        self.held_over.len() + self.receiver.len()
    }

    /// The next entry that is already waiting.
    fn next(&mut self) -> Option<Entry<B>> {
        self.held_over.pop_front().or_else(|| self.receiver.try_recv().ok())
    }

    /// Waits for something to write. False: the end.
    async fn wait(&mut self) -> bool {
        if self.held_over.is_empty() {
            match self.receiver.recv().await {
                Some(entry) => self.held_over.push_back(entry),
                None => return false,
            }
        }
        true
    }

    /// Fails every waiting caller: nothing of theirs is written.
    fn refuse_all(&mut self, error: &Error) {
        while let Some(entry) = self.next() {
            let _ = entry.answer.send(Err(error.clone()));
        }
    }

    /// Takes everything that waits, up to the limits of one batch.
    fn cut(&mut self) -> Vec<Entry<B>> {
        let (mut batch, mut held_over) = (Vec::new(), VecDeque::new());
        let mut keys = HashSet::new();
        let (mut rows, mut bytes) = (0, 0);
        while let Some(entry) = self.next() {
            let (more_rows, more_bytes) = (B::rows(&entry.item), B::bytes(&entry.item));
            let fits = rows + more_rows <= B::MAX_ROWS && bytes + more_bytes <= MAX_BATCH_BYTES;
            if !batch.is_empty() && !fits {
                held_over.push_back(entry);
                break;
            }
            if !keys.insert(B::key(&entry.item)) {
                held_over.push_back(entry);
                continue;
            }
            rows += more_rows;
            bytes += more_bytes;
            batch.push(entry);
        }
        held_over.append(&mut self.held_over);
        self.held_over = held_over;
        batch
    }
}

/// Starts a batch whenever the last one is done, and keeps its connection while there is something
/// to write.
async fn run<B: Batch>(batch: Arc<B>, mut intake: Intake<B>) {
    let mut batches_in_flight: JoinSet<CompletedBatch<B>> = JoinSet::new();
    let mut idle = Vec::new();
    loop {
        let is_busy = !batches_in_flight.is_empty();
        let may_cut =
            if is_busy { intake.waiting() >= SECOND_BATCH_ITEMS } else { intake.waiting() > 0 };
        if may_cut && batches_in_flight.len() < MAX_BATCHES_IN_FLIGHT {
            let (batch, entries) = (Arc::clone(&batch), intake.cut());
            // In a task of its own: a panic costs only this batch its answers.
            batches_in_flight.spawn(write(batch, idle.pop(), entries));
            continue;
        }
        if !is_busy {
            idle.clear();
        }
        tokio::select! {
            Some(completed) = batches_in_flight.join_next() => match completed {
                Ok(CompletedBatch { conn, no_connection }) => {
                    idle.extend(conn);
                    if let Some(error) = no_connection {
                        intake.refuse_all(&error);
                    }
                }
                Err(_) => counter!(telemetry::PANICS).increment(1),
            },
            is_open = intake.wait(), if !is_busy => if !is_open { return },
        }
    }
}

/// A completed batch, with its connection if it can be reused.
struct CompletedBatch<B: Batch> {
    conn: Option<B::Connection>,
    /// The pool was exhausted: everything queued fails with this, instead of timing out.
    no_connection: Option<Error>,
}

/// Writes one batch and answers its callers.
async fn write<B: Batch>(
    batch: Arc<B>,
    mut conn: Option<B::Connection>,
    entries: Vec<Entry<B>>,
) -> CompletedBatch<B> {
    if let Some(first) = entries.iter().map(|it| it.since).min() {
        histogram!(telemetry::BATCH_WAIT_SECONDS, "kind" => B::KIND)
            .record(first.elapsed().as_secs_f64());
    }
    let (mut items, mut callers) = (Vec::new(), Vec::new());
    for Entry { item, answer, _room, .. } in entries {
        items.push(item);
        callers.push((answer, _room));
    }
    let mut no_connection = None;
    let answers = match flush(&*batch, &mut conn, &items).await {
        Ok(answers) => answers,
        Err(error) if items.len() > 1 && is_faulty_statement(&error) => {
            flush_one_by_one(&*batch, &mut conn, &items).await
        }
        Err(error) => {
            let has_no_connection = matches!(error, sqlx::Error::PoolTimedOut);
            let error = Error::from(error);
            no_connection = Some(error.clone()).filter(|_| has_no_connection);
            items.iter().map(|_| Err(error.clone())).collect()
        }
    };
    debug_assert_eq!(answers.len(), callers.len(), "each caller is answered");
    for ((caller, _room), answer) in callers.into_iter().zip(answers) {
        // The caller may be gone: its answer is dropped.
        let _ = caller.send(answer);
    }
    CompletedBatch { conn, no_connection }
}

/// One bad item must not fail the others.
async fn flush_one_by_one<B: Batch>(
    batch: &B,
    conn: &mut Option<B::Connection>,
    items: &[B::Item],
) -> Vec<Result<B::Answer, Error>> {
    let mut answers = Vec::with_capacity(items.len());
    for item in items {
        let answer = match flush(batch, conn, std::slice::from_ref(item)).await {
            Ok(mut alone) => alone.pop().unwrap_or(Err(Error::InDoubt)),
            Err(error) => Err(error.into()),
        };
        answers.push(answer);
    }
    answers
}

/// Takes a connection if there is none, and drops one that failed.
async fn flush<B: Batch>(
    batch: &B,
    conn: &mut Option<B::Connection>,
    items: &[B::Item],
) -> sqlx::Result<Vec<Result<B::Answer, Error>>> {
    let started = Instant::now();
    let (mut tries, mut is_in_doubt) = (1, false);
    let flushed = loop {
        let flushing = flush_once(batch, conn, items, is_in_doubt);
        let flushed = timeout(FLUSH_TIMEOUT, flushing).await.unwrap_or_else(|_| Err(timed_out()));
        let Err(error) = flushed else { break flushed };
        is_in_doubt |= leaves_doubt(&error);
        counter!(telemetry::STORE_ERRORS, "kind" => B::KIND).increment(1);
        if tries == MAX_TRIES || !is_worth_another_try(&error) {
            break Err(error);
        }
        let pause_ms = rand::random_range(0..=MAX_RETRY_PAUSE_MS);
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        tries += 1;
    };
    let rows = items.iter().map(B::rows).sum::<usize>();
    histogram!(telemetry::BATCH_ITEMS, "kind" => B::KIND).record(rows as f64);
    histogram!(telemetry::BATCH_SECONDS, "kind" => B::KIND).record(started.elapsed().as_secs_f64());
    flushed
}

async fn flush_once<B: Batch>(
    batch: &B,
    conn: &mut Option<B::Connection>,
    items: &[B::Item],
    is_in_doubt: bool,
) -> sqlx::Result<Vec<Result<B::Answer, Error>>> {
    let mut taken = match conn.take() {
        Some(conn) => conn,
        None => batch.connect().await?,
    };
    // The failed connection is dropped here; its pool decides whether to reuse it.
    let answers = batch.flush(&mut taken, items, is_in_doubt).await?;
    *conn = Some(taken);
    Ok(answers)
}

fn timed_out() -> sqlx::Error {
    sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())
}

/// Whether the commit may have happened. An error from PostgreSQL itself means no, except for a
/// duplicate id: then an earlier try committed.
fn leaves_doubt(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(it) => it.code().as_deref() == Some(UNIQUE_VIOLATION),
        sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => false,
        _ => true,
    }
}

const UNIQUE_VIOLATION: &str = "23505";

/// A lost connection, a deadlock, or a lock timeout. An exhausted pool has waited long enough.
fn is_worth_another_try(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => false,
        // The commit in doubt may complete while it is looked up: then its rows exist now.
        sqlx::Error::Database(it) if it.code().as_deref() == Some(UNIQUE_VIOLATION) => true,
        other => !is_faulty_statement(other),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex as StdMutex;

    use super::*;
    use tokio::sync::Mutex;

    /// Remembers its batches; fails like a bad statement if a batch contains a 13.
    #[derive(Clone, Default)]
    struct Recorder {
        batches: Arc<StdMutex<Vec<Vec<u32>>>>,
        gate: Arc<Mutex<()>>,
    }

    impl Batch for Recorder {
        type Item = u32;
        type Answer = u32;
        type Key = u32;
        type Connection = ();
        const KIND: &'static str = "test";
        const MAX_ROWS: usize = 4;

        fn bytes(_: &u32) -> usize {
            1
        }
        fn key(item: &u32) -> u32 {
            item % 100
        }
        async fn connect(&self) -> sqlx::Result<()> {
            Ok(())
        }
        async fn flush(
            &self,
            (): &mut (),
            items: &[u32],
            _: bool,
        ) -> sqlx::Result<Vec<Result<u32, Error>>> {
            let _open = self.gate.lock().await;
            if items.contains(&13) {
                return Err(sqlx::Error::Decode("thirteen".into()));
            }
            self.batches.lock().expect("no panic").push(items.to_vec());
            Ok(items.iter().map(|it| Ok(it * 2)).collect())
        }
    }

    /// Submits all items, behind two sacrificial ones, before any is written.
    async fn submit_together(recorder: &Recorder, items: &[u32]) -> Vec<Result<u32, Error>> {
        let coalescer = Coalescer::start(recorder.clone());
        let closed = Arc::clone(&recorder.gate).lock_owned().await;
        let mut calls = futures_util::future::join_all(
            [1001, 1002].iter().chain(items).map(|it| coalescer.submit(*it)),
        );
        // All are submitted before the gate opens; the first two end up in flight.
        futures_util::future::poll_fn(|ctx| {
            let _ = std::pin::Pin::new(&mut calls).poll(ctx);
            std::task::Poll::Ready(())
        })
        .await;
        drop(closed);
        calls.await.split_off(2)
    }

    #[tokio::test]
    async fn every_caller_gets_its_own_answer_and_batches_stay_within_their_bound() {
        let recorder = Recorder::default();
        let answers = submit_together(&recorder, &[3, 4, 5, 6, 7, 8, 9]).await;
        let answers: Vec<_> = answers.into_iter().map(|it| it.expect("answered")).collect();
        assert_eq!(answers, [6, 8, 10, 12, 14, 16, 18]);
        let batches = recorder.batches.lock().expect("no panic").clone();
        assert!(batches.iter().all(|it| it.len() <= Recorder::MAX_ROWS));
        assert!(batches.len() < 9, "nine items shared batches: {batches:?}");
    }

    #[tokio::test]
    async fn two_items_of_one_key_never_share_a_batch() {
        let recorder = Recorder::default();
        submit_together(&recorder, &[5, 105, 205, 6]).await;
        let batches = recorder.batches.lock().expect("no panic").clone();
        for batch in &batches {
            let keys: HashSet<_> = batch.iter().map(Recorder::key).collect();
            assert_eq!(keys.len(), batch.len(), "{batches:?}");
        }
        assert_eq!(batches.iter().map(Vec::len).sum::<usize>(), 6);
    }

    #[tokio::test]
    async fn a_bad_item_harms_no_other() {
        let recorder = Recorder::default();
        let answers = submit_together(&recorder, &[3, 13, 4]).await;
        assert_eq!(answers.iter().filter(|it| it.is_ok()).count(), 2);
        assert!(matches!(answers[1], Err(Error::Internal(_))));
    }

    #[tokio::test]
    async fn what_does_not_fit_is_shed_and_nothing_of_it_is_written() {
        let coalescer = Coalescer::start(Recorder::default());
        coalescer.room.forget_permits(MAX_WAITING_KIB);
        assert!(matches!(coalescer.submit(1).await, Err(Error::Overloaded)));
    }
}
