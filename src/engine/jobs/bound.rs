//! What a key that is bound to queues and job types may reach. Jobs beyond that look as if the
//! project did not have them.

use std::collections::HashSet;

use crate::{
    domain::{binding::KeyBinding, callbacks::Callbacks},
    engine::{
        Engine,
        enqueue::dependencies::{OnConflict, TiedJob, no_parent},
    },
    error::Error,
    ids::{JobId, ProjectId},
    store,
};

/// Why a bound key may only be refused when a unique key is taken.
const MUST_REJECT: &str =
    "must be reject with a bound key: the other job may be one that it may not use";

/// Which jobs of a call its key may reach; none: all.
#[derive(Debug, Clone)]
pub struct Reach(Option<HashSet<JobId>>);

impl Reach {
    /// Reads it. A key that is not bound reaches all, and nothing is read.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn read(
        engine: &Engine,
        project_id: ProjectId,
        binding: Option<&KeyBinding>,
        ids: impl IntoIterator<Item = JobId>,
    ) -> Result<Self, Error> {
        let Some(binding) = binding else { return Ok(Self(None)) };
        let ids: Vec<_> = ids.into_iter().collect();
        if ids.is_empty() {
            return Ok(Self(Some(HashSet::new())));
        }
        let mut conn = engine.pools.reports.acquire_for(project_id).await?;
        let kinds = store::jobs::kinds(&mut conn, project_id, &ids).await?;
        let reached = kinds.into_iter().filter(|it| binding.includes(&it.1, &it.2));
        Ok(Self(Some(reached.map(|it| it.0).collect())))
    }

    /// Whether this job is within.
    #[must_use]
    pub fn includes(&self, id: JobId) -> bool {
        self.0.as_ref().is_none_or(|it| it.contains(&id))
    }

    /// The same.
    ///
    /// # Errors
    /// [`Error::JobNotFound`].
    pub fn check(&self, id: JobId) -> Result<(), Error> {
        if self.includes(id) { Ok(()) } else { Err(Error::JobNotFound) }
    }
}

/// Whether a key may end what this worker does: it may use all jobs that the worker holds.
///
/// # Errors
/// [`Error::WorkerNotFound`].
pub async fn check_worker(
    engine: &Engine,
    project_id: ProjectId,
    worker_id: &str,
    binding: Option<&KeyBinding>,
) -> Result<(), Error> {
    let Some(binding) = binding else { return Ok(()) };
    let mut conn = engine.pools.reports.acquire_for(project_id).await?;
    let held = store::jobs::kinds_held_by(&mut conn, project_id, worker_id).await?;
    match held.iter().all(|it| binding.includes(&it.0, &it.1)) {
        true => Ok(()),
        false => Err(Error::WorkerNotFound),
    }
}

/// Whether a key may enqueue these jobs, with their callbacks, below their parents.
///
/// # Errors
/// [`Error::OutOfBounds`]. [`Error::Invalid`] about a parent that it may not use, as about one that
/// does not exist, and about `on_conflict`.
pub async fn check_enqueue(
    engine: &Engine,
    project_id: ProjectId,
    binding: Option<&KeyBinding>,
    jobs: &[TiedJob],
) -> Result<(), Error> {
    let Some(binding) = binding else { return Ok(()) };
    let mut parents = Vec::new();
    for it in jobs {
        binding.check(&it.job.queue, &it.job.job_type)?;
        let Some(extras) = &it.job.extras else { continue };
        if let Some(callbacks) = &extras.callbacks {
            let callbacks = serde_json::from_str(callbacks).map_err(Error::internal)?;
            check_callbacks(binding, &callbacks)?;
        }
        if extras.unique_key.is_some() && it.on_conflict != OnConflict::Reject {
            let field = format!("{}unique.on_conflict", it.path);
            return Err(Error::invalid(field, MUST_REJECT));
        }
        let fields = (0..).map(|ordinal| it.parent_field(ordinal));
        parents.extend(extras.parents.iter().map(|it| it.parent).zip(fields));
    }
    let ids = parents.iter().map(|it| it.0);
    let reach = Reach::read(engine, project_id, Some(binding), ids).await?;
    match parents.into_iter().find(|it| !reach.includes(it.0)) {
        Some((parent, field)) => Err(no_parent(field, parent)),
        None => Ok(()),
    }
}

fn check_callbacks(binding: &KeyBinding, callbacks: &Callbacks) -> Result<(), Error> {
    let Callbacks { on_success, on_failure, on_complete } = callbacks;
    for job in [on_success, on_failure, on_complete].into_iter().flatten() {
        binding.check(&job.queue, &job.job_type)?;
        check_callbacks(binding, &job.callbacks)?;
    }
    Ok(())
}
