//! Releases leases of a claim whose result was lost (connection error), without counting a failure.
//! Their jobs need not wait until the leases expire.

use std::time::Duration;

use fencepost_domain::ids::{JobKey, LeaseId};
use fencepost_store::{
    connection::{deadline::bounded_query, pools::Pool},
    sweep::{self, LostLease},
};
use tokio_util::sync::CancellationToken;

use crate::{
    group_commit::Coalescer,
    settle::{self, Failures},
};

/// Pauses between tries: the lost commit may still be in progress. Leases that appear later simply
/// expire. A node that stops tries once more, and does not wait.
const PAUSES_SECONDS: [u64; 5] = [1, 2, 4, 8, 15];

/// Releases those of these leases that were given after all.
pub(crate) async fn release(
    pool: Pool,
    failures: Coalescer<Failures>,
    lease_ids: Vec<LeaseId>,
    stopping: CancellationToken,
) {
    let mut lost: Vec<_> = lease_ids.into_iter().map(|it| it.0).collect();
    for pause in PAUSES_SECONDS {
        let pause = tokio::time::sleep(Duration::from_secs(pause));
        let is_last = stopping.run_until_cancelled(pause).await.is_none();
        let found = async {
            let mut conn = pool.acquire().await?;
            sweep::find_leases(&mut conn, &lost).await
        };
        let found = match bounded_query(found).await {
            Ok(found) => found,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "releasing leases of a lost claim failed");
                if is_last {
                    return;
                }
                continue;
            }
        };
        for LostLease { project_id, id, worker_id, lease_id } in found {
            lost.retain(|it| *it != lease_id.0);
            let key = JobKey { project_id, id };
            settle::release(&failures, key, &worker_id, lease_id).await;
        }
        if lost.is_empty() || is_last {
            return;
        }
    }
}
