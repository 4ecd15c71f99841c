//! Recent starts of groups whose queue limits their rate.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::ProjectId,
    rate::{Handout, RateLimit, RateLimits},
};
use sqlx::{PgConnection, types::Json};
use uuid::Uuid;

use super::GroupKey;

/// Jobs among the first of a queue, of a type, and of a constraint key whose groups a claim
/// considers.
const MAX_CANDIDATES: i64 = 2_000;
const MAX_CANDIDATES_OF_KEY: i64 = 20;
/// Groups that one statement looks at because of their time.
const MAX_DUE: i64 = 500;

/// The starts of a group, oldest first, and the time.
#[derive(Debug, Clone)]
pub struct GroupStarts {
    pub group: String,
    pub starts: Vec<Handout>,
    /// The database's clock.
    pub now: DateTime<Utc>,
}

/// Microseconds since 1970, and a number of jobs.
pub(crate) type Stored = Vec<(i64, i32)>;

/// The limits of a queue's settings.
#[must_use]
pub fn limits(counts: &[i32], seconds: &[i32]) -> RateLimits {
    RateLimits::of(pairs(counts, seconds))
}

pub(crate) fn pairs(counts: &[i32], seconds: &[i32]) -> Vec<RateLimit> {
    let pairs = counts.iter().zip(seconds);
    pairs.map(|(&count, &per_seconds)| RateLimit { count, per_seconds }).collect()
}

pub(crate) fn read(stored: Option<Json<Stored>>) -> Vec<Handout> {
    let stored = stored.map(|it| it.0).unwrap_or_default();
    let read =
        |(micros, jobs)| Some(Handout { at: DateTime::from_timestamp_micros(micros)?, jobs });
    stored.into_iter().filter_map(read).collect()
}

/// The jobs that a claim may take.
#[derive(Debug, Clone, Copy)]
pub struct Sought<'a> {
    /// Types of those without a constraint key; none: all.
    pub job_types: Option<&'a [String]>,
    pub constraint_keys: &'a [Uuid],
    /// Groups of which as many run as may.
    pub full: &'a [String],
    /// Whether only those with a command.
    pub only_commands: bool,
}

/// The groups of the jobs that a claim may take next. The queue must be locked by an earlier
/// statement of this transaction.
pub async fn candidates(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    sought: Sought<'_>,
) -> sqlx::Result<Vec<GroupStarts>> {
    let rows = sqlx::query!(
        r#"
        with first as materialized (
            (
                select group_key, has_command
                from jobs
                where $3::text[] is null and not $8 and project_id = $1 and queue = $2
                    and state = 'pending' and constraint_key is null
                order by rank, run_at, id
                limit $5
            )
            union all
            (
                select group_key, has_command
                from jobs
                where $3::text[] is null and $8 and project_id = $1 and queue = $2
                    and state = 'pending' and constraint_key is null and has_command
                order by rank, run_at, id
                limit $5
            )
            union all
            select found.*
            from unnest($3::text[]) as wanted(job_type)
            cross join lateral (
                select group_key, has_command
                from jobs
                where project_id = $1 and queue = $2 and job_type = wanted.job_type
                    and state = 'pending' and constraint_key is null
                order by rank, run_at, id
                limit $5
            ) found
            union all
            select found.*
            from unnest($4::uuid[]) as open(constraint_key)
            cross join lateral (
                select group_key, has_command
                from jobs
                where project_id = $1 and queue = $2 and state = 'pending'
                    and constraint_key = open.constraint_key
                order by rank, run_at, id
                limit $6
            ) found
        )
        select named.group_key "group!", past.starts "starts?: Json<Stored>",
               statement_timestamp() "now!"
        from (
            select distinct group_key
            from first
            where group_key is not null and group_key <> all($7) and (has_command or not $8)
        ) named
        left join group_handouts past
            on past.project_id = $1 and past.queue = $2 and past.group_key = named.group_key
        "#,
        project_id.0,
        queue,
        sought.job_types,
        sought.constraint_keys,
        MAX_CANDIDATES,
        MAX_CANDIDATES_OF_KEY,
        sought.full,
        sought.only_commands,
    )
    .fetch_all(conn)
    .await?;
    let row = |(group, starts, now)| GroupStarts { group, starts: read(starts), now };
    Ok(rows.into_iter().map(|it| row((it.group, it.starts, it.now))).collect())
}

/// A group after jobs of it have started.
#[derive(Debug, Clone)]
pub struct KeptStarts {
    pub group: String,
    pub starts: Vec<Handout>,
    /// Starts that are left.
    pub room: i32,
    /// When the next job may start; none: one may now.
    pub full_until: Option<DateTime<Utc>>,
    /// When all windows are empty.
    pub ends_at: DateTime<Utc>,
}

