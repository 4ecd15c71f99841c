-- Months keep what their days said.
alter table usage_months
    add column requests bigint not null default 0,
    add column poll_ms bigint not null default 0,
    add column log_bytes bigint not null default 0,
    add column byte_hours bigint not null default 0;
