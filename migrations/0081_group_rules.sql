-- How a queue orders the jobs of a group, and what a dead letter does to its group.
alter table queues
add column group_order text not null default 'none' check (group_order in ('none', 'strict')),
add column group_on_dead text not null default 'block'
    check (group_on_dead in ('block', 'skip')),
-- Ordinary claims find nothing here, as with `has_rules`: it has an order or paused groups, or has
-- met a rate limit.
add column has_gate boolean not null default false,
-- A worker has met a rate limit: no job of the queue starts before.
add column rate_limited_until timestamptz,
-- Many jobs of a group are to wait for it: claims rest until then, because they would walk over
-- them.
add column groups_close_until timestamptz,
-- A walk notes all groups of the queue, because their rules have changed: when it continues, after
-- which group, and how many follow. Null: none is under way.
add column group_walk_at timestamptz,
add column group_walk_after text not null default '',
add column group_walks smallint not null default 0;
