-- What was there before anybody counted, and before dead letters were grouped: those of a type are one group.
insert into queue_counts (project_id, queue, scheduled, active, backoff, dead_letter, succeeded, cancelled)
select project_id, queue,
       count(*) filter (where state = 'scheduled'),
       count(*) filter (where state in ('pending', 'backoff', 'processing')),
       count(*) filter (where state = 'backoff'),
       count(*) filter (where state = 'dead_letter'),
       count(*) filter (where state = 'succeeded'),
       count(*) filter (where state = 'cancelled')
from (
    select project_id, queue, state from jobs
    union all
    select project_id, queue, state from finished_jobs
) counted
group by project_id, queue;

insert into dead_letters (project_id, job_id, fingerprint, queue, job_type, died_at)
select project_id, id, md5(job_type)::uuid, queue, job_type, completed_at
from jobs
where completed_at is not null;

insert into dead_letter_groups (
    project_id, fingerprint, job_type, sample_job_id, jobs, first_seen_at, last_seen_at
)
select project_id, fingerprint, min(job_type), (array_agg(job_id order by died_at))[1], count(*),
       min(died_at), max(died_at)
from dead_letters
group by project_id, fingerprint;
