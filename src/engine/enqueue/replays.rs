//! The history of replays.

use fencepost_domain::{actor::ChangedBy, history, ids::JobKey};
use fencepost_store::jobs::{enqueue::NewJob, events::NewEvent};
use serde_json::json;

/// The event of a replay: it is one of the new job.
pub(crate) fn event(job: &NewJob, by: &ChangedBy) -> NewEvent {
    let key = JobKey { project_id: job.project_id, id: job.id };
    let of = job.extras.as_ref().and_then(|it| it.replay_of);
    let payload = Some(json!({ "replay_of": of }).to_string());
    NewEvent { payload, ..NewEvent::change(key, history::REPLAYED, by) }
}
