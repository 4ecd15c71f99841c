-- no-transaction
drop index concurrently group_notes_by_transaction;
