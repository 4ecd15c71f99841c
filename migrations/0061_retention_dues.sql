-- When each queue is looked at next for finished jobs that are past their retention: a row for each
-- row of `queue_counts`. What ends after a look is kept for the whole retention, so the next one can
-- wait as long, and an idle instance reads nothing.
create table retention_dues (
    project_id integer not null,
    queue text not null,
    due_at timestamptz not null default now(),
    primary key (project_id, queue)
);
-- The loop, across projects.
create index retention_dues_by_time on retention_dues (due_at);
