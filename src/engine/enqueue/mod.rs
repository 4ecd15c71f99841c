//! Storing the jobs of one request, with or without dependencies.

mod batch;
pub mod dependencies;
pub mod quota;

use std::sync::Arc;

use self::dependencies::{EnqueueOutcome, TiedJob};
use super::Engine;
use crate::{error::Error, ids::ProjectId};

pub use self::batch::{Enqueues, Extras, NewJob, Start, StoredJob, enqueue};

/// Stores jobs, all or none, and returns them in their order. Jobs without dependencies, a unique
/// key, an id of the client's or an `expires_at` share a statement with other requests.
///
/// # Errors
/// Those of [`enqueue`] and [`dependencies::store`]. Nothing is stored then.
pub async fn store(
    engine: &Engine,
    project_id: ProjectId,
    jobs: &[TiedJob],
) -> Result<Vec<EnqueueOutcome>, Error> {
    if jobs.iter().any(is_tied) {
        let outcomes = dependencies::store(engine, project_id, jobs, None).await;
        return outcomes.map_err(|error| name_the_latest(error, jobs));
    }
    let plain: Arc<[NewJob]> = jobs.iter().map(|it| it.job.clone()).collect();
    let stored = enqueue(engine, plain).await;
    let stored = stored.map_err(|error| name_the_latest(error, jobs))?;
    Ok(stored.into_iter().map(EnqueueOutcome::Stored).collect())
}

fn is_tied(it: &TiedJob) -> bool {
    let extras = it.job.extras.as_ref();
    it.is_id_given
        || extras
            .is_some_and(|it| it.unique_key.is_some() || it.has_parents || it.expires_at.is_some())
}

/// Only the database's clock can tell that a `run_at` is too far ahead, and it checks the latest
/// one of a request.
fn name_the_latest(error: Error, jobs: &[TiedJob]) -> Error {
    let Error::Invalid(mut fields) = error else { return error };
    let starts = jobs.iter().filter_map(|it| match it.job.start {
        Start::At(run_at) => Some((run_at, it)),
        Start::After(_) => None,
    });
    if let (Some((_, latest)), Some(field)) = (starts.max_by_key(|it| it.0), fields.first_mut())
        && field.field == "run_at"
    {
        field.field = format!("{}{}", latest.path, field.field);
    }
    Error::Invalid(fields)
}
