//! Webhooks: endpoints, and deliveries to them. A trigger writes an event in the transaction that
//! ends a job; `notify_endpoints.rs` makes deliveries of it, which are jobs of the project's
//! outbox;
//! `deliver.rs` works on these. Push sends jobs of a project's own queues in the same way.

pub mod changes;
pub mod deliver;
mod deliveries;
pub mod empty;
pub mod notify_endpoints;
mod payload;
pub mod push;
pub mod pusher;
pub mod sender;
mod targets;

use fencepost_domain::{
    error::Error,
    ids::{EndpointId, ProjectId},
    plan::Tenant,
    webhook::SECRET_BYTES,
};
use sqlx::{Acquire, PgConnection};
use uuid::Uuid;

pub use self::deliveries::{
    DeliveryRow, MAX_REPLAYED_DELIVERIES, ReplayRequest, Wanted, deliveries, delivery, replay,
    retry, send_test,
};
use super::Engine;
use fencepost_net::seal::{MasterKeys, OtherMasterKey};
pub use fencepost_store::outbound::webhooks::{EndpointChange, EndpointRow, NewEndpoint};
use fencepost_store::{
    outbound::webhooks,
    sweep::webhooks::{replace_secrets, secrets},
};

/// Secrets that one statement reads while all are encrypted.
const SEALED_AT_ONCE: i64 = 500;

/// Where a secret is stored: its row alone can decrypt it.
fn secret_place(project_id: ProjectId, id: EndpointId) -> String {
    format!("webhook_endpoints/{}/{}", project_id.0, id.0)
}

/// An endpoint of a project.
///
/// # Errors
/// [`Error::EndpointNotFound`].
pub async fn find(
    engine: &Engine,
    project_id: ProjectId,
    id: EndpointId,
) -> Result<EndpointRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    webhooks::find(&mut conn, project_id, id).await?.ok_or(Error::EndpointNotFound)
}

/// Endpoints of a project, newest first.
///
/// # Errors
/// When the database does not answer.
pub async fn list(
    engine: &Engine,
    project_id: ProjectId,
    before: Option<EndpointId>,
    limit: i64,
) -> Result<Vec<EndpointRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(webhooks::list(&mut conn, project_id, before, limit).await?)
}

/// Creates an endpoint, and returns it with its secret. It is notified of events from now on.
///
/// # Errors
/// [`Error::QuotaExceeded`]. [`Error::ProjectNotFound`] when the project is deleted meanwhile.
pub async fn create(
    engine: &Engine,
    tenant: Tenant,
    master_keys: &MasterKeys,
    new: &NewEndpoint,
) -> Result<(EndpointRow, Vec<u8>), Error> {
    let (project_id, id) = (tenant.project_id, EndpointId::generate());
    let outbox = {
        let mut conn = engine.pools.people.acquire_for(project_id).await?;
        webhooks::make_outbox(&mut conn, project_id).await?.ok_or(Error::ProjectNotFound)?
    };
    let secret = rand::random::<[u8; SECRET_BYTES]>();
    let sealed = master_keys.seal(&secret_place(project_id, id), &secret);
    let max = tenant.limits.max_endpoints();
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    webhooks::note_outbox(&mut tx, project_id, outbox).await?;
    webhooks::lock(&mut tx, project_id).await?;
    if webhooks::count(&mut tx, project_id, max).await? >= max {
        return Err(Error::QuotaExceeded { what: "endpoints", max });
    }
    webhooks::insert(&mut tx, project_id, id, new, &sealed).await?;
    webhooks::write_subscriptions(&mut tx, project_id).await?;
    let row = webhooks::find(&mut tx, project_id, id).await?;
    tx.commit().await?;
    engine.notifier.subscribed.add(project_id);
    drop(conn);
    engine.targets.endpoints.changed(&engine.notifier.wake).await;
    Ok((row.ok_or(Error::EndpointNotFound)?, secret.to_vec()))
}

/// The reason for which an endpoint that would get nothing is refused.
pub const NO_EVENTS: &str = "must name at least 1 type of events, unless `callbacks` is true";

