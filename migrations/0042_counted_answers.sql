-- Bytes of the answers that repeated requests get.
alter table idempotency_keys add column counted_bytes integer;
create function count_answer_bytes() returns trigger language plpgsql as $$
begin
    new.counted_bytes := 256 + octet_length(new.key) + octet_length(new.body);
    return new;
end
$$;
create trigger idempotency_keys_counted before update of body on idempotency_keys for each row
when (new.body is distinct from old.body) execute function count_answer_bytes();
create trigger idempotency_keys_noted after update of body on idempotency_keys for each row
when (new.counted_bytes is distinct from old.counted_bytes)
execute function note_counted_bytes();
create trigger idempotency_keys_removed after delete on idempotency_keys
referencing old table as changed for each statement execute function note_counted_rows('-1');
