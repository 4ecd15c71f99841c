//! Workflows that are stored to be started by their id.

use fencepost_domain::{
    error::Error,
    ids::{ProjectId, WorkflowId},
    limits::MAX_WORKFLOW_DEFINITIONS,
};
use fencepost_store::workflows::definitions;
use uuid::Uuid;

pub use fencepost_store::workflows::definitions::{
    DefinitionRow, NewDefinition, Page, WorkflowStart,
};

use crate::{Engine, settings};

/// The result of storing a definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// It is new.
    New,
    /// An equal one was stored before.
    Again,
    /// Another one has its id.
    IdTaken,
    /// Another one has this version of its name.
    VersionTaken,
}

/// Stores a definition. One that is sent again, with the same id, is stored once.
///
/// # Errors
/// [`Error::QuotaExceeded`] when the project has as many as it may have.
pub async fn create(
    engine: &Engine,
    project_id: ProjectId,
    new: &NewDefinition,
) -> Result<Stored, Error> {
    const MAX: i64 = MAX_WORKFLOW_DEFINITIONS;
    let store = async {
        let mut conn = engine.pools.read_for(project_id).await?;
        if definitions::insert(&mut conn, project_id, new, MAX).await? {
            return Ok(Stored::New);
        }
        if let Some(known) = definitions::find(&mut conn, project_id, new.id).await? {
            let is_same = known.definition == new.definition;
            return Ok(if is_same { Stored::Again } else { Stored::IdTaken });
        }
        let (named, version) = ((new.namespace.as_str(), new.name.as_str()), Some(new.version));
        if definitions::by_name(&mut conn, project_id, named, version).await?.is_some() {
            return Ok(Stored::VersionTaken);
        }
        Err(Error::QuotaExceeded { what: "workflow definitions", max: MAX })
    };
    settings::in_turn(engine, project_id, "workflow definitions", store).await
}

/// The definition with an id; none if there is none.
pub async fn find(
    engine: &Engine,
    project_id: ProjectId,
    id: Uuid,
) -> Result<Option<DefinitionRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(definitions::find(&mut conn, project_id, id).await?)
}

/// A version of a name in a namespace, by default the newest; none if there is none.
pub async fn by_name(
    engine: &Engine,
    project_id: ProjectId,
    named: (&str, &str),
    version: Option<i32>,
) -> Result<Option<DefinitionRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(definitions::by_name(&mut conn, project_id, named, version).await?)
}

/// The versions of a name in a namespace, newest first; without a name those of all names.
pub async fn versions(
    engine: &Engine,
    project_id: ProjectId,
    named: (Option<&str>, Option<&str>),
    page: Page,
) -> Result<Vec<DefinitionRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(definitions::versions(&mut conn, project_id, named, page).await?)
}

/// Deletes a definition. Returns whether it was there. Workflows that were started from it go on.
pub async fn delete(engine: &Engine, project_id: ProjectId, id: Uuid) -> Result<bool, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(definitions::delete(&mut conn, project_id, id).await?)
}

/// The workflow that was started with a key, and its definition; none if none was, or if it was
/// pruned.
pub async fn started_with(
    engine: &Engine,
    project_id: ProjectId,
    request_key: &str,
) -> Result<Option<(WorkflowId, Uuid)>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(definitions::started_with(&mut conn, project_id, request_key).await?)
}

/// The start of a workflow; none if it was not started from a definition.
pub async fn start_of(
    engine: &Engine,
    project_id: ProjectId,
    id: WorkflowId,
) -> Result<Option<WorkflowStart>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(definitions::start_of(&mut conn, project_id, id).await?)
}
