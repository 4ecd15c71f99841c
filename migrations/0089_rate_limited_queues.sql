-- no-transaction
create index concurrently queues_rate_limited
on queues (rate_limited_until) where rate_limited_until is not null;
