-- The protocol that leased the job counts an expired lease as a failure. Null: it does not.
alter table jobs add column loss_fails boolean;
