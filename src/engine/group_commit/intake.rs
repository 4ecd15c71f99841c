//! What waits to be written: projects take turns, and each has room of its own.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque, hash_map::Entry as Slot},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use fencepost_domain::{error::Error, ids::ProjectId};
use tokio::sync::{mpsc, oneshot};

use super::{GroupCommit, MAX_COMMIT_BYTES};

/// Room for waiting items, in KiB; an item takes one and its bytes.
pub(super) const MAX_WAITING_KIB: usize = 64 * 1024;
/// How much of it one project may take, in KiB.
pub(super) const MAX_WAITING_KIB_OF_PROJECT: usize = 16 * 1024;
/// Waiting items of one project that are looked at for one commit, as a multiple of its rows: many
/// may have a key that is in the commit already.
const LOOKED_AT_PER_ROW: usize = 2;
/// While several projects write, one gets at most this part of the rows of a commit: others wait
/// until a commit in flight is done, so it must not be long.
const SHARED_PART: usize = 5;
/// For how long after an item of another project several write.
const SHARED_TIME: Duration = Duration::from_secs(1);
/// Bytes that count as much as a row when projects take turns.
const BYTES_PER_ROW: usize = 1024;

/// The room for waiting items, shared by all callers.
#[derive(Debug, Default)]
pub(super) struct Room {
    taken_kib: Mutex<TakenKib>,
}

#[derive(Debug, Default)]
struct TakenKib {
    all: usize,
    by_project: HashMap<ProjectId, usize>,
}

/// Room that one item takes until it is answered.
#[derive(Debug)]
pub(super) struct TakenRoom {
    room: Arc<Room>,
    project_id: ProjectId,
    kib: usize,
}

impl Room {
    /// None: there is not enough.
    pub fn take(self: &Arc<Self>, project_id: ProjectId, bytes: usize) -> Option<TakenRoom> {
        let kib = 1 + bytes / 1024;
        let mut taken = self.taken_kib.lock().unwrap_or_else(PoisonError::into_inner);
        let of_project = taken.by_project.get(&project_id).copied().unwrap_or_default() + kib;
        if taken.all + kib > MAX_WAITING_KIB || of_project > MAX_WAITING_KIB_OF_PROJECT {
            return None;
        }
        taken.all += kib;
        taken.by_project.insert(project_id, of_project);
        Some(TakenRoom { room: Arc::clone(self), project_id, kib })
    }
}

impl Drop for TakenRoom {
    fn drop(&mut self) {
        let mut taken = self.room.taken_kib.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= self.kib;
        if let Slot::Occupied(mut slot) = taken.by_project.entry(self.project_id) {
            *slot.get_mut() -= self.kib;
            if *slot.get() == 0 {
                slot.remove();
            }
        }
    }
}

/// A caller that waits for an answer.
pub(super) struct Waiter<B: GroupCommit> {
    pub since: Instant,
    pub answer: oneshot::Sender<Result<B::Answer, Error>>,
    pub _room: TakenRoom,
}

/// An item, and who waits for it.
pub(super) struct Entry<B: GroupCommit> {
    pub item: B::Item,
    pub waiters: Vec<Waiter<B>>,
}

/// The waiting items of one project.
struct Lane<B: GroupCommit> {
    entries: VecDeque<Entry<B>>,
    /// Rows that it has written so far: the project with the least comes next.
    used: u64,
}

pub(super) struct Intake<B: GroupCommit> {
    receiver: mpsc::UnboundedReceiver<Entry<B>>,
    lanes: HashMap<ProjectId, Lane<B>>,
    /// `used` of the last project that came next: a new project begins there.
    turn: u64,
    waiting: usize,
    /// The last two projects, and when an item of each came last.
    latest: Option<(ProjectId, Instant)>,
    before: Option<(ProjectId, Instant)>,
}

/// Items of one commit.
pub(super) struct Cut<B: GroupCommit> {
    pub entries: Vec<Entry<B>>,
    /// Whether it is one item larger than other commits may be.
    pub is_heavy: bool,
    /// Whether other projects write, too.
    pub is_shared: bool,
}

impl<B: GroupCommit> Intake<B> {
    pub fn new(receiver: mpsc::UnboundedReceiver<Entry<B>>) -> Self {
        let (latest, before) = (None, None);
        Self { receiver, lanes: HashMap::new(), turn: 0, waiting: 0, latest, before }
    }

    /// Items that wait.
    pub fn waiting(&self) -> usize {
        self.waiting + self.receiver.len()
    }

    /// Waits for one more item. False: the end.
    pub async fn receive(&mut self) -> bool {
        let Some(entry) = self.receiver.recv().await else { return false };
        self.add(entry);
        true
    }

    fn add(&mut self, entry: Entry<B>) {
        let (project_id, turn) = (B::project(&entry.item), self.turn);
        let lane = self.lanes.entry(project_id);
        let lane = lane.or_insert_with(|| Lane { entries: VecDeque::new(), used: turn });
        lane.entries.push_back(entry);
        self.waiting += 1;
        if self.latest.is_some_and(|it| it.0 != project_id) {
            self.before = self.latest;
        }
        self.latest = Some((project_id, Instant::now()));
    }

