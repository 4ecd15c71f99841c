-- What a project may use, and what it is for. Projects that are there already were made by an operator.
alter table projects
    add column plan text not null default 'unlimited',
    -- Single limits of the plan, replaced: as in the file of plans.
    add column overrides jsonb,
    add column mode text not null default 'live' check (mode in ('live', 'test')),
    -- It is gone for everybody from then on; its rows follow.
    add column deleted_at timestamptz;
