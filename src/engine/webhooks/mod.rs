//! Webhooks: endpoints, and deliveries to them. A trigger writes an event in the transaction that
//! ends a job; `tell.rs` makes deliveries of it, which are jobs of the project's outbox;
//! `deliver.rs` works on these.

pub mod deliver;
mod deliveries;
mod payload;
pub mod tell;

use sqlx::Acquire;

pub use self::deliveries::{DeliveryRow, Wanted, deliveries, delivery, retry, send_test};
use super::{Engine, operations};
pub use crate::store::webhooks::{EndpointRow, EndpointSettings};
use crate::{
    domain::{
        operation::{JobFilter, Kind, Which},
        plan::Tenant,
        webhook::SECRET_BYTES,
    },
    error::Error,
    ids::{EndpointId, OperationId, ProjectId},
    seal::MasterKeys,
    store::webhooks,
};

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

/// Creates an endpoint, and returns it with its secret: events that are committed from now on are
/// told to it.
///
/// # Errors
/// [`Error::QuotaExceeded`].
pub async fn create(
    engine: &Engine,
    tenant: Tenant,
    master_keys: &MasterKeys,
    settings: &EndpointSettings,
) -> Result<(EndpointRow, Vec<u8>), Error> {
    let (project_id, id) = (tenant.project_id, EndpointId::generate());
    let outbox = {
        let mut conn = engine.pools.people.acquire_for(project_id).await?;
        webhooks::make_outbox(&mut conn, project_id).await?
    };
    let secret = rand::random::<[u8; SECRET_BYTES]>();
    let sealed = master_keys.seal(&secret_place(project_id, id), &secret);
    let max = tenant.limits.max_endpoints();
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    webhooks::lock(&mut tx, project_id).await?;
    if webhooks::count(&mut tx, project_id, max).await? >= max {
        return Err(Error::QuotaExceeded { what: "endpoints", max });
    }
    webhooks::insert(&mut tx, project_id, (id, outbox), settings, &sealed).await?;
    webhooks::write_subscriptions(&mut tx, project_id).await?;
    let row = webhooks::find(&mut tx, project_id, id).await?;
    tx.commit().await?;
    engine.notifier.subscribed.add(project_id);
    Ok((row.ok_or(Error::EndpointNotFound)?, secret.to_vec()))
}

/// Replaces the settings of an endpoint.
///
/// # Errors
/// [`Error::EndpointNotFound`].
pub async fn change(
    engine: &Engine,
    project_id: ProjectId,
    id: EndpointId,
    settings: &EndpointSettings,
) -> Result<EndpointRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    webhooks::lock(&mut tx, project_id).await?;
    webhooks::change(&mut tx, project_id, id, settings).await?;
    webhooks::write_subscriptions(&mut tx, project_id).await?;
    let row = webhooks::find(&mut tx, project_id, id).await?.ok_or(Error::EndpointNotFound)?;
    tx.commit().await?;
    if settings.is_enabled {
        engine.notifier.subscribed.add(project_id);
    }
    Ok(row)
}

/// Deletes an endpoint. Deliveries to it that wait are cancelled in the background.
///
/// # Errors
/// [`Error::EndpointNotFound`].
pub async fn delete(engine: &Engine, tenant: Tenant, id: EndpointId) -> Result<EndpointRow, Error> {
    let project_id = tenant.project_id;
    let row = find(engine, project_id, id).await?;
    let new = operations::NewOperation {
        id: OperationId::generate(),
        kind: Kind::JobsCancel,
        filter: Which::Jobs(JobFilter { queue: Some(id.to_string()), ..JobFilter::default() }),
        expected: None,
        max_jobs: None,
        rate_per_second: None,
    };
    operations::begin(engine, Tenant { project_id: row.outbox, ..tenant }, &new).await?;
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    webhooks::lock(&mut tx, project_id).await?;
    webhooks::delete(&mut tx, project_id, id).await?;
    webhooks::write_subscriptions(&mut tx, project_id).await?;
    tx.commit().await?;
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
    if is_there { Ok(secret.to_vec()) } else { Err(Error::EndpointNotFound) }
}
