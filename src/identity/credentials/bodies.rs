//! Large request bodies under way. What they take in memory is bounded, for each project and for
//! the node: those of one project wait for each other.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use fencepost_domain::{error::Error, ids::ProjectId};
use tokio::time::timeout;

use fencepost_fair::memory::{Memory, Room};

/// Bodies below this many bytes are not counted.
pub const SMALL_BODY_BYTES: u64 = 64 * 1024;
/// KiB of large bodies under way, of one project: of enqueues and the like, and as many again of
/// acks and heartbeats, which must not wait for the others.
pub const MAX_PROJECT_BODY_KIB: usize = 16 * 1024;
/// The same of one node.
pub const MAX_NODE_BODY_KIB: usize = 64 * 1024;
/// How long a body waits for others of its project.
const ROOM_TIMEOUT: Duration = Duration::from_secs(3);

/// The large bodies of one node. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Bodies {
    acks: Memory,
    others: Memory,
}

impl Default for Bodies {
    fn default() -> Self {
        let memory = || Memory::new(MAX_PROJECT_BODY_KIB, MAX_NODE_BODY_KIB);
        Self { acks: memory(), others: memory() }
    }
}

impl Bodies {
    /// The room of a body.
    #[must_use]
    pub fn room_of(&self, is_ack: bool, project_id: ProjectId) -> BodyRoom {
        let memory = if is_ack { &self.acks } else { &self.others }.clone();
        BodyRoom { memory, project_id, held: Arc::default() }
    }
}

/// Room that grows with a body, as its bytes arrive: a length that is only announced takes none.
/// All clones are of the same body; the room is free when the last one is dropped.
#[derive(Debug, Clone)]
pub struct BodyRoom {
    memory: Memory,
    project_id: ProjectId,
    held: Arc<Mutex<Vec<Room>>>,
}

impl BodyRoom {
    /// Makes room for this many bytes in all.
    ///
    /// # Errors
    /// [`Error::Overloaded`] when there is none in time.
    pub async fn grow(&self, bytes: u64) -> Result<(), Error> {
        while self.bytes() < bytes {
            let more = self.memory.take(self.project_id, self.bytes());
            let more = timeout(ROOM_TIMEOUT, more).await.ok().flatten().ok_or(Error::Overloaded)?;
            self.lock().push(more);
        }
        Ok(())
    }

    /// For how many bytes there is room: each part has doubled it.
    fn bytes(&self) -> u64 {
        SMALL_BODY_BYTES << self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Room>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_body_takes_room_while_it_grows_and_until_its_request_ends() {
        const MIB: u64 = 1024 * 1024;
        let (bodies, project) = (Bodies::default(), ProjectId(1));
        let has_grown = |room: &BodyRoom, bytes| room.grow(bytes).now_or_never().is_some();
        let small = bodies.room_of(false, project);
        assert!(has_grown(&small, SMALL_BODY_BYTES));
        assert!(small.lock().is_empty());
        let rooms = [bodies.room_of(false, project), bodies.room_of(false, project)];
        assert!(rooms.iter().all(|it| has_grown(it, 7 * MIB)));
        assert!(!has_grown(&bodies.room_of(false, project), MIB), "it waits");
        assert!(has_grown(&bodies.room_of(false, ProjectId(2)), MIB));
        assert!(has_grown(&bodies.room_of(true, project), MIB), "an ack waits for no enqueue");
        let of_request = rooms.clone();
        drop(rooms);
        assert!(!has_grown(&bodies.room_of(false, project), MIB));
        drop(of_request);
        assert!(has_grown(&bodies.room_of(false, project), MIB));
    }
}
