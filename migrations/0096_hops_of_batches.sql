-- How many deliveries have led to the batch, or to one of its jobs that have ended. Null: none.
alter table batches add column hop smallint;
