-- Since when a job is ready, if that is later than `run_at` and `created_at`: it was released, lost
-- its lease, or its last dependency was met. Null: since the later of these two. As null has a
-- meaning, no row is rewritten, and jobs that are claimed once store nothing.
alter table jobs add column ready_at timestamptz;
