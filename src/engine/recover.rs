//! After a claim whose answer was lost: leases that nobody knows he has are given back, so that their
//! jobs need not wait for the leases' end, and no failure is counted.

use std::time::Duration;

use sqlx::PgPool;

use super::{
    coalesce::Coalescer,
    settle::{self, Endings},
};
use crate::{
    ids::LeaseId,
    store::{
        acks::JobKey,
        sweep::{self, LostLease},
    },
};

/// How often the store is asked. What is not found by then waits for its lease's end.
const MAX_TRIES: u32 = 30;
/// The pause between two tries.
const PAUSE: Duration = Duration::from_secs(1);

/// Gives back those of these leases that were given after all.
pub(super) async fn give_back(pool: PgPool, endings: Coalescer<Endings>, lease_ids: Vec<LeaseId>) {
    let lease_ids: Vec<_> = lease_ids.into_iter().map(|it| it.0).collect();
    for _ in 0..MAX_TRIES {
        // The lost commit may still be under way.
        tokio::time::sleep(PAUSE).await;
        let found = async {
            let mut conn = pool.acquire().await?;
            sweep::find_leases(&mut conn, &lease_ids).await
        };
        match found.await {
            Ok(found) => {
                for LostLease { project_id, id, worker_id, lease_id } in found {
                    let key = JobKey { project_id, id };
                    settle::give_back(&endings, key, &worker_id, lease_id).await;
                }
                return;
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "leases of a lost claim were not found yet");
            }
        }
    }
}
