-- The job of a queue that has been ready for longest: among the first twenty priorities of jobs
-- without a constraint key, and the first jobs of `max_keys` keys. Types that are paused count only
-- if asked for. Each walk passes over jobs whose age is not their place in the queue, up to a
-- number: they are looked at apart. It begins at the first job, not at the dead entries before it.
create function longest_ready(
    of_project integer, of_queue text, max_keys integer, with_paused boolean
)
returns table (id uuid, job_type text, ready_at timestamptz) language sql stable as $$
    with recursive rank_of as (
        (
            select jobs.rank, jobs.run_at
            from jobs
            where jobs.project_id = of_project and jobs.queue = of_queue
                and jobs.state = 'pending' and jobs.constraint_key is null
            order by jobs.rank, jobs.run_at, jobs.id
            limit 1
        )
        union all
        select next.rank, next.run_at
        from rank_of
        cross join lateral (
            select jobs.rank, jobs.run_at
            from jobs
            where jobs.project_id = of_project and jobs.queue = of_queue
                and jobs.state = 'pending' and jobs.constraint_key is null
                and jobs.rank > rank_of.rank
            order by jobs.rank, jobs.run_at, jobs.id
            limit 1
        ) next
    ), key_of as (
        (
            select jobs.constraint_key, jobs.rank, jobs.run_at
            from jobs
            where jobs.project_id = of_project and jobs.queue = of_queue
                and jobs.state = 'pending' and jobs.constraint_key is not null
            order by jobs.constraint_key, jobs.rank, jobs.run_at, jobs.id
            limit 1
        )
        union all
        select next.constraint_key, next.rank, next.run_at
        from key_of
        cross join lateral (
            select jobs.constraint_key, jobs.rank, jobs.run_at
            from jobs
            where jobs.project_id = of_project and jobs.queue = of_queue
                and jobs.state = 'pending' and jobs.constraint_key is not null
                and (jobs.constraint_key, jobs.rank) > (key_of.constraint_key, key_of.rank)
            order by jobs.constraint_key, jobs.rank, jobs.run_at, jobs.id
            limit 1
        ) next
    ), kind as materialized (
        select queue_types.job_type, queue_types.resumed_at,
               queue_types.paused_at is not null and not with_paused as is_paused
        from queue_types
        where queue_types.project_id = of_project and queue_types.queue = of_queue
            and (
                queue_types.resumed_at is not null
                or (queue_types.paused_at is not null and not with_paused)
            )
    ), candidate as (
        select first.id, first.job_type, first.ready_at
        from (select rank_of.rank, rank_of.run_at from rank_of limit 20) bounded
        cross join lateral (
            select front.id, front.job_type, front.since as ready_at
            from (
                select jobs.id, jobs.job_type, jobs.ready_at,
                       greatest(jobs.run_at, jobs.created_at) as since
                from jobs
                where jobs.project_id = of_project and jobs.queue = of_queue
                    and jobs.state = 'pending' and jobs.constraint_key is null
                    and jobs.rank = bounded.rank and jobs.run_at >= bounded.run_at
                order by jobs.rank, jobs.run_at, jobs.id
                limit 10000
            ) front
            where front.ready_at is null and not exists (
                select
                from kind
                where kind.job_type = front.job_type
                    and (kind.is_paused or kind.resumed_at > front.since)
            )
            limit 1
        ) first
        union all
        select first.id, first.job_type, first.ready_at
        from (
            select key_of.constraint_key, key_of.rank, key_of.run_at from key_of limit max_keys
        ) bounded
        cross join lateral (
            select front.id, front.job_type, front.since as ready_at
            from (
                select jobs.id, jobs.job_type, jobs.ready_at,
                       greatest(jobs.run_at, jobs.created_at) as since
                from jobs
                where jobs.project_id = of_project and jobs.queue = of_queue
                    and jobs.state = 'pending' and jobs.constraint_key = bounded.constraint_key
                    and jobs.rank = bounded.rank and jobs.run_at >= bounded.run_at
                order by jobs.constraint_key, jobs.rank, jobs.run_at, jobs.id
                limit 100
            ) front
            where front.ready_at is null
            limit 1
        ) first
        union all
        (
            select again.id, again.job_type, again.since
            from (
                select jobs.id, jobs.job_type,
                       greatest(jobs.run_at, jobs.created_at, jobs.ready_at) as since
                from jobs
                where jobs.project_id = of_project and jobs.queue = of_queue
                    and jobs.state = 'pending' and jobs.ready_at is not null
                order by jobs.ready_at
                limit 10000
            ) again
            where not exists (
                select
                from kind
                where kind.job_type = again.job_type
                    and (kind.is_paused or kind.resumed_at > again.since)
            )
            limit 1
        )
        union all
        select first.id, kind.job_type, kind.resumed_at
        from kind
        cross join lateral (
            select front.id
            from (
                select jobs.id, greatest(jobs.run_at, jobs.created_at, jobs.ready_at) as since
                from jobs
                where jobs.project_id = of_project and jobs.queue = of_queue
                    and jobs.job_type = kind.job_type and jobs.state = 'pending'
                    and jobs.constraint_key is null
                order by jobs.rank, jobs.run_at, jobs.id
                limit 10000
            ) front
            where front.since < kind.resumed_at
            limit 1
        ) first
        where not kind.is_paused
    )
    select candidate.id, candidate.job_type,
           greatest(candidate.ready_at, kind.resumed_at, queues.resumed_at) as ready_at
    from candidate
    left join kind on kind.job_type = candidate.job_type
    left join queues on queues.project_id = of_project and queues.name = of_queue
    where kind.is_paused is not true
    order by 3
    limit 1
$$;
