//! What a key that is bound to queues and job types may reach. Jobs beyond that look as if the
//! project did not have them.

use std::collections::{HashMap, HashSet};

use fencepost_domain::{
    binding::KeyBinding,
    callbacks::Callbacks,
    error::Error,
    ids::{JobId, JobKey, ProjectId},
};
use fencepost_store::{
    self as store,
    pools::{self, Pool},
};
use futures_util::future::try_join_all;

use super::callback_url::check_callback_urls;
use crate::{
    Engine,
    batch::Batch,
    enqueue::dependencies::{TiedJob, no_parent},
};

/// Why a bound key may not use what all jobs of a project share.
const SHARED: &str = "must not be sent with a bound key: jobs of other queues share it";

/// Which jobs of a call its key may reach; none: all.
#[derive(Debug, Clone)]
pub struct Reach(Option<HashSet<JobId>>);

impl Reach {
    /// Reads it. A key that is not bound reaches all, and nothing is read.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Overloaded`].
    pub async fn read(
        engine: &Engine,
        project_id: ProjectId,
        binding: Option<&KeyBinding>,
        ids: impl IntoIterator<Item = JobId>,
    ) -> Result<Self, Error> {
        let Some(binding) = binding else { return Ok(Self(None)) };
        let ids: HashSet<_> = ids.into_iter().collect();
        let kinds = ids.into_iter().map(async |id| {
            let kind = engine.job_kinds.submit(JobKey { project_id, id }).await?;
            Ok::<_, Error>(kind.filter(|it| binding.includes(&it.0, &it.1)).map(|_| id))
        });
        Ok(Self(Some(try_join_all(kinds).await?.into_iter().flatten().collect())))
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

/// Whether a key may enqueue these jobs, with their callbacks, below their parents.
///
/// # Errors
/// [`Error::OutOfBounds`]. [`Error::Invalid`] about a `callback_url` that no endpoint takes, about
/// a parent that it may not use, as about one that does not exist, and about what jobs of other
/// queues would share.
pub async fn check_enqueue(
    engine: &Engine,
    project_id: ProjectId,
    binding: Option<&KeyBinding>,
    jobs: &[TiedJob],
) -> Result<(), Error> {
    let named = |it: &TiedJob| {
        let url = it.job.extras.as_ref()?.callback_url.clone()?;
        Some((it.path.clone(), url))
    };
    check_callback_urls(engine, project_id, jobs.iter().filter_map(named).collect()).await?;
    let Some(binding) = binding else { return Ok(()) };
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

/// The batch that looks up the queue and the job type of jobs.
pub struct JobKinds {
    pub(crate) pool: Pool,
}

impl Batch for JobKinds {
    type Item = JobKey;
    /// Queue and job type; none: the project has no such job.
    type Answer = Option<(String, String)>;
    type Key = JobKey;
    type Connection = pools::Connection;

    const KIND: &'static str = "kind";
    const MAX_ROWS: usize = 500;

    fn bytes(_: &JobKey) -> usize {
        0
    }

    fn key(item: &JobKey) -> JobKey {
        *item
    }

    fn project(item: &JobKey) -> ProjectId {
        item.project_id
    }

    fn is_same(one: &JobKey, other: &JobKey) -> bool {
        one == other
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[JobKey],
        _: bool,
    ) -> sqlx::Result<Vec<Result<Self::Answer, Error>>> {
        let mut kinds: HashMap<_, _> = store::jobs::kinds(conn, items).await?.into_iter().collect();
        Ok(items.iter().map(|it| Ok(kinds.remove(it))).collect())
    }
}
