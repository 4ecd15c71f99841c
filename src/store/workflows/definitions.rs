//! Workflows that are stored to be started by their id, and which workflow was started from which.

use chrono::{DateTime, Utc};
use fencepost_domain::ids::{ProjectId, WorkflowId};
use sqlx::PgConnection;
use uuid::Uuid;

/// A definition to store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewDefinition {
    pub id: Uuid,
    pub namespace: String,
    pub name: String,
    pub version: i32,
    /// The request that stores it, as its adapter keeps it.
    pub definition: String,
}

/// A stored definition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefinitionRow {
    pub id: Uuid,
    pub namespace: String,
    pub name: String,
    pub version: i32,
    /// The request that stored it, as its adapter keeps it.
    pub definition: String,
    pub created_at: DateTime<Utc>,
}

/// The definition that a workflow is started from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkflowStart {
    pub definition_id: Uuid,
    /// A second start with this key starts nothing.
    pub request_key: Option<String>,
}

/// Stores a definition, if the project has fewer than `max`. Returns whether it did: not if its id,
/// or its version of the name, is there.
pub async fn insert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    new: &NewDefinition,
    max: i64,
) -> sqlx::Result<bool> {
    let inserted = sqlx::query!(
        "
        insert into workflow_definitions (project_id, id, namespace, name, version, definition)
        select $1, $2, $3, $4, $5, $6
        where (
            select count(*)
            from (select from workflow_definitions where project_id = $1 limit $7) known
        ) < $7
        on conflict do nothing
        ",
        project_id.0,
        new.id,
        new.namespace,
        new.name,
        new.version,
        new.definition,
        max,
    )
    .execute(conn)
    .await?;
    Ok(inserted.rows_affected() > 0)
}

/// The definition with an id.
pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: Uuid,
) -> sqlx::Result<Option<DefinitionRow>> {
    sqlx::query_as!(
        DefinitionRow,
        "
        select id, namespace, name, version, definition, created_at
        from workflow_definitions
        where project_id = $1 and id = $2
        ",
        project_id.0,
        id,
    )
    .fetch_optional(conn)
    .await
}

/// A version of a name in a namespace; the newest one if none is asked for.
pub async fn by_name(
    conn: &mut PgConnection,
    project_id: ProjectId,
    (namespace, name): (&str, &str),
    version: Option<i32>,
) -> sqlx::Result<Option<DefinitionRow>> {
    sqlx::query_as!(
        DefinitionRow,
        "
        select id, namespace, name, version, definition, created_at
        from workflow_definitions
        where project_id = $1 and namespace = $2 and name = $3 and ($4::int is null or version = $4)
        order by version desc
        limit 1
        ",
        project_id.0,
        namespace,
        name,
        version,
    )
    .fetch_optional(conn)
    .await
}

/// A part of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// Entries that it has at most.
    pub limit: i64,
    /// Entries before it.
    pub offset: i64,
}

/// The versions of a name, newest first; without a name those of all names, by name.
pub async fn versions(
    conn: &mut PgConnection,
    project_id: ProjectId,
    (namespace, name): (Option<&str>, Option<&str>),
    page: Page,
) -> sqlx::Result<Vec<DefinitionRow>> {
    sqlx::query_as!(
        DefinitionRow,
        "
        select id, namespace, name, version, definition, created_at
        from workflow_definitions
        where project_id = $1
            and ($2::text is null or namespace = $2) and ($3::text is null or name = $3)
        order by namespace, name, version desc
        limit $4
        offset $5
        ",
        project_id.0,
        namespace,
        name,
        page.limit,
        page.offset,
    )
    .fetch_all(conn)
    .await
}

/// Deletes a definition. Returns whether it was there.
pub async fn delete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: Uuid,
) -> sqlx::Result<bool> {
    let deleted = sqlx::query!(
        "delete from workflow_definitions where project_id = $1 and id = $2",
        project_id.0,
        id,
    )
    .execute(conn)
    .await?;
    Ok(deleted.rows_affected() > 0)
}

/// Frees a key whose workflow was pruned by a node that does not know of keys.
pub async fn free_key(
    conn: &mut PgConnection,
    project_id: ProjectId,
    request_key: &str,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        delete from workflow_starts
        where project_id = $1 and request_key = $2 and not exists (
            select from workflows
            where project_id = workflow_starts.project_id and id = workflow_starts.workflow_id
        )
        ",
        project_id.0,
        request_key,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Records what a workflow was started from. Returns whether it did: not if the key was used.
pub async fn note_start(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
    start: &WorkflowStart,
) -> sqlx::Result<bool> {
    let noted = sqlx::query!(
        "
        insert into workflow_starts (project_id, workflow_id, definition_id, request_key)
        values ($1, $2, $3, $4)
        on conflict do nothing
        ",
        project_id.0,
        id.0,
        start.definition_id,
        start.request_key,
    )
    .execute(conn)
    .await?;
    Ok(noted.rows_affected() > 0)
}

/// The workflow that was started with a key, and the definition that it was started from.
pub async fn started_with(
    conn: &mut PgConnection,
    project_id: ProjectId,
    request_key: &str,
) -> sqlx::Result<Option<(WorkflowId, Uuid)>> {
    let found = sqlx::query!(
        r#"
        select begun.workflow_id "workflow_id: WorkflowId", begun.definition_id
        from workflow_starts begun
        join workflows on workflows.project_id = begun.project_id and workflows.id = begun.workflow_id
        where begun.project_id = $1 and begun.request_key = $2
        "#,
        project_id.0,
        request_key,
    )
    .fetch_optional(conn)
    .await?;
    Ok(found.map(|it| (it.workflow_id, it.definition_id)))
}

/// The start of a workflow; none if it was not started from a definition.
pub async fn start_of(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
) -> sqlx::Result<Option<WorkflowStart>> {
    sqlx::query_as!(
        WorkflowStart,
        "
        select definition_id, request_key
        from workflow_starts
        where project_id = $1 and workflow_id = $2
        ",
        project_id.0,
        id.0,
    )
    .fetch_optional(conn)
    .await
}
