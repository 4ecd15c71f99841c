//! Group commits about workers: lookups, and heartbeats of whole workers.

use std::{collections::HashMap, sync::Arc};

use fencepost_domain::{error::Error, ids::ProjectId};
use fencepost_store::{
    self as store,
    connection::pools::{self, Pool},
    workers::{Facts, WorkerBeat},
};

use super::WorkerKey;
use crate::group_commit::GroupCommit;

/// The group commit of worker lookups.
pub struct WorkerLookups {
    pub(crate) pool: Pool,
}

impl GroupCommit for WorkerLookups {
    type Item = WorkerKey;
    type Answer = Option<Facts>;
    type Key = WorkerKey;
    type Connection = pools::Connection;

    const KIND: &'static str = "worker";
    const MAX_ROWS: usize = 500;

    fn bytes(_: &WorkerKey) -> usize {
        0
    }

    fn key(item: &WorkerKey) -> WorkerKey {
        item.clone()
    }

    fn project(item: &WorkerKey) -> ProjectId {
        item.0
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[WorkerKey],
        _: bool,
    ) -> sqlx::Result<Vec<Result<Option<Facts>, Error>>> {
        let asked: Vec<_> = items.iter().map(|it| (it.0, &*it.1)).collect();
        let mut facts: HashMap<_, _> =
            store::workers::facts(conn, &asked).await?.into_iter().collect();
        Ok((0_i64..).zip(items).map(|(number, _)| Ok(facts.remove(&number))).collect())
    }
}

/// The group commit of heartbeats of whole workers.
pub struct WorkerBeats {
    pub(crate) pool: Pool,
}

impl GroupCommit for WorkerBeats {
    type Item = WorkerBeat;
    type Answer = Facts;
    type Key = WorkerKey;
    type Connection = pools::Connection;

    const KIND: &'static str = "worker_beat";
    const MAX_ROWS: usize = 500;

    fn bytes(_: &WorkerBeat) -> usize {
        0
    }

    fn key(item: &WorkerBeat) -> WorkerKey {
        (item.project_id, Arc::clone(&item.worker_id))
    }

    fn project(item: &WorkerBeat) -> ProjectId {
        item.project_id
    }

    fn is_same(one: &WorkerBeat, other: &WorkerBeat) -> bool {
        one == other
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[WorkerBeat],
        _: bool,
    ) -> sqlx::Result<Vec<Result<Facts, Error>>> {
        let beaten = store::workers::beat(conn, items).await?;
        let with_key = |it: (ProjectId, String, Facts)| ((it.0, it.1.into()), it.2);
        let mut facts: HashMap<WorkerKey, Facts> = beaten.into_iter().map(with_key).collect();
        let answers = items.iter().map(|it| facts.remove(&Self::key(it)).ok_or(Error::InDoubt));
        Ok(answers.collect())
    }
}
