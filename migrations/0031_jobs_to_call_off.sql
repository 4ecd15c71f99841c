-- Jobs that have ended without success and whose children must be called off. Beside the jobs, because
-- each index of theirs is opened by every statement that writes them. `has_orphans` of the jobs is not read
-- any more; it goes when no release writes it.
create table orphaned_parents (
    project_id integer not null,
    job_id uuid not null,
    primary key (project_id, job_id)
);
insert into orphaned_parents (project_id, job_id)
select project_id, id from jobs where has_orphans
union
select project_id, id from finished_jobs where has_orphans;

-- Jobs that are called off if nobody is at them by a time. Beside the jobs for the same reason.
create table job_expiries (
    project_id integer not null,
    job_id uuid not null,
    expires_at timestamptz not null,
    primary key (project_id, job_id)
);
insert into job_expiries (project_id, job_id, expires_at)
select project_id, id, expires_at from jobs where expires_at is not null and completed_at is null;
-- Swept by time, across projects.
create index job_expiries_by_time on job_expiries (expires_at);
