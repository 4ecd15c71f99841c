//! Counting jobs: the newest ones only, so that the cost is bounded.

use sqlx::PgConnection;

use super::filter::Filter;
use crate::ids::ProjectId;

/// Jobs that one count examines at most.
pub const MAX_COUNTED: i64 = 100_000;

/// The same where each job's last error is searched, which costs more.
const MAX_SEARCHED: i64 = 10_000;

/// How many of the newest [`MAX_COUNTED`] jobs match, fewer where errors are searched, and whether
/// there are more jobs than were examined.
pub async fn count(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
) -> sqlx::Result<(i64, bool)> {
    let (upper, lower) = filter.bounds(None);
    let most = if filter.error.is_some() { MAX_SEARCHED } else { MAX_COUNTED };
    let (names, chosen) = (filter.tag_names(), filter.chosen());
    let counted = sqlx::query!(
        r#"
        with examined as materialized (
            select * from (
                (select id, queue, job_type, state, created_at, failures, labels
                 from jobs
                 where (cardinality($5::text[]) = 0 or not $5 <@ array['succeeded', 'cancelled'])
                     and $12::uuid is null and $13::uuid[] is null and not $17
                     and project_id = $1 and id < $2 and id >= $3
                 order by id desc
                 limit $4)
                union all
                (select dead.job_id, job.queue, job.job_type, job.state, job.created_at,
                        job.failures, job.labels
                 from dead_letters dead
                 cross join lateral (
                     select queue, job_type, state, created_at, failures, labels
                     from jobs where project_id = $1 and id = dead.job_id
                     offset 0
                 ) job
                 where $17::boolean and $12::uuid is null and $13::uuid[] is null
                     and dead.project_id = $1 and dead.job_id < $2 and dead.job_id >= $3
                 order by dead.job_id desc
                 limit $4)
                union all
                (select id, queue, job_type, state, created_at, failures, labels
                 from finished_jobs
                 where (cardinality($5::text[]) = 0 or $5 && array['succeeded', 'cancelled'])
                     and $12::uuid is null and $13::uuid[] is null
                     and project_id = $1 and id < $2 and id >= $3
                 order by id desc
                 limit $4)
                union all
                (select member.job_id, job.queue, job.job_type, job.state, job.created_at,
                        job.failures, job.labels
                 from job_bodies member
                 cross join lateral (
                     select queue, job_type, state, created_at, failures, labels
                     from jobs where project_id = $1 and id = member.job_id
                     union all
                     select queue, job_type, state, created_at, failures, labels
                     from finished_jobs where project_id = $1 and id = member.job_id
                     -- Row by row: a join could walk over the jobs of all batches.
                     offset 0
                 ) job
                 where member.project_id = $1 and member.batch_id = $12
                     and ($13::uuid[] is null or member.job_id = any($13))
                     and member.job_id < $2 and member.job_id >= $3
                 order by member.job_id desc
                 limit $4)
                union all
                (select chosen.id, job.queue, job.job_type, job.state, job.created_at, job.failures,
                        job.labels
                 from unnest($13::uuid[]) chosen (id)
                 cross join lateral (
                     select queue, job_type, state, created_at, failures, labels
                     from jobs where project_id = $1 and id = chosen.id
                     union all
                     select queue, job_type, state, created_at, failures, labels
                     from finished_jobs where project_id = $1 and id = chosen.id
                     offset 0
                 ) job
                 where $12::uuid is null and chosen.id < $2 and chosen.id >= $3
                 order by chosen.id desc
                 limit $4)
            ) both_tables
            order by id desc
            limit $4
        )
        select (
            select count(*) from examined
            where (cardinality($5::text[]) = 0 or state = any($5))
                and ($6::text is null or queue = $6)
                and ($7::text is null or job_type = $7)
                and ($18::text[] is null or labels @> $18)
                and ($8::timestamptz is null or created_at >= $8)
                and ($9::timestamptz is null or created_at < $9)
                and ($15::bigint is null
                    or ('x' || right(replace(id::text, '-', ''), 15))::bit(60)::bigint & $15
                        = $16::bigint)
                and (($10::jsonb is null and $11::text[] is null) or (
                    select ($10 is null or tagged.tags @> $10)
                        and ($11 is null or tagged.tags ?& $11)
                    from job_bodies tagged
                    where tagged.project_id = $1 and tagged.job_id = examined.id
                ))
                and ($14::text is null or (failures > 0 and (
                    select strpos(lower(left(
                        concat_ws(': ', past.error_kind, past.error_message), 1000
                    )), $14) > 0
                    from attempts past
                    where past.project_id = $1 and past.job_id = examined.id
                        and coalesce(past.error_kind, past.error_message, past.error_stack_trace)
                            is not null
                    order by past.attempt desc
                    limit 1
                )))
        ) "matching!", (select count(*) from examined) "examined!"
        "#,
        project_id.0,
        upper,
        lower,
        most + 1,
        &filter.stored_states() as &[&str],
        filter.queue.as_deref(),
        filter.job_type.as_deref(),
        filter.created_after,
        filter.created_before,
        filter.tag_values(),
        names.as_deref(),
        filter.batch_id.map(|it| it.0),
        chosen.as_deref(),
        filter.error_text(),
        filter.id_end.map(|it| it.0),
        filter.id_end.map(|it| it.1),
        filter.is_dead_only(),
        filter.labels.as_deref(),
    )
    .fetch_one(conn)
    .await?;
    Ok((counted.matching, counted.examined > most))
}
