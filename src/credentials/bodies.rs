//! Large request bodies under way. What they take in memory is bounded, for each project and for
//! the node: those of one project wait for each other.

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;

use crate::{
    error::Error,
    ids::ProjectId,
    store::shares::{Memory, Room},
};

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
    fn of(&self, is_ack: bool) -> &Memory {
        if is_ack { &self.acks } else { &self.others }
    }

    /// Room for a body of this size; none is needed for a small one.
    ///
    /// # Errors
    /// [`Error::Overloaded`] when there is none in time.
    pub async fn take(
        &self,
        is_ack: bool,
        project_id: ProjectId,
        bytes: u64,
    ) -> Result<Option<Room>, Error> {
        if bytes <= SMALL_BODY_BYTES {
            return Ok(None);
        }
        let taken = timeout(ROOM_TIMEOUT, self.of(is_ack).take(project_id, bytes)).await;
        taken.ok().flatten().map(Some).ok_or(Error::Overloaded)
    }

    /// The room of a body whose size is not known before it was read.
    pub fn room_of(&self, is_ack: bool, project_id: ProjectId) -> GrowingRoom {
        let memory = self.of(is_ack).clone();
        GrowingRoom { memory, project_id, held: Vec::new(), bytes: SMALL_BODY_BYTES }
    }
}

/// Room that grows with the body.
#[derive(Debug, Clone)]
pub struct GrowingRoom {
    memory: Memory,
    project_id: ProjectId,
    held: Vec<Arc<Room>>,
    /// For this many bytes.
    bytes: u64,
}

impl GrowingRoom {
    /// Makes room for this many bytes in all.
    ///
    /// # Errors
    /// [`Error::Overloaded`] when there is none: a half-read body must not wait for another.
    pub fn grow(&mut self, bytes: u64) -> Result<(), Error> {
        while self.bytes < bytes {
            let more = self.memory.try_take(self.project_id, self.bytes);
            self.held.push(more.ok_or(Error::Overloaded)?.into());
            self.bytes *= 2;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_of_unknown_size_takes_room_while_it_grows() {
        const MIB: u64 = 1024 * 1024;
        let (bodies, project) = (Bodies::default(), ProjectId(1));
        let mut small = bodies.room_of(false, project);
        assert!(small.grow(SMALL_BODY_BYTES).is_ok() && small.held.is_empty());
        let mut rooms: Vec<_> = (0..2).map(|_| bodies.room_of(false, project)).collect();
        assert!(rooms.iter_mut().all(|it| it.grow(7 * MIB).is_ok()));
        assert!(matches!(bodies.room_of(false, project).grow(MIB), Err(Error::Overloaded)));
        assert!(bodies.room_of(false, ProjectId(2)).grow(MIB).is_ok());
        assert!(bodies.room_of(true, project).grow(MIB).is_ok(), "an ack waits for no enqueue");
        drop(rooms);
        assert!(bodies.room_of(false, project).grow(MIB).is_ok());
    }
}
