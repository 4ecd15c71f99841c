//! What a project says about its job types.

use chrono::{DateTime, Utc};
use fencepost_domain::ids::ProjectId;
use sqlx::PgConnection;

use crate::workers::ALIVE_SECONDS;

/// The schema of a job type's payloads.
#[derive(Debug, Clone)]
pub struct TypeSchema {
    pub job_type: String,
    /// JSON, as it was sent.
    pub schema: String,
    pub updated_at: DateTime<Utc>,
}

/// Types among these that have a schema.
pub async fn schemas_of(
    conn: &mut PgConnection,
    project_id: ProjectId,
    job_types: &[String],
) -> sqlx::Result<Vec<TypeSchema>> {
    sqlx::query_as!(
        TypeSchema,
        r#"
        select job_type, schema, updated_at
        from job_types
        where project_id = $1 and job_type = any($2)
        "#,
        project_id.0,
        job_types,
    )
    .fetch_all(conn)
    .await
}

/// Types with a schema, by name, up to `limit`.
pub async fn names(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        "select job_type from job_types where project_id = $1 order by job_type limit $2",
        project_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Stores the schema of a type, unless it is a new one and the project has `max` of them: a few
/// more, if requests come together. Returns whether it is stored.
pub async fn upsert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    job_type: &str,
    schema: &str,
    max: i64,
) -> sqlx::Result<bool> {
    let stored = sqlx::query!(
        r#"
        insert into job_types (project_id, job_type, schema)
        select $1, $2, $3
        where exists (select from job_types where project_id = $1 and job_type = $2)
            or (
                select count(*) < $4
                from (select from job_types where project_id = $1 limit $4) known
            )
        on conflict (project_id, job_type) do update
        set schema = excluded.schema, updated_at = now()
        "#,
        project_id.0,
        job_type,
        schema,
        max,
    )
    .execute(conn)
    .await?;
    Ok(stored.rows_affected() > 0)
}

/// Removes the schema of a type.
pub async fn delete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    job_type: &str,
) -> sqlx::Result<()> {
    sqlx::query!(
        "delete from job_types where project_id = $1 and job_type = $2",
        project_id.0,
        job_type,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The first types that live workers take from a queue, by name, of those that name their types.
pub async fn taken(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    limit: i64,
) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        r#"
        select distinct job_type "job_type!"
        from workers
        cross join unnest(job_types) job_type
        where project_id = $1 and state = 'running' and lost_at is null
            and coalesce(directive, 'running') = 'running'
            and last_seen_at > now() - make_interval(secs => greatest($3::int, 3 * beat_seconds))
            and $2 = any(queues)
        order by job_type
        limit $4
        "#,
        project_id.0,
        queue,
        ALIVE_SECONDS,
        limit,
    )
    .fetch_all(conn)
    .await
}
