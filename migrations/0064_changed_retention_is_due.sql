-- A queue whose retention changes is looked at.
create function follow_retention() returns trigger language plpgsql as $$
begin
    update retention_dues set due_at = now()
    where project_id = new.project_id and queue = new.name and due_at > now();
    return null;
end
$$;
create trigger queues_retention_followed after insert or update of retention_days on queues
for each row execute function follow_retention();
