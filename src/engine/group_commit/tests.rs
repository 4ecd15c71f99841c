//! Commits, their bounds, and who is answered what.

use std::{collections::HashSet, sync::Mutex as StdMutex};

use super::{
    intake::{MAX_WAITING_KIB, MAX_WAITING_KIB_OF_PROJECT},
    *,
};
use sqlx::error::{DatabaseError, ErrorKind};
use tokio::sync::Mutex;

/// The error of PostgreSQL about an id that exists.
#[derive(Debug, thiserror::Error)]
#[error("duplicate key value violates unique constraint")]
struct DuplicateId;

impl DatabaseError for DuplicateId {
    fn message(&self) -> &'static str {
        "duplicate key value violates unique constraint"
    }
    fn as_error(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        self
    }
    fn as_error_mut(&mut self) -> &mut (dyn std::error::Error + Send + Sync + 'static) {
        self
    }
    fn into_error(self: Box<Self>) -> Box<dyn std::error::Error + Send + Sync + 'static> {
        self
    }
    fn kind(&self) -> ErrorKind {
        ErrorKind::UniqueViolation
    }
}

/// Remembers its commits. Fails like a bad statement if a commit contains a 13. A 14 is written by
/// an earlier try, and the next one finds it. A 15 is never found.
#[derive(Clone, Default)]
struct Recorder {
    commits: Arc<StdMutex<Vec<Vec<u32>>>>,
    gate: Arc<Mutex<()>>,
}

struct NoConnection;

impl Kept for NoConnection {
    fn reuse(self) -> Option<Self> {
        Some(self)
    }
}

impl GroupCommit for Recorder {
    type Item = u32;
    type Answer = u32;
    type Key = u32;
    type Connection = NoConnection;
    const KIND: &'static str = "test";
    const MAX_ROWS: usize = 4;

    fn bytes(_: &u32) -> usize {
        1
    }
    fn key(item: &u32) -> u32 {
        item % 100
    }
    fn project(item: &u32) -> ProjectId {
        ProjectId(if *item < 10_000 { 1 } else { 2 })
    }
    fn is_same(one: &u32, other: &u32) -> bool {
        one == other
    }
    async fn connect(&self) -> sqlx::Result<NoConnection> {
        Ok(NoConnection)
    }
    async fn flush(
        &self,
        _: &mut NoConnection,
        items: &[u32],
        is_in_doubt: bool,
    ) -> sqlx::Result<Vec<Result<u32, Error>>> {
        let _open = self.gate.lock().await;
        let is_duplicate = items.contains(&15) || (items.contains(&14) && !is_in_doubt);
        if is_duplicate {
            return Err(sqlx::Error::Database(Box::new(DuplicateId)));
        }
        if items.contains(&13) {
            return Err(sqlx::Error::Decode("thirteen".into()));
        }
        self.commits.lock().expect("no panic").push(items.to_vec());
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
async fn every_caller_gets_its_own_answer_and_commits_stay_within_their_bound() {
    let recorder = Recorder::default();
    let answers = submit_together(&recorder, &[3, 4, 5, 6, 7, 8, 9]).await;
    let answers: Vec<_> = answers.into_iter().map(|it| it.expect("answered")).collect();
    assert_eq!(answers, [6, 8, 10, 12, 14, 16, 18]);
    let commits = recorder.commits.lock().expect("no panic").clone();
    assert!(commits.iter().all(|it| it.len() <= Recorder::MAX_ROWS));
    assert!(commits.len() < 9, "nine items shared commits: {commits:?}");
}

#[tokio::test]
async fn two_items_of_one_key_never_share_a_commit() {
    let recorder = Recorder::default();
    submit_together(&recorder, &[5, 105, 205, 6]).await;
    let commits = recorder.commits.lock().expect("no panic").clone();
    for commit in &commits {
        let keys: HashSet<_> = commit.iter().map(Recorder::key).collect();
        assert_eq!(keys.len(), commit.len(), "{commits:?}");
    }
    assert_eq!(commits.iter().map(Vec::len).sum::<usize>(), 6);
}

#[tokio::test]
async fn a_bad_item_harms_no_other() {
    let recorder = Recorder::default();
    let answers = submit_together(&recorder, &[3, 13, 4]).await;
    assert_eq!(answers.iter().filter(|it| it.is_ok()).count(), 2);
    assert!(matches!(answers[1], Err(Error::Internal(_))));
}

#[tokio::test]
async fn what_an_earlier_try_has_written_is_looked_up() {
    let recorder = Recorder::default();
    let answers = submit_together(&recorder, &[14]).await;
    assert!(matches!(answers[0], Ok(28)), "{answers:?}");
    let answers = submit_together(&recorder, &[15]).await;
    assert!(matches!(answers[0], Err(Error::InDoubt)), "{answers:?}");
}

#[tokio::test]
async fn the_same_item_twice_is_written_once_and_answered_twice() {
    let recorder = Recorder::default();
    let answers = submit_together(&recorder, &[5, 5, 5, 6]).await;
    assert!(answers.iter().take(3).all(|it| matches!(it, Ok(10))), "{answers:?}");
    let commits = recorder.commits.lock().expect("no panic").clone();
    assert_eq!(commits.iter().flatten().filter(|it| **it == 5).count(), 1, "{commits:?}");
}

#[tokio::test]
async fn projects_take_turns() {
    let recorder = Recorder::default();
    let many = (20..60).chain([10_001, 10_002]).collect::<Vec<_>>();
    submit_together(&recorder, &many).await;
    let commits = recorder.commits.lock().expect("no panic").clone();
    let of_the_other = commits.iter().position(|it| it.contains(&10_002));
    assert!(of_the_other.is_some_and(|it| it <= 3), "{commits:?}");
    // The first two were written before the other project came; then none fills a commit.
    let of_one = |it: &Vec<u32>| it.iter().filter(|it| **it < 10_000).count();
    assert!(commits.iter().skip(2).all(|it| of_one(it) <= 1), "{commits:?}");
}

#[tokio::test]
async fn what_does_not_fit_is_shed_and_nothing_of_it_is_written() {
    let coalescer = Coalescer::start(Recorder::default());
    let (one, other) = (ProjectId(1), ProjectId(2));
    let most = (MAX_WAITING_KIB_OF_PROJECT - 1) * 1024;
    let taken = coalescer.room.take(one, most).expect("room");
    assert!(matches!(coalescer.submit(1).await, Err(Error::Overloaded)));
    assert!(matches!(coalescer.submit(10_001).await, Ok(20_002)), "another has its own");
    drop(taken);
    assert!(matches!(coalescer.submit(1).await, Ok(2)));
    let projects = MAX_WAITING_KIB / MAX_WAITING_KIB_OF_PROJECT;
    let all: Vec<_> = (10..10 + projects as i32)
        .map(|it| coalescer.room.take(ProjectId(it), most).expect("room"))
        .collect();
    assert!(coalescer.room.take(other, 0).is_none(), "all of it is taken");
    drop(all);
}
