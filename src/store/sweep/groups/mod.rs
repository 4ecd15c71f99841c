//! Groups across projects: which jobs of a group may run, and what holds them. See ADR 17.

pub mod admission;
pub mod noted;
pub mod pauses;
pub mod rooms;
pub mod turns;
pub mod walks;

use crate::groups::GroupKey;

/// Groups as columns of a statement.
struct GroupColumns<'a> {
    project_id: Vec<i32>,
    queue: Vec<&'a str>,
    group: Vec<&'a str>,
}

impl<'a> GroupColumns<'a> {
    fn of(groups: impl Iterator<Item = &'a GroupKey> + Clone) -> Self {
        Self {
            project_id: groups.clone().map(|it| it.project_id.0).collect(),
            queue: groups.clone().map(|it| it.queue.as_str()).collect(),
            group: groups.map(|it| it.group.as_str()).collect(),
        }
    }
}
