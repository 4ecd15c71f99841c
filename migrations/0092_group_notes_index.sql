-- no-transaction
create index concurrently group_notes_by_maker on group_notes (made_by);
