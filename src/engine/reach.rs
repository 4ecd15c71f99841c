//! What a key that is bound to queues and job types may reach. Jobs beyond that look as if the
//! project did not have them.

use std::collections::{HashMap, HashSet};

use fencepost_domain::{
    binding::KeyBinding,
    error::Error,
    ids::{JobId, JobKey, ProjectId},
};
use fencepost_store::{
    self as store,
    connection::pools::{self, Pool},
};
use futures_util::future::try_join_all;

use crate::{Engine, group_commit::GroupCommit};

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

/// The group commit that looks up the queue and the job type of jobs.
pub struct JobKinds {
    pub(crate) pool: Pool,
}

impl GroupCommit for JobKinds {
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
