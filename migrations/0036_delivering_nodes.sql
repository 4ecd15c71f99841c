-- Whether a node calls URLs of users, so that these share them. Null: a node of the previous release,
-- which may.
alter table nodes add column delivers boolean;
