//! Checkpoints in the calls of workers.

use fencepost_domain::{error::Error, ids::JobKey, lease::Fence, limits};
use fencepost_engine::settle::checkpoints::{self, NewCheckpoint, Saved, SentCheckpoint};
use fencepost_web::{app::App, auth::Caller, wire::validate::Check};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

/// What became of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointStatus {
    /// It is stored: the next lease of the job brings it.
    Stored,
    /// A later one is stored, or another with this sequence.
    Stale,
    /// Not stored: the project has stored all of its bytes.
    Full,
}

impl From<Saved> for CheckpointStatus {
    fn from(saved: Saved) -> Self {
        match saved {
            Saved::Stored => Self::Stored,
            Saved::Stale => Self::Stale,
            Saved::Full => Self::Full,
        }
    }
}

/// The checkpoint of a request: both fields, or neither.
///
/// # Errors
/// [`Error::FieldTooLarge`]; other broken rules are added to `check`.
pub fn accept(
    check: &mut Check,
    data: Option<Box<RawValue>>,
    sequence: Option<i64>,
) -> Result<Option<NewCheckpoint>, Error> {
    if let Some(sequence) = sequence {
        check.range("checkpoint_sequence", sequence, 0, limits::MAX_CHECKPOINT_SEQUENCE);
    }
    let (data, sequence) = match (data, sequence) {
        (Some(data), Some(sequence)) => (data, sequence),
        (Some(_), None) => {
            check.refuse("checkpoint_sequence", "must be sent together with checkpoint");
            return Ok(None);
        }
        (None, Some(_)) => {
            check.refuse("checkpoint", "must be sent together with checkpoint_sequence");
            return Ok(None);
        }
        (None, None) => return Ok(None),
    };
    check.size("checkpoint", &data, limits::MAX_CHECKPOINT_BYTES)?;
    check.depth("checkpoint", &data);
    Ok(Some(NewCheckpoint { sequence, data: Box::<str>::from(data).into_string() }))
}

/// Reads a checkpoint. `null` is one, too.
pub fn read<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(from).map(Some)
}

/// Stores the checkpoint of one call. None: its fence does not hold.
pub async fn save<P>(
    app: &App,
    caller: &Caller<P>,
    key: JobKey,
    fence: &Fence,
    checkpoint: NewCheckpoint,
) -> Result<Option<Saved>, Error> {
    let sent = SentCheckpoint { job_id: key.id, fence: fence.clone(), checkpoint };
    let saved = checkpoints::save(&app.engine, caller.tenant(), vec![sent]).await?;
    Ok(saved.get(&key.id).copied())
}
