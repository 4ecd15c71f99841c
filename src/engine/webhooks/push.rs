//! Push: where the jobs of a queue are sent. `pusher.rs` sends them.

use sqlx::{Acquire, PgConnection};

use super::{SEALED_AT_ONCE, seal_again};
pub use crate::store::pushes::{PushRow, PushSettings};
use crate::{
    domain::{plan::Tenant, webhook::SECRET_BYTES},
    engine::Engine,
    error::Error,
    ids::ProjectId,
    seal::MasterKeys,
    store::{
        pushes,
        sweep::pushes::{replace_secrets, secrets},
    },
};

/// Queues of one project that are pushed.
pub const MAX_PROJECT_PUSHED_QUEUES: i64 = 50;

/// Where a secret is stored: its row alone can decrypt it.
pub(super) fn secret_place(project_id: ProjectId, queue: &str) -> String {
    format!("queue_pushes/{}/{queue}", project_id.0)
}

/// Where a queue's jobs are sent.
///
/// # Errors
/// [`Error::PushNotFound`].
pub async fn find(engine: &Engine, project_id: ProjectId, queue: &str) -> Result<PushRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    pushes::find(&mut conn, project_id, queue).await?.ok_or(Error::PushNotFound)
}

/// Sends a queue's jobs to a URL from now on. Returns the secret, if it is new.
///
/// # Errors
/// [`Error::QuotaExceeded`].
pub async fn put(
    engine: &Engine,
    tenant: Tenant,
    master_keys: &MasterKeys,
    queue: &str,
    settings: &PushSettings,
) -> Result<(PushRow, Option<Vec<u8>>), Error> {
    let project_id = tenant.project_id;
    let secret = rand::random::<[u8; SECRET_BYTES]>();
    let sealed = master_keys.seal(&secret_place(project_id, queue), &secret);
    let max = MAX_PROJECT_PUSHED_QUEUES;
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    let is_known = pushes::find(&mut tx, project_id, queue).await?.is_some();
    // Requests that come together may store a few more.
    if !is_known && pushes::count(&mut tx, project_id, max).await? >= max {
        return Err(Error::QuotaExceeded { what: "queues with push", max });
    }
    let is_new = pushes::upsert(&mut tx, project_id, queue, settings, &sealed).await?;
    let row = pushes::find(&mut tx, project_id, queue).await?.ok_or(Error::PushNotFound)?;
    tx.commit().await?;
    Ok((row, is_new.then(|| secret.to_vec())))
}

/// Ends a push: the queue's jobs wait for workers.
///
/// # Errors
/// [`Error::PushNotFound`].
pub async fn delete(engine: &Engine, project_id: ProjectId, queue: &str) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let is_gone = pushes::delete(&mut conn, project_id, queue).await?;
    if is_gone { Ok(()) } else { Err(Error::PushNotFound) }
}

/// Gives a push a new secret, and returns it. The present one signs as well for this many seconds.
///
/// # Errors
/// [`Error::PushNotFound`].
pub async fn rotate(
    engine: &Engine,
    master_keys: &MasterKeys,
    (project_id, queue): (ProjectId, &str),
    overlap_seconds: i32,
) -> Result<Vec<u8>, Error> {
    let secret = rand::random::<[u8; SECRET_BYTES]>();
    let sealed = master_keys.seal(&secret_place(project_id, queue), &secret);
    let mut conn = engine.pools.read_for(project_id).await?;
    let is_there =
        pushes::replace_secret(&mut conn, project_id, queue, &sealed, overlap_seconds).await?;
    if is_there { Ok(secret.to_vec()) } else { Err(Error::PushNotFound) }
}

/// Encrypts the secrets of all pushes with the first master key. Returns of how many.
pub(super) async fn seal_secrets(
    conn: &mut PgConnection,
    master_keys: &MasterKeys,
) -> anyhow::Result<usize> {
    let (mut sealed, mut after) = (0, (ProjectId(0), String::new()));
    loop {
        let page = secrets(conn, (after.0, &after.1), SEALED_AT_ONCE).await?;
        let Some(last) = page.last() else { return Ok(sealed) };
        after = (last.project_id, last.queue.clone());
        for it in page {
            let place = secret_place(it.project_id, &it.queue);
            let stored = (&it.secret, it.old_secret.as_ref());
            let Some((secret, old)) = seal_again(master_keys, &place, stored)? else { continue };
            replace_secrets(conn, &it, &secret, old.as_deref()).await?;
            sealed += 1;
        }
    }
}
