-- A queue that is counted is looked at, and one that is forgotten is not. Nodes of the previous
-- release count queues, too.
create function follow_counted_queue() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into retention_dues (project_id, queue) values (new.project_id, new.queue)
        on conflict (project_id, queue) do nothing;
    else
        delete from retention_dues where project_id = old.project_id and queue = old.queue;
    end if;
    return null;
end
$$;
create trigger queue_counts_followed after insert or delete on queue_counts for each row
execute function follow_counted_queue();
