-- How many jobs run, in queues where they are too many to be counted one by one.
alter table queue_deltas add column processing bigint not null default 0;
alter table queue_counts add column processing bigint not null default 0;

create or replace view unmerged_deltas with (security_invoker = true) as
select queue_deltas.*
from queue_deltas
where made_by >= (
    select case
        when merged_before <= pg_snapshot_xmin(pg_current_snapshot())::text::bigint
        then merged_before
        else 0
    end
    from merged_deltas
) and made_by < 9223372036854775807;

-- Versions before this one count no running jobs, and drop the counts that they merge: a walk over
-- all queues corrects them again and again. It has come to this queue, or ended at this time.
create table count_corrections (
    only_one boolean primary key default true check (only_one),
    project_id integer not null default 0,
    queue text not null default '',
    ended_at timestamptz not null default '-infinity'
);
insert into count_corrections default values;
