-- How many jobs run, in queues where they are too many to be counted one by one. Versions before this
-- one count none: `correct_processing` of the loop that merges counts adds what is missing.
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
