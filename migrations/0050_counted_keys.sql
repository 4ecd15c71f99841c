-- Bytes of keys, also revoked ones.
-- The role that writes keys has no right to the counts.
create function note_key_bytes() returns trigger language plpgsql security definer
set search_path = public, pg_temp as $$
begin
    if tg_op = 'DELETE' then
        insert into stored_byte_deltas values (old.project_id, -old.counted_bytes);
    else
        insert into stored_byte_deltas
        values (new.project_id, new.counted_bytes - coalesce(old.counted_bytes, 0));
    end if;
    return null;
end
$$;
call count_rows_of(
    'api_keys', 'note_key_bytes', 'name', 'queues', 'job_types', 'allowed_ips', 'token_issuer',
    'token_subject'
);
