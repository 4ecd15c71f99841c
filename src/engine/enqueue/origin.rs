//! Where jobs come from: what they may be, what they carry, and what is checked before storing.

use fencepost_domain::{binding::KeyBinding, callbacks::Callbacks, error::Error, ids::ProjectId};

use super::{
    callback_url::check_callback_urls,
    dependencies::{JobWithDependencies, no_parent},
    payloads::{self, ToCheck},
};
use crate::{Engine, queues, reach::Reach};

/// Why a bound key may not use what all jobs of a project share.
const SHARED: &str = "must not be sent with a bound key: jobs of other queues share it";

/// Where jobs come from. [`store`](super::store()) and [`store_workflow`](super::store_workflow)
/// take one, so that no request leaves out a check. Jobs that an end or a bulk operation enqueues,
/// in a transaction of its own, have none.
#[derive(Debug)]
pub struct Origin {
    binding: Option<KeyBinding>,
    hop: Option<i16>,
    to_check: Vec<ToCheck>,
}

impl Origin {
    /// A request: what its key is bound to, and how many deliveries of webhooks have led to it.
    #[must_use]
    pub const fn request(binding: Option<KeyBinding>, hop: Option<i16>) -> Self {
        Self { binding, hop, to_check: Vec::new() }
    }

    /// The server itself.
    #[must_use]
    pub const fn server() -> Self {
        Self::request(None, None)
    }

    /// The same, with payloads to compare with the schemas of their job types.
    #[must_use]
    pub fn checking(self, to_check: Vec<ToCheck>) -> Self {
        Self { to_check, ..self }
    }

    /// Lets jobs in, and notes on them what they carry.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]. [`Error::Invalid`] about a `callback_url` that no endpoint takes,
    /// about a parent that the key may not use, as about one that does not exist, about what jobs
    /// of other queues would share, and about payloads that do not fit their schema.
    pub(super) async fn admit(
        self,
        engine: &Engine,
        project_id: ProjectId,
        jobs: &mut [JobWithDependencies],
    ) -> Result<(), Error> {
        if let Some(hop) = self.hop {
            for it in &mut *jobs {
                it.job.extras.get_or_insert_default().hop = Some(hop);
            }
        }
        let named = |it: &JobWithDependencies| {
            let url = it.job.extras.as_ref()?.callback_url.clone()?;
            Some((it.path.clone(), url))
        };
        let queues = jobs.iter().map(|it| (it.path.as_str(), it.job.queue.as_str()));
        queues::check_new_names(engine, project_id, queues).await?;
        for it in &*jobs {
            let callbacks = it.job.extras.as_ref().and_then(|it| it.callbacks.as_ref());
            let Some(callbacks) = callbacks else { continue };
            let callbacks = serde_json::from_str(callbacks).map_err(Error::internal)?;
            queues::check_new_names_of(engine, project_id, (&it.path, &callbacks)).await?;
        }
        check_callback_urls(engine, project_id, jobs.iter().filter_map(named).collect()).await?;
        if let Some(binding) = &self.binding {
            check_bound(engine, project_id, binding, jobs).await?;
        }
        payloads::check(engine, project_id, self.to_check).await
    }
}

/// Whether a bound key may enqueue these jobs, with their callbacks, below their parents.
async fn check_bound(
    engine: &Engine,
    project_id: ProjectId,
    binding: &KeyBinding,
    jobs: &[JobWithDependencies],
) -> Result<(), Error> {
    let mut parents = Vec::new();
    for it in jobs {
        binding.check(&it.job.queue, &it.job.job_type)?;
        let Some(extras) = &it.job.extras else { continue };
        if let Some(callbacks) = &extras.callbacks {
            let callbacks = serde_json::from_str(callbacks).map_err(Error::internal)?;
            check_callbacks(binding, &callbacks)?;
        }
        let shared = [
            ("batch_id", extras.batch_id.is_some()),
            ("concurrency_key", extras.concurrency_key.is_some()),
            ("unique", extras.unique_key.is_some()),
        ];
        if let Some((field, _)) = shared.into_iter().find(|it| it.1) {
            return Err(Error::invalid(format!("{}{field}", it.path), SHARED));
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
    let Callbacks { on_success, on_failure, on_complete, url: _ } = callbacks;
    for job in [on_success, on_failure, on_complete].into_iter().flatten() {
        binding.check(&job.queue, &job.job_type)?;
        check_callbacks(binding, &job.callbacks)?;
    }
    Ok(())
}
