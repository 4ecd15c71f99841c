-- The release of a node; null: 0.2.0.
alter table nodes add column version text;
