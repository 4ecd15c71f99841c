-- Workers that hold leases of a queue and make no calls, among the first `max_holders` by name; how
-- many jobs each of them holds, up to 10,000; and when the last of these leases ends. A worker is
-- silent as in GET /v1/workers. Of holders without a name, and of pushes, nothing is known.
create function silent_holders(
    of_project integer, of_queue text, alive_seconds integer, max_holders integer
)
returns table (worker_id text, jobs bigint, return_by timestamptz) language sql stable as $$
    with recursive holder as (
        (
            select jobs.worker_id
            from jobs
            where jobs.project_id = of_project and jobs.queue = of_queue
                and jobs.state = 'processing'
            order by jobs.worker_id
            limit 1
        )
        union all
        select next.worker_id
        from holder
        cross join lateral (
            select jobs.worker_id
            from jobs
            where jobs.project_id = of_project and jobs.queue = of_queue
                and jobs.state = 'processing' and jobs.worker_id > holder.worker_id
            order by jobs.worker_id
            limit 1
        ) next
    )
    select bounded.worker_id, held.jobs, held.return_by
    from (select holder.worker_id from holder limit max_holders) bounded
    left join workers
        on workers.project_id = of_project and workers.worker_id = bounded.worker_id
    cross join lateral (
        select count(*) as jobs, max(silent.lease_expires_at) as return_by
        from (
            select jobs.lease_expires_at
            from jobs
            where jobs.project_id = of_project and jobs.queue = of_queue
                and jobs.state = 'processing' and jobs.worker_id = bounded.worker_id
                and greatest(
                    jobs.claimed_at,
                    jobs.lease_expires_at - make_interval(secs => jobs.lease_seconds)
                ) <= now() - make_interval(secs => alive_seconds)
            limit 10000
        ) silent
    ) held
    where bounded.worker_id not like 'fencepost-push-%'
        and bounded.worker_id not like 'anonymous:%'
        and (
            workers.state <> 'terminated' and workers.lost_at is null
            and workers.last_seen_at > now() - make_interval(
                secs => greatest(alive_seconds, 3 * workers.beat_seconds)
            )
        ) is not true
        and held.jobs > 0
$$;
