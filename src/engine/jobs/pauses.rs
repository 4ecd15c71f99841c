//! Pausing and resuming waiting jobs.

use fencepost_domain::{actor::ChangedBy, error::Error, history, ids::JobKey, operation::Kind};
use fencepost_store::{
    jobs::{events, pauses},
    settle::settle_success::WaitingJob,
};
use sqlx::{Acquire, PgConnection};

use super::control::{finish, lock, refused};
use crate::{Engine, cancel, notify::job_event};

/// A change of waiting jobs: their pause begins or ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    Begin,
    End,
}

impl Pause {
    /// The change that an operation of this kind makes; none: it makes another.
    pub(crate) fn of(kind: Kind) -> Option<Self> {
        match kind {
            Kind::JobsPause => Some(Self::Begin),
            Kind::JobsResume => Some(Self::End),
            _ => None,
        }
    }

    fn event(self) -> &'static str {
        match self {
            Self::Begin => history::PAUSED,
            Self::End => history::RESUMED,
        }
    }
}

/// Pauses or resumes a job. A paused one that is paused again, or another that is resumed, stays as
/// it is.
///
/// # Errors
/// [`Error::JobNotFound`]. [`Error::InvalidState`] when it runs or has ended.
pub async fn set(engine: &Engine, key: JobKey, pause: Pause, by: &ChangedBy) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(key.project_id).await?;
    let mut tx = conn.begin().await?;
    let changed = async {
        let seen = lock(&mut tx, key).await?;
        if !seen.state.is_waiting() {
            return Err(refused(&seen));
        }
        set_all(&mut tx, &[key], pause, by).await
    };
    let changed = changed.await;
    let changed = finish(tx, changed).await?;
    publish(engine, &changed, pause);
    Ok(())
}

/// Pauses or resumes those of these jobs that can be, and returns them.
pub(crate) async fn set_all(
    tx: &mut PgConnection,
    jobs: &[JobKey],
    pause: Pause,
    by: &ChangedBy,
) -> Result<Vec<WaitingJob>, Error> {
    let changed = match pause {
        Pause::Begin => pauses::pause(tx, jobs).await?,
        Pause::End => pauses::resume(tx, jobs).await?,
    };
    let noted = changed.iter().map(|it| cancel::event(it.key(), pause.event(), by));
    events::insert(tx, &noted.collect::<Vec<_>>()).await?;
    Ok(changed)
}

/// Notifies about changed jobs. Call it after the commit.
pub(crate) fn publish(engine: &Engine, changed: &[WaitingJob], pause: Pause) {
    engine.notifier.waiting(changed.iter());
    let event = |it: &WaitingJob| job_event(it.key(), pause.event());
    engine.notifier.feed.publish(|| changed.iter().map(event).collect());
}
