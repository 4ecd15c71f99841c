-- Addresses of people who were invited do not outlive their project: its log keeps a hash of each.
-- No other row of the log is ever changed, and no login may change one but by this function.
--
-- The project's id goes into the hash: the same address has another one in another project.
create function without_email(entry text, of_project integer) returns text
language sql
immutable
as $$
    select case
        when entry::jsonb ->> 'email' like '%@%' then jsonb_set(
            entry::jsonb, '{email}',
            to_jsonb('sha256:' || encode(
                sha256(convert_to(of_project || ' ' || (entry::jsonb ->> 'email'), 'UTF8')), 'hex'
            ))
        )::text
        else entry
    end
$$;

create function keep_entry() returns trigger language plpgsql as $$
begin
    if old.action in ('invitation.created', 'invitation.revoked')
        and exists (select from projects where id = old.project_id and deleted_at is not null)
        and row(old.project_id, old.id, old.at, old.actor_kind, old.actor_id, old.action, old.target,
                old.request_id, old.address, without_email(old.before, old.project_id),
                without_email(old.after, old.project_id))
            is not distinct from
            row(new.project_id, new.id, new.at, new.actor_kind, new.actor_id, new.action, new.target,
                new.request_id, new.address, new.before, new.after)
    then
        return new;
    end if;
    raise exception 'rows of % are never changed', tg_table_name;
end
$$;
drop trigger audit_log_is_append_only on audit_log;
create trigger audit_log_is_append_only before update on audit_log
for each row execute function keep_entry();

-- Forgets some addresses of a deleted project, and returns how many.
create function forget_invitees(of_project integer, most integer) returns bigint
language sql
security definer
set search_path = public, pg_temp
as $$
    with known as (
        select id
        from audit_log
        where project_id = of_project and action in ('invitation.created', 'invitation.revoked')
            and (before like '%"email":"%@%' or after like '%"email":"%@%')
        limit most
    ), changed as (
        update audit_log entry
        set before = without_email(before, of_project), after = without_email(after, of_project)
        from known
        where entry.project_id = of_project and entry.id = known.id
        returning 1
    )
    select count(*) from changed
$$;
-- `ops/roles.sql` lets the loops call it.
revoke execute on function forget_invitees from public;

-- Projects that were deleted before.
select forget_invitees(id, 1000000000) from projects where purged_at is not null;
