-- no-transaction
-- For the alarm. Few jobs are lost twice in a row.
create index concurrently job_bodies_lost_again on job_bodies (project_id, lost_again_at)
where lost_again_at is not null;
