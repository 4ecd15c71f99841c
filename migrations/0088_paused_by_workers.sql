-- Claims that ended because a partner asked for fewer requests: they do not count. Null: none.
alter table jobs add column rate_limited_claims integer;
