-- Least privilege: a login for each kind of work, with the rights that it needs. To be run as the
-- owner of the database after each migration. `fencepost migrate --database-roles FOLDER` does so,
-- and sets the passwords. By hand:
--
--   psql "$OWNERS_URL" -1 -v ON_ERROR_STOP=1 -f ops/roles.sql
--   psql "$OWNERS_URL" -c '\password fencepost_hot'    and so on, for each role but the last
--
-- Each connection pool of a node logs in as one of these roles. The owner's login is only for
-- migrations and for operators' commands. This file can be run again at any time.

do $$
declare
    wanted text;
begin
    foreach wanted in array array[
        'fencepost_hot', 'fencepost_console', 'fencepost_people', 'fencepost_maint',
        'fencepost_metrics'
    ] loop
        if not exists (select from pg_roles where rolname = wanted) then
            execute format('create role %I noinherit', wanted);
        end if;
    end loop;
end
$$;

-- The owner sees the sessions of the other roles, and may end them, for `fencepost doctor`. It may
-- grant itself that on PostgreSQL 15; later versions leave it to an administrator.
do $$
begin
    if not (
        pg_has_role(current_user, 'pg_read_all_stats', 'usage')
        and pg_has_role(current_user, 'pg_signal_backend', 'usage')
    ) then
        execute format('grant pg_read_all_stats, pg_signal_backend to %I', current_user);
    end if;
exception when insufficient_privilege then
    raise notice 'the owner sees its own sessions only: fencepost doctor needs --admin-url';
end
$$;

-- No role may take another.
alter role fencepost_hot login;
alter role fencepost_console login;
alter role fencepost_people login;
alter role fencepost_maint login;
revoke create on schema public from public;
grant usage on schema public
    to fencepost_hot, fencepost_console, fencepost_people, fencepost_maint, fencepost_metrics;

revoke all on all tables in schema public
    from fencepost_hot, fencepost_console, fencepost_people, fencepost_maint, fencepost_metrics;

-- All tables with a project_id.
create or replace function pg_temp.tenant_tables() returns setof text language sql as $$
    select c.table_name::text
    from information_schema.columns c
    join information_schema.tables t using (table_schema, table_name)
    where c.table_schema = 'public' and c.column_name = 'project_id' and t.table_type = 'BASE TABLE'
$$;

create or replace function pg_temp.has_policies(of_table text) returns boolean language sql as $$
    select exists (
        select from pg_policies
        where schemaname = 'public' and tablename = of_table and policyname = 'of_one_project'
    )
$$;

do $$
declare
    it text;
begin
    for it in select pg_temp.tenant_tables() loop
        -- Only on a new table, since this locks it.
        if not pg_temp.has_policies(it) then
            -- The owner bypasses row-level security; the roles below do not.
            execute format('alter table %I enable row level security', it);
            -- The hot path, the loops and account management name the project in every statement,
            -- and work for many projects at once.
            execute format(
                'create policy of_everybody on %I to fencepost_hot, fencepost_maint, fencepost_people using (true)', it
            );
            -- If no project is set, no rows are visible.
            execute format(
                'create policy of_one_project on %I to fencepost_console
                 using (project_id = (select nullif(current_setting(''app.project_id'', true), '''')::int))', it
            );
        end if;
        if it = 'audit_log' then
            -- Append-only: old entries are deleted, none is changed.
            execute format('grant select, insert on %I to fencepost_console, fencepost_people', it);
            execute format('grant select, insert, delete on %I to fencepost_maint', it);
        elsif it = 'mails' then
            execute format(
                'grant select, insert, update, delete on %I to fencepost_people, fencepost_maint', it
            );
        elsif it in ('members', 'invitations', 'api_keys') then
            execute format(
                'grant select, insert, update, delete on %I to fencepost_console, fencepost_people, fencepost_maint', it
            );
        else
            execute format(
                'grant select, insert, update, delete on %I to fencepost_hot, fencepost_console, fencepost_maint', it
            );
        end if;
    end loop;
end
$$;

do $$
begin
    if not pg_temp.has_policies('projects') then
        alter table projects enable row level security;
        create policy of_everybody on projects
        to fencepost_hot, fencepost_maint, fencepost_people using (true);
        create policy of_one_project on projects to fencepost_console
        using (id = (select nullif(current_setting('app.project_id', true), '')::int));
    end if;
end
$$;

-- Tables that belong to no project.
grant select on projects, instance, _sqlx_migrations, default_alarms, effective_alarms
    to fencepost_hot, fencepost_console, fencepost_people, fencepost_maint;
grant insert, update on projects to fencepost_people;
grant execute on function forget_invitees to fencepost_maint;
grant update, delete on projects to fencepost_maint;
grant select, insert, update, delete on accounts, sessions, refresh_tokens, mail_tokens, signing_keys, nodes
    to fencepost_people;
grant select, insert, update, delete on totp, recovery_codes, login_challenges, email_changes,
    identities, passkeys, used_challenges, device_logins
    to fencepost_people;
grant select, delete on login_challenges, email_changes, used_challenges, device_logins
    to fencepost_maint;
grant select, update, delete on totp to fencepost_maint;
grant select, insert, update, delete on sessions, refresh_tokens, mail_tokens, nodes to fencepost_maint;
-- Append-only: old entries are deleted, none is changed.
grant select, insert on account_log to fencepost_people;
grant select, delete on account_log to fencepost_maint;
-- Accounts that were neither verified nor used are deleted: that locks them.
grant select, update, delete on accounts to fencepost_maint;
-- Mails report incidents.
grant select on incidents to fencepost_people;
-- The list of members shows e-mail addresses.
grant select (id, email) on accounts to fencepost_console;
-- Whether the node that runs an idempotent request is alive.
grant select on nodes to fencepost_hot;
grant select, insert, update on reaper_state to fencepost_maint;
grant select, update on usage_hour to fencepost_maint;
grant select on merged_deltas, unmerged_deltas to fencepost_hot, fencepost_console;
grant select, update on merged_deltas to fencepost_maint;
grant select on unmerged_deltas to fencepost_maint;
grant usage on all sequences in schema public to fencepost_people, fencepost_hot, fencepost_console, fencepost_maint;

-- The loops vacuum the hot tables. PostgreSQL can grant that from version 17 on; with older
-- versions only autovacuum does it.
do $$
begin
    if current_setting('server_version_num')::int >= 170000 then
        execute 'grant maintain on jobs, queue_deltas to fencepost_maint';
    end if;
end
$$;

-- The gauges include the age of the oldest snapshot of any database user. For an exporter: sizes
-- and database statistics, but no rows of any project. Only some owners may grant these.
do $$
begin
    grant pg_read_all_stats to fencepost_maint;
    grant pg_monitor to fencepost_metrics;
exception when insufficient_privilege then
    raise notice 'the owner may not grant pg_read_all_stats and pg_monitor';
end
$$;

-- Nodes set their own, shorter timeouts. These are for other uses of the logins.
do $$
declare
    it text;
begin
    foreach it in array array[
        'fencepost_hot', 'fencepost_console', 'fencepost_people', 'fencepost_maint'
    ] loop
        execute format('alter role %I set statement_timeout = ''60s''', it);
        execute format('alter role %I set idle_in_transaction_session_timeout = ''5s''', it);
    end loop;
end
$$;
