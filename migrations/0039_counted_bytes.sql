-- What else counts as bytes of a project, in whatever table it is stored.
--
-- A row keeps in `counted_bytes` what it was counted as: its deletion subtracts the same, whatever
-- the rules were when it was stored. Null: nothing, because its texts are short, or it is older
-- than the column. Each table gets its column and triggers in a file of its own, which locks it for
-- a moment.

-- Notes by how much the count of a row changed.
create function note_counted_bytes() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into stored_byte_deltas values (new.project_id, new.counted_bytes);
    elsif tg_op = 'DELETE' then
        insert into stored_byte_deltas values (old.project_id, -old.counted_bytes);
    else
        insert into stored_byte_deltas
        values (
            new.project_id, coalesce(new.counted_bytes, 0) - coalesce(old.counted_bytes, 0)
        );
    end if;
    return null;
end
$$;

-- Where many rows come and go at a time: one change for a statement.
create function note_counted_rows() returns trigger language plpgsql as $$
begin
    insert into stored_byte_deltas
    select project_id, tg_argv[0]::int * sum(counted_bytes)
    from changed
    where counted_bytes is not null
    group by project_id;
    return null;
end
$$;

-- Where a project has few rows: each counts as 256 bytes and the texts of the named columns.
create function count_texts() returns trigger language plpgsql as $$
begin
    select 256 + coalesce(sum(octet_length(value)), 0) into new.counted_bytes
    from jsonb_each_text(to_jsonb(new))
    where key = any(tg_argv);
    return new;
end
$$;

-- The bytes of the names of a job's queue and type, if they are long. Null: they are short.
create function long_names(queue text, job_type text) returns integer language sql immutable as $$
    select case
        when octet_length(queue) + octet_length(job_type) > 256
        then octet_length(queue) + octet_length(job_type)
    end
$$;

-- Counts the rows of such a table, by these columns: called by the file of each table, and dropped
-- by the last one. Rows are counted from when they are written next.
create procedure count_rows_of(counted regclass, notes regproc, variadic names text[])
language plpgsql as $$
declare
    columns text := (select string_agg(format('%I', it), ', ') from unnest(names) it);
    quoted text := (select string_agg(quote_literal(it), ', ') from unnest(names) it);
    before text := (select string_agg(format('old.%I', it), ', ') from unnest(names) it);
    after text := (select string_agg(format('new.%I', it), ', ') from unnest(names) it);
begin
    execute format('alter table %s add column counted_bytes integer', counted);
    execute format(
        'create trigger texts_counted before insert on %s for each row
         execute function count_texts(%s)', counted, quoted
    );
    execute format(
        'create trigger texts_changed before update of %s on %s for each row
         when ((%s) is distinct from (%s)) execute function count_texts(%s)',
        columns, counted, before, after, quoted
    );
    execute format(
        'create trigger bytes_added after insert on %s for each row execute function %s()',
        counted, notes
    );
    execute format(
        'create trigger bytes_changed after update of %s on %s for each row
         when (new.counted_bytes is distinct from old.counted_bytes) execute function %s()',
        columns, counted, notes
    );
    execute format(
        'create trigger bytes_removed after delete on %s for each row
         when (old.counted_bytes is not null) execute function %s()', counted, notes
    );
end
$$;
