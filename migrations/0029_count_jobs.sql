-- What was there before anybody counted.
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
