//! Logs: the output of jobs.

use sqlx::PgConnection;

use fencepost_domain::{
    ids::JobKey,
    limits::{MAX_LOG_BYTES, MAX_LOG_CHUNKS_KEPT},
};

/// A chunk of an attempt's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogChunk {
    pub stream: String,
    pub sequence: i64,
    pub data: String,
    pub timestamp_ms: i64,
}

/// The stored totals of an attempt's logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogTotals {
    pub kept_bytes: i64,
    pub kept_chunks: i32,
    pub is_truncated: bool,
}

/// Locks the totals of an attempt until the end of the transaction, and creates them if they are
/// missing.
pub async fn lock_totals(
    conn: &mut PgConnection,
    job: JobKey,
    attempt: i32,
) -> sqlx::Result<LogTotals> {
    sqlx::query_as!(
        LogTotals,
        r#"
        insert into job_log_totals as totals (project_id, job_id, attempt)
        values ($1, $2, $3)
        on conflict (project_id, job_id, attempt) do update set kept_bytes = totals.kept_bytes
        returning kept_bytes, kept_chunks, is_truncated
        "#,
        job.project_id.0,
        job.id.0,
        attempt,
    )
    .fetch_one(conn)
    .await
}

/// Which of these chunks were stored before, by stream and sequence. Returns their indexes.
pub async fn find_taken(
    conn: &mut PgConnection,
    job: JobKey,
    attempt: i32,
    chunks: &[LogChunk],
) -> sqlx::Result<Vec<i64>> {
    sqlx::query_scalar!(
        r#"
        select sent.number - 1 "number!"
        from unnest($4::text[], $5::bigint[]) with ordinality as sent(stream, sequence, number)
        join job_logs kept
            on kept.project_id = $1 and kept.job_id = $2 and kept.attempt = $3
            and kept.stream = sent.stream and kept.sequence = sent.sequence
        "#,
        job.project_id.0,
        job.id.0,
        attempt,
        &chunks.iter().map(|it| it.stream.as_str()).collect::<Vec<_>>() as &[&str],
        &chunks.iter().map(|it| it.sequence).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await
}

/// Stores chunks. Their stream and sequence must be free.
///
/// # Errors
/// A unique violation when one was stored before.
pub async fn insert(
    conn: &mut PgConnection,
    job: JobKey,
    attempt: i32,
    chunks: &[LogChunk],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into job_logs (
            project_id, job_id, attempt, stream, sequence, data, timestamp_ms
        )
        select $1, $2, $3, stream, sequence, data, timestamp_ms
        from unnest($4::text[], $5::bigint[], $6::text[], $7::bigint[])
            as sent(stream, sequence, data, timestamp_ms)
        ",
        job.project_id.0,
        job.id.0,
        attempt,
        &chunks.iter().map(|it| it.stream.as_str()).collect::<Vec<_>>() as &[&str],
        &chunks.iter().map(|it| it.sequence).collect::<Vec<_>>(),
        &chunks.iter().map(|it| it.data.as_str()).collect::<Vec<_>>() as &[&str],
        &chunks.iter().map(|it| it.timestamp_ms).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Stores the new totals.
pub async fn set_totals(
    conn: &mut PgConnection,
    job: JobKey,
    attempt: i32,
    totals: LogTotals,
) -> sqlx::Result<()> {
    debug_assert!(totals.kept_bytes <= MAX_LOG_BYTES && totals.kept_chunks <= MAX_LOG_CHUNKS_KEPT);
    sqlx::query!(
        "
        update job_log_totals set kept_bytes = $4, kept_chunks = $5, is_truncated = $6
        where project_id = $1 and job_id = $2 and attempt = $3
        ",
        job.project_id.0,
        job.id.0,
        attempt,
        totals.kept_bytes,
        totals.kept_chunks,
        totals.is_truncated,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// A position in the logs of a job.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LogPlace {
    pub attempt: i32,
    pub stream: String,
    pub sequence: i64,
}

/// A stored chunk and its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRow {
    pub attempt: i32,
    pub stream: String,
    pub sequence: i64,
    pub data: String,
    pub timestamp_ms: i64,
}

/// The logs of a job after a position, optionally of one attempt: by attempt, stream and sequence.
pub async fn page(
    conn: &mut PgConnection,
    job: JobKey,
    attempt: Option<i32>,
    after: &LogPlace,
    limit: i64,
) -> sqlx::Result<Vec<LogRow>> {
    sqlx::query_as!(
        LogRow,
        "
        select attempt, stream, sequence, data, timestamp_ms
        from job_logs
        where project_id = $1 and job_id = $2
            and (attempt, stream, sequence) > ($3, $4, $5)
            and ($6::int is null or attempt = $6)
        order by attempt, stream, sequence
        limit $7
        ",
        job.project_id.0,
        job.id.0,
        after.attempt,
        after.stream,
        after.sequence,
        attempt,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// The attempts of a job whose logs were cut.
pub async fn truncated_attempts(conn: &mut PgConnection, job: JobKey) -> sqlx::Result<Vec<i32>> {
    sqlx::query_scalar!(
        "
        select attempt
        from job_log_totals
        where project_id = $1 and job_id = $2 and is_truncated
        order by attempt
        ",
        job.project_id.0,
        job.id.0,
    )
    .fetch_all(conn)
    .await
}
