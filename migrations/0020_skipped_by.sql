-- Jobs that an operation skipped, by reason, as a JSON object of numbers. Null: none.
alter table operations add column skipped_by jsonb;
