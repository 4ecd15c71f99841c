-- How many deliveries have led to what the event is about. Null: none, or its job says how many.
alter table outbound_events add column hop smallint;
