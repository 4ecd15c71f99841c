-- `beat_seconds`: the longest time between two calls, as the worker registered. Null: it has not
-- said. `counts_losses`: each lease that it loses counts as a failure of its job.
alter table workers
add column beat_seconds integer check (beat_seconds between 5 and 3600),
add column counts_losses boolean not null default true;
