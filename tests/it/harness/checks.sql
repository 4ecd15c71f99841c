-- What holds for each row, whatever statement writes it. Only the tests check it: see the comment
-- in migrations/0002_jobs.sql.
alter table jobs
    add check (state in ('scheduled', 'backoff', 'pending', 'processing', 'dead_letter')),
    add check (
        num_nonnulls(lease_id, worker_id, claimed_at, lease_seconds, lease_expires_at) in (0, 5)
    ),
    add check (poll_id is null or lease_expires_at is not null),
    add check ((state = 'dead_letter') = (completed_at is not null)),
    -- A dead letter that was passed over has lost its place.
    add check (
        case
            when group_key is null then group_place is null and waits_for_group is null
            else group_place is not null or completed_at is not null
        end
    ),
    -- Its group counts as one of its parents.
    add check (waits_for_group is not true or (state = 'scheduled' and unfinished_parents > 0)),
    add check (failures <= attempt);
alter table finished_jobs add check (state in ('succeeded', 'cancelled'));

-- The one number that a query answers with.
create function number_of(query text) returns bigint language plpgsql as $$
declare
    found bigint;
begin
    execute query into found;
    return found;
end
$$;
