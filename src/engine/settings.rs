//! Writes of settings under a condition: who writes the same ones takes turns, on any number of
//! nodes.

use std::{sync::LazyLock, time::Duration};

use fencepost_domain::{error::Error, ids::ProjectId};
use fencepost_fair::each::PerProject;
use fencepost_store::settings_turns;
use sqlx::Connection;
use tokio::{sync::Semaphore, time::timeout};

use super::Engine;

/// Writes of a node at a time, one of each project: each holds a connection of background work.
static WRITERS: Semaphore = Semaphore::const_new(2);
static OF_PROJECT: LazyLock<PerProject> = LazyLock::new(|| PerProject::new(1));
/// A write waits this long for its turn on this node, and then as long among all.
const TURN_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads and writes settings while no other does so in a turn.
///
/// # Errors
/// [`Error::Overloaded`] when the turn does not come; those of the work.
pub async fn in_turn<T>(
    engine: &Engine,
    project_id: ProjectId,
    what: &str,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let turn = async {
        let of_project = OF_PROJECT.take(project_id, 1).await;
        (of_project, WRITERS.acquire().await)
    };
    let _turn = timeout(TURN_TIMEOUT, turn).await.map_err(|_| Error::Overloaded)?;
    let mut conn = engine.pools.background.acquire().await?;
    let mut tx = conn.begin().await?;
    let taken = timeout(TURN_TIMEOUT, settings_turns::take(&mut tx, project_id, what)).await;
    taken.map_err(|_| Error::Overloaded)??;
    let done = work.await;
    // The turn ends with the transaction, which has written nothing itself. An error ends it, too.
    let _ = tx.rollback().await;
    done
}
