-- Whether a payload is something a shell can be given: a string, or an object with a string named `command`.
-- A payload is opaque, and may be JSON that PostgreSQL does not take (such as \u0000): that offers nothing.
create function offers_command(payload text) returns boolean
language plpgsql immutable strict
as $$
begin
    return case
        when ltrim(payload, E' \t\r\n') like '"%' then true
        when payload not like '%"command"%' then false
        when json_typeof(payload::json) <> 'object' then false
        else coalesce(json_typeof(payload::json -> 'command') = 'string', false)
    end;
exception when data_exception or syntax_error_or_access_rule_violation then
    return false;
end
$$;
