//! Checkpoints: workers store how far they have come, under their fences. In a transaction of their
//! project: the group commits are shared.

use std::collections::HashMap;

use fencepost_domain::{
    error::{Error, JobStatus},
    ids::{JobId, JobKey},
    lease::{self, Fence},
    plan::Tenant,
};
use fencepost_signals::telemetry;
use fencepost_store::{connection::deadline::detached, settle::checkpoints};
use metrics::counter;
use sqlx::Acquire;

use super::read_again;
use crate::{Engine, enqueue::quota};

pub use fencepost_store::settle::checkpoints::{Checkpoint, NewCheckpoint};

/// What became of a checkpoint whose fence holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saved {
    /// It is stored, or was.
    Stored,
    /// Another with the same sequence or a later one is stored.
    Stale,
    /// The project has stored all of its bytes.
    Full,
}

impl Saved {
    fn name(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Stale => "stale",
            Self::Full => "full",
        }
    }
}

/// A checkpoint, and the fence of the attempt that it belongs to.
#[derive(Debug, Clone)]
pub struct SentCheckpoint {
    pub job_id: JobId,
    pub fence: Fence,
    pub checkpoint: NewCheckpoint,
}

/// Stores checkpoints of attempts, each with what became of it. Those whose fences do not hold are
/// missing.
///
/// # Errors
/// [`Error::Unavailable`]: nothing is stored.
pub async fn save(
    engine: &Engine,
    tenant: Tenant,
    sent: Vec<SentCheckpoint>,
) -> Result<HashMap<JobId, Saved>, Error> {
    if sent.is_empty() {
        return Ok(HashMap::new());
    }
    let engine = engine.clone();
    // The caller may go away at any time.
    let saving = async move {
        match quota::has_all_bytes(&engine, tenant).await? {
            true => find_stored(&engine, tenant, &sent).await,
            false => store(&engine, tenant, &sent).await,
        }
    };
    let saved: HashMap<_, _> = detached(saving).await??;
    for it in saved.values() {
        counter!(telemetry::CHECKPOINTS, "outcome" => it.name()).increment(1);
    }
    Ok(saved)
}

/// Stores a checkpoint with the number after the last one, for workers that number none. None: the
/// fence does not hold.
///
/// # Errors
/// [`Error::Unavailable`]: nothing is stored.
pub async fn save_next(
    engine: &Engine,
    tenant: Tenant,
    (job_id, fence): (JobId, Fence),
    data: String,
) -> Result<Option<(Saved, i64)>, Error> {
    let keys = [JobKey { project_id: tenant.project_id, id: job_id }];
    let reader = engine.clone();
    let reading = async move {
        let mut conn = reader.pools.read_for(tenant.project_id).await?;
        Ok::<_, Error>(checkpoints::find(&mut conn, &keys).await?.pop())
    };
    let before = detached(reading).await??;
    let sequence = before.map_or(0, |it| it.sequence) + 1;
    let checkpoint = NewCheckpoint { sequence, data };
    let sent = vec![SentCheckpoint { job_id, fence, checkpoint }];
    let saved = save(engine, tenant, sent).await?;
    Ok(saved.get(&job_id).map(|it| (*it, sequence)))
}

/// Those that are stored, since they were sent before; a full project stores no others.
async fn find_stored(
    engine: &Engine,
    tenant: Tenant,
    sent: &[SentCheckpoint],
) -> Result<HashMap<JobId, Saved>, Error> {
    let project_id = tenant.project_id;
    let keys: Vec<_> = sent.iter().map(|it| JobKey { project_id, id: it.job_id }).collect();
    let mut conn = engine.pools.read_for(project_id).await?;
    let there = checkpoints::find(&mut conn, &keys).await?;
    let saved = sent.iter().map(|it| match is_stored(&there, sent, it.job_id) {
        true => (it.job_id, Saved::Stored),
        false => (it.job_id, Saved::Full),
    });
    Ok(saved.collect())
}

/// Whether what is there is one of those that were sent.
fn is_stored(there: &[Checkpoint], sent: &[SentCheckpoint], id: JobId) -> bool {
    let Some(there) = there.iter().find(|it| it.job_id == id) else { return false };
    let mut of_job = sent.iter().filter(|it| it.job_id == id).map(|it| &it.checkpoint);
    of_job.any(|it| (it.sequence, it.data.as_str()) == (there.sequence, there.data.as_str()))
}

async fn store(
    engine: &Engine,
    tenant: Tenant,
    sent: &[SentCheckpoint],
) -> Result<HashMap<JobId, Saved>, Error> {
    let project_id = tenant.project_id;
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    let columns: Vec<_> = sent.iter().map(|it| (it.job_id, &it.fence, &it.checkpoint)).collect();
    let kept = checkpoints::store(&mut tx, project_id, &columns).await?;
    tx.commit().await?;
    let others = kept.iter().filter(|it| !it.is_stored);
    let others: Vec<_> = others.map(|it| JobKey { project_id, id: it.job_id }).collect();
    let there = match others.is_empty() {
        true => Vec::new(),
        false => checkpoints::find(&mut conn, &others).await?,
    };
    let saved =
        kept.into_iter().map(|it| match it.is_stored || is_stored(&there, sent, it.job_id) {
            true => (it.job_id, Saved::Stored),
            false => (it.job_id, Saved::Stale),
        });
    Ok(saved.collect())
}

/// Refuses a checkpoint whose fence shows neither attempt nor lease: it could be one of an attempt
/// that its worker has lost.
///
/// # Errors
/// [`Error::FenceRequired`]; [`Error::JobNotFound`].
pub async fn require_fence(engine: &Engine, key: JobKey, fence: &Fence) -> Result<(), Error> {
    if fence.names_an_attempt() {
        return Ok(());
    }
    let (engine, fence) = (engine.clone(), fence.clone());
    let found = detached(async move { read_again(&engine, key, &fence).await }).await??;
    let lease::Standing { state, attempt, .. } = found.standing;
    counter!(telemetry::FENCES_REFUSED, "reason" => "fence_required").increment(1);
    Err(Error::FenceRequired(JobStatus { state, attempt }))
}
