-- no-transaction
-- Lists of a queue's jobs in one state. The states of the hot path are not in it: those have indexes
-- of their own, and another one would cost each job.
create index concurrently jobs_by_queue_and_state on jobs (project_id, queue, state, id)
where state in ('scheduled', 'backoff', 'dead_letter');
