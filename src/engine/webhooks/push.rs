//! Push: where the jobs of a queue are sent. `pusher.rs` sends them.

use std::{collections::BTreeMap, iter::once};

use fencepost_domain::{
    error::Error, ids::ProjectId, outbound::is_same_origin, plan::Tenant, webhook::SECRET_BYTES,
};
use fencepost_net::seal::{MasterKeys, OtherMasterKey};
use fencepost_store::{
    queues::pushes::{self, PushHeaders},
    sweep::pushes::{replace_secrets, secrets},
};
use secrecy::{ExposeSecret, SecretString};
use sqlx::{Acquire, PgConnection};

use super::{SEALED_AT_ONCE, seal_again};
use crate::{Engine, queues};

pub use fencepost_store::queues::pushes::{PushRow, PushSettings};

/// Where a secret is stored: its row alone can decrypt it.
pub(super) fn secret_place(project_id: ProjectId, queue: &str) -> String {
    format!("queue_pushes/{}/{queue}", project_id.0)
}

/// And its headers.
pub(super) fn headers_place(project_id: ProjectId, queue: &str) -> String {
    format!("queue_pushes.headers/{}/{queue}", project_id.0)
}

/// Headers by their names, as they are stored.
fn sealed_headers(
    master_keys: &MasterKeys,
    place: &str,
    headers: &BTreeMap<String, SecretString>,
) -> PushHeaders {
    let plain: BTreeMap<_, _> =
        headers.iter().map(|(name, value)| (name, value.expose_secret())).collect();
    let text = serde_json::to_vec(&plain).unwrap_or_else(|_| unreachable!("texts by texts"));
    let stored = (!plain.is_empty()).then(|| master_keys.seal(place, &text));
    PushHeaders { names: headers.keys().cloned().collect(), stored }
}

/// Where a queue's jobs are sent.
///
/// # Errors
/// [`Error::PushNotFound`].
pub async fn find(engine: &Engine, project_id: ProjectId, queue: &str) -> Result<PushRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    pushes::find(&mut conn, project_id, queue).await?.ok_or(Error::PushNotFound)
}

/// Sends a queue's jobs to a URL from now on. Without `headers` they stay as they are, unless
/// another host would get them. Returns the secret, if it is new.
///
/// # Errors
/// [`Error::QuotaExceeded`].
pub async fn put(
    engine: &Engine,
    tenant: Tenant,
    master_keys: &MasterKeys,
    queue: &str,
    settings: &PushSettings,
    headers: Option<&BTreeMap<String, SecretString>>,
) -> Result<(PushRow, Option<Vec<u8>>), Error> {
    let project_id = tenant.project_id;
    queues::check_new_names(engine, project_id, once(("", queue))).await?;
    let secret = rand::random::<[u8; SECRET_BYTES]>();
    let sealed = master_keys.seal(&secret_place(project_id, queue), &secret);
    let max = tenant.limits.max_pushed_queues();
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    let before = pushes::lock_url(&mut tx, project_id, queue).await?;
    // Requests that come together may store a few more.
    if before.is_none() && pushes::count(&mut tx, project_id, max).await? >= max {
        return Err(Error::QuotaExceeded { what: "queues with push", max });
    }
    let place = headers_place(project_id, queue);
    let is_moved = before.is_none_or(|it| !is_same_origin(&it, &settings.url));
    let headers = headers
        .map(|it| sealed_headers(master_keys, &place, it))
        .or_else(|| is_moved.then(PushHeaders::default));
    let is_new =
        pushes::upsert(&mut tx, project_id, queue, settings, headers.as_ref(), &sealed).await?;
    let row = pushes::find(&mut tx, project_id, queue).await?.ok_or(Error::PushNotFound)?;
    tx.commit().await?;
    drop(conn);
    engine.targets.pushes.changed(&engine.notifier.wake).await;
    Ok((row, is_new.then(|| secret.to_vec())))
}

/// Ends a push: the queue's jobs wait for workers.
///
/// # Errors
/// [`Error::PushNotFound`].
pub async fn delete(engine: &Engine, project_id: ProjectId, queue: &str) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let is_gone = pushes::delete(&mut conn, project_id, queue).await?;
    drop(conn);
    if !is_gone {
        return Err(Error::PushNotFound);
    }
    engine.targets.pushes.changed(&engine.notifier.wake).await;
    Ok(())
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
    drop(conn);
    if !is_there {
        return Err(Error::PushNotFound);
    }
    engine.targets.pushes.changed(&engine.notifier.wake).await;
    Ok(secret.to_vec())
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
            let place_of_headers = headers_place(it.project_id, &it.queue);
            let has_old_headers =
                it.headers.as_ref().is_some_and(|it| !master_keys.is_current(it, 0));
            let again = seal_again(master_keys, &place, stored)?;
            if again.is_none() && !has_old_headers {
                continue;
            }
            let (secret, old) = again.unwrap_or((it.secret.clone(), it.old_secret.clone()));
            let headers = it.headers.as_deref().map(|it| -> Result<_, OtherMasterKey> {
                let plain = master_keys.open_object(&place_of_headers, it)?;
                Ok(master_keys.seal(&place_of_headers, &plain))
            });
            let headers = headers.transpose()?;
            replace_secrets(conn, &it, &secret, old.as_deref(), headers.as_deref()).await?;
            sealed += 1;
        }
    }
}