/// Stores the starts of groups of a queue, which must be locked. Those in which jobs wait though
/// more may start are noted: room has come since admission looked.
pub async fn keep(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    kept: &[KeptStarts],
) -> sqlx::Result<()> {
    let starts = kept.iter().map(|it| -> Stored {
        it.starts.iter().map(|it| (it.at.timestamp_micros(), it.jobs)).collect()
    });
    let starts: Vec<_> = starts.map(Json).collect();
    sqlx::query!(
        "
        with sent as materialized (
            select *
            from unnest($3::text[], $4::jsonb[], $5::int[], $6::timestamptz[], $7::timestamptz[])
                as sent(group_key, starts, room, full_until, ends_at)
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select $1, $2, group_key
            from sent
            where room > 0 and exists (
                select from jobs
                where project_id = $1 and queue = $2 and group_key = sent.group_key
                    and waits_for_group
            )
        )
        insert into group_handouts (
            project_id, queue, group_key, starts, room, full_until, ends_at, look_at
        )
        select $1, $2, group_key, starts, room, full_until, ends_at, coalesce(full_until, ends_at)
        from sent
        on conflict (project_id, queue, group_key) do update
        set starts = excluded.starts, room = excluded.room, full_until = excluded.full_until,
            ends_at = excluded.ends_at, look_at = excluded.look_at
        ",
        project_id.0,
        queue,
        &kept.iter().map(|it| it.group.as_str()).collect::<Vec<_>>() as &[&str],
        &starts as &[Json<Stored>],
        &kept.iter().map(|it| it.room).collect::<Vec<_>>(),
        &kept.iter().map(|it| it.full_until).collect::<Vec<_>>() as &[Option<DateTime<Utc>>],
        &kept.iter().map(|it| it.ends_at).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// When admission looks at a group again.
#[derive(Debug, Clone)]
pub struct NextLook {
    pub key: GroupKey,
    pub at: DateTime<Utc>,
    /// When the next job may start; none: one may now.
    pub full_until: Option<DateTime<Utc>>,
}

/// Says when admission looks again at those of these groups in which jobs wait. One whose starts
/// a claim is changing is left to it.
pub async fn set_looks(conn: &mut PgConnection, looks: &[NextLook]) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with waiting as materialized (
            select sent.*
            from unnest($1::int[], $2::text[], $3::text[], $4::timestamptz[], $5::timestamptz[])
                as sent(project_id, queue, group_key, look_at, full_until)
            cross join lateral (
                select
                from group_handouts
                where project_id = sent.project_id and queue = sent.queue
                    and group_key = sent.group_key
                for update skip locked
            ) locked
            where exists (
                select from jobs
                where project_id = sent.project_id and queue = sent.queue
                    and group_key = sent.group_key and waits_for_group
            )
        )
        update group_handouts
        set look_at = waiting.look_at, full_until = waiting.full_until
        from waiting
        where group_handouts.project_id = waiting.project_id
            and group_handouts.queue = waiting.queue
            and group_handouts.group_key = waiting.group_key
        ",
        &looks.iter().map(|it| it.key.project_id.0).collect::<Vec<_>>(),
        &looks.iter().map(|it| it.key.queue.as_str()).collect::<Vec<_>>() as &[&str],
        &looks.iter().map(|it| it.key.group.as_str()).collect::<Vec<_>>() as &[&str],
        &looks.iter().map(|it| it.at).collect::<Vec<_>>(),
        &looks.iter().map(|it| it.full_until).collect::<Vec<_>>() as &[Option<DateTime<Utc>>],
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Notes groups of a queue.
pub async fn note(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    groups: &[String],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into group_notes (project_id, queue, group_key)
        select $1, $2, group_key from unnest($3::text[]) as named(group_key)
        ",
        project_id.0,
        queue,
        groups,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Notes groups that have room again, and deletes what is known of those whose windows are empty.
/// Returns whether there may be more.
pub async fn look(conn: &mut PgConnection) -> sqlx::Result<bool> {
    let looked = sqlx::query_scalar!(
        r#"
        with due as materialized (
            select project_id, queue, group_key, ends_at
            from group_handouts
            where look_at <= statement_timestamp()
            order by look_at
            limit $1
            for update skip locked
        ), gone as (
            delete from group_handouts
            using due
            where group_handouts.project_id = due.project_id and group_handouts.queue = due.queue
                and group_handouts.group_key = due.group_key
                and due.ends_at <= statement_timestamp()
        ), kept as (
            update group_handouts
            set look_at = due.ends_at
            from due
            where group_handouts.project_id = due.project_id and group_handouts.queue = due.queue
                and group_handouts.group_key = due.group_key
                and due.ends_at > statement_timestamp()
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select project_id, queue, group_key from due
        )
        select count(*) "looked!" from due
        "#,
        MAX_DUE,
    )
    .fetch_one(conn)
    .await?;
    Ok(looked == MAX_DUE)
}