/// Changes an endpoint. Returns it as it was, and as it is.
///
/// # Errors
/// [`Error::EndpointNotFound`]. [`Error::Invalid`] when it would get nothing any more.
pub async fn change(
    engine: &Engine,
    project_id: ProjectId,
    id: EndpointId,
    change: &EndpointChange,
) -> Result<[EndpointRow; 2], Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    webhooks::lock(&mut tx, project_id).await?;
    let before = webhooks::find(&mut tx, project_id, id).await?;
    webhooks::change(&mut tx, project_id, id, change).await?;
    webhooks::write_subscriptions(&mut tx, project_id).await?;
    let after = webhooks::find(&mut tx, project_id, id).await?;
    let (before, after) = before.zip(after).ok_or(Error::EndpointNotFound)?;
    let is_about_events = change.events.is_some() || change.takes_callbacks.is_some();
    if is_about_events && after.events.is_empty() && !after.takes_callbacks {
        return Err(Error::invalid("events", NO_EVENTS));
    }
    tx.commit().await?;
    if after.disabled_at.is_none() {
        engine.notifier.subscribed.add(project_id);
    }
    drop(conn);
    engine.targets.endpoints.changed(&engine.notifier.wake).await;
    Ok([before, after])
}

/// Deletes an endpoint, and returns it as it was. A loop cancels what waits for it.
///
/// # Errors
/// [`Error::EndpointNotFound`].
pub async fn delete(
    engine: &Engine,
    project_id: ProjectId,
    id: EndpointId,
) -> Result<EndpointRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    webhooks::lock(&mut tx, project_id).await?;
    let row = webhooks::find(&mut tx, project_id, id).await?;
    webhooks::delete(&mut tx, project_id, id).await?;
    webhooks::write_subscriptions(&mut tx, project_id).await?;
    tx.commit().await?;
    drop(conn);
    let row = row.ok_or(Error::EndpointNotFound)?;
    engine.targets.endpoints.changed(&engine.notifier.wake).await;
    Ok(row)
}

/// Gives an endpoint a new secret, and returns it. The present one signs as well for this many
/// seconds.
///
/// # Errors
/// [`Error::EndpointNotFound`].
pub async fn rotate(
    engine: &Engine,
    master_keys: &MasterKeys,
    (project_id, id): (ProjectId, EndpointId),
    overlap_seconds: i32,
) -> Result<Vec<u8>, Error> {
    let secret = rand::random::<[u8; SECRET_BYTES]>();
    let sealed = master_keys.seal(&secret_place(project_id, id), &secret);
    let mut conn = engine.pools.read_for(project_id).await?;
    let is_there =
        webhooks::replace_secret(&mut conn, project_id, id, &sealed, overlap_seconds).await?;
    drop(conn);
    if !is_there {
        return Err(Error::EndpointNotFound);
    }
    engine.targets.endpoints.changed(&engine.notifier.wake).await;
    Ok(secret.to_vec())
}

/// Encrypts the secrets of all endpoints and pushes with the first master key. Returns of how many.
///
/// # Errors
/// When one is encrypted with a key that is not given, or the database does not answer.
pub async fn seal_secrets(
    conn: &mut PgConnection,
    master_keys: &MasterKeys,
) -> anyhow::Result<usize> {
    let (mut sealed, mut after) = (0, (ProjectId(0), EndpointId(Uuid::nil())));
    loop {
        let page = secrets(conn, after, SEALED_AT_ONCE).await?;
        let Some(last) = page.last() else { break };
        after = (last.project_id, last.id);
        for it in page {
            let place = secret_place(it.project_id, it.id);
            let stored = (&it.secret, it.old_secret.as_ref());
            let Some((secret, old)) = seal_again(master_keys, &place, stored)? else { continue };
            replace_secrets(conn, &it, &secret, old.as_deref()).await?;
            sealed += 1;
        }
    }
    Ok(sealed + push::seal_secrets(conn, master_keys).await?)
}

/// A secret and, while it is still valid, the one before; both encrypted.
type SealedSecrets = (Vec<u8>, Option<Vec<u8>>);

/// A secret and the one before, encrypted with the first master key; none: they are.
fn seal_again(
    master_keys: &MasterKeys,
    place: &str,
    (secret, old): (&Vec<u8>, Option<&Vec<u8>>),
) -> Result<Option<SealedSecrets>, OtherMasterKey> {
    let is_current = |stored: &Vec<u8>| master_keys.is_current(stored, SECRET_BYTES);
    if is_current(secret) && old.is_none_or(is_current) {
        return Ok(None);
    }
    let again = |stored: &Vec<u8>| -> Result<Vec<u8>, OtherMasterKey> {
        let plain = master_keys.open(place, stored, SECRET_BYTES)?;
        Ok(master_keys.seal(place, &plain))
    };
    Ok(Some((again(secret)?, old.map(again).transpose()?)))
}