    fn is_shared(&self) -> bool {
        self.before.is_some_and(|it| it.1.elapsed() < SHARED_TIME)
    }

    fn add_all(&mut self) {
        while let Ok(entry) = self.receiver.try_recv() {
            self.add(entry);
        }
    }

    /// Takes everything that waits.
    pub fn take_all(&mut self) -> impl Iterator<Item = Entry<B>> + use<B> {
        self.add_all();
        self.waiting = 0;
        std::mem::take(&mut self.lanes).into_values().flat_map(|it| it.entries)
    }

    /// Takes the items of the next commit, up to its limits. None: nothing may be written now. An
    /// item larger than [`MAX_COMMIT_BYTES`] is a commit of its own, and waits unless `heavy_may`.
    pub fn cut(&mut self, heavy_may: bool) -> Option<Cut<B>> {
        self.add_all();
        let mut cut = Building::<B>::default();
        let mut turns: BinaryHeap<_> =
            self.lanes.iter().map(|(id, it)| Reverse((it.used, *id))).collect();
        let is_shared = self.is_shared();
        // Of one project.
        let max_rows = if is_shared { (B::MAX_ROWS / SHARED_PART).max(1) } else { B::MAX_ROWS };
        // Items that were looked at, and rows.
        let mut taken: HashMap<ProjectId, (usize, usize)> = HashMap::new();
        let mut held_over: HashMap<ProjectId, Vec<Entry<B>>> = HashMap::new();
        while let Some(Reverse((used, project_id))) = turns.pop() {
            if cut.rows >= B::MAX_ROWS || cut.is_heavy {
                break;
            }
            let Some(lane) = self.lanes.get_mut(&project_id) else { continue };
            let Some(entry) = lane.entries.pop_front() else { continue };
            let (looked_at, rows) = taken.entry(project_id).or_default();
            *looked_at += 1;
            let more = B::rows(&entry.item);
            match cut.add(entry, heavy_may) {
                Added::Yes(cost) => {
                    self.turn = self.turn.max(used);
                    lane.used = used + cost;
                    *rows += more;
                    self.waiting -= 1;
                }
                Added::ToAnother => self.waiting -= 1,
                Added::KeyIsTaken(entry) => held_over.entry(project_id).or_default().push(entry),
                Added::NoRoom(entry) => {
                    // It is not owed the turns of others.
                    lane.used = lane.used.max(self.turn);
                    lane.entries.push_front(entry);
                    continue;
                }
            }
            if *looked_at < B::MAX_ROWS * LOOKED_AT_PER_ROW && *rows < max_rows {
                turns.push(Reverse((lane.used, project_id)));
            }
        }
        for (project_id, entries) in held_over {
            let Some(lane) = self.lanes.get_mut(&project_id) else { continue };
            entries.into_iter().rev().for_each(|it| lane.entries.push_front(it));
        }
        let turn = self.turn;
        // A project without items keeps its lane only while it has used more than the others.
        self.lanes.retain(|_, it| !it.entries.is_empty() || it.used > turn);
        if self.waiting == 0 {
            self.lanes.clear();
        }
        let is_heavy = cut.is_heavy;
        (!cut.entries.is_empty()).then_some(Cut { entries: cut.entries, is_heavy, is_shared })
    }
}

/// A commit to which items are added.
struct Building<B: GroupCommit> {
    entries: Vec<Entry<B>>,
    keys: HashMap<B::Key, usize>,
    rows: usize,
    bytes: usize,
    is_heavy: bool,
}

impl<B: GroupCommit> Default for Building<B> {
    fn default() -> Self {
        Self { entries: Vec::new(), keys: HashMap::new(), rows: 0, bytes: 0, is_heavy: false }
    }
}

enum Added<B: GroupCommit> {
    /// With its cost in rows.
    Yes(u64),
    /// It asks for the same as another item, and gets the same answer.
    ToAnother,
    KeyIsTaken(Entry<B>),
    NoRoom(Entry<B>),
}

impl<B: GroupCommit> Building<B> {
    fn add(&mut self, mut entry: Entry<B>, heavy_may: bool) -> Added<B> {
        let key = B::key(&entry.item);
        if let Some(at) = self.keys.get(&key) {
            let Some(other) = self.entries.get_mut(*at) else { return Added::KeyIsTaken(entry) };
            if !B::is_same(&other.item, &entry.item) {
                return Added::KeyIsTaken(entry);
            }
            other.waiters.append(&mut entry.waiters);
            return Added::ToAnother;
        }
        let (rows, bytes) = (B::rows(&entry.item), B::bytes(&entry.item));
        let is_heavy = bytes > MAX_COMMIT_BYTES;
        let fits = self.rows + rows <= B::MAX_ROWS && self.bytes + bytes <= MAX_COMMIT_BYTES;
        if is_heavy && !heavy_may || !self.entries.is_empty() && !fits {
            return Added::NoRoom(entry);
        }
        self.keys.insert(key, self.entries.len());
        self.rows += rows;
        self.bytes += bytes;
        self.is_heavy |= is_heavy;
        self.entries.push(entry);
        Added::Yes((rows + bytes / BYTES_PER_ROW) as u64)
    }
}
