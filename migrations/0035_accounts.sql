-- People: accounts, their sessions, what they are members of, and what they have done.
--
-- An address is an account's own once it is verified: before that, several accounts may claim it, so that a
-- sign-up answers the same whether or not the address is known.

create table accounts (
    id uuid primary key,
    -- In lower case.
    email text not null check (email = lower(email)),
    -- argon2id, as a PHC string.
    password_hash text not null,
    created_at timestamptz not null default now(),
    verified_at timestamptz,
    last_login_at timestamptz
);
create unique index accounts_by_verified_email on accounts (email) where verified_at is not null;
create index accounts_by_email on accounts (email, created_at desc);

create table sessions (
    id uuid primary key,
    account_id uuid not null references accounts on delete cascade,
    created_at timestamptz not null default now(),
    last_used_at timestamptz not null default now(),
    -- However often it is refreshed.
    expires_at timestamptz not null,
    revoked_at timestamptz,
    user_agent text,
    address text
);
create index sessions_by_account on sessions (account_id, created_at desc);
create index sessions_by_age on sessions (expires_at);

-- Each is used once; a used one that comes again ends its session.
create table refresh_tokens (
    secret_hash bytea primary key check (octet_length(secret_hash) = 32),
    session_id uuid not null references sessions on delete cascade,
    created_at timestamptz not null default now(),
    used_at timestamptz
);
create index refresh_tokens_by_session on refresh_tokens (session_id);

-- What was mailed: proof that somebody reads an address.
create table mail_tokens (
    secret_hash bytea primary key check (octet_length(secret_hash) = 32),
    account_id uuid not null references accounts on delete cascade,
    purpose text not null check (purpose in ('verify', 'reset')),
    expires_at timestamptz not null,
    used_at timestamptz
);
create index mail_tokens_by_account on mail_tokens (account_id);
create index mail_tokens_by_age on mail_tokens (expires_at);

create table members (
    project_id integer not null,
    account_id uuid not null references accounts on delete cascade,
    role text not null check (role in ('owner', 'admin', 'member', 'viewer')),
    created_at timestamptz not null default now(),
    primary key (project_id, account_id)
);
create index members_by_account on members (account_id, project_id);

create table invitations (
    project_id integer not null,
    id uuid not null,
    email text not null check (email = lower(email)),
    role text not null check (role in ('owner', 'admin', 'member', 'viewer')),
    secret_hash bytea not null check (octet_length(secret_hash) = 32),
    invited_by uuid,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null,
    primary key (project_id, id)
);
-- Whoever accepts an invitation is no member yet.
create unique index invitations_by_secret on invitations (secret_hash);
create index invitations_by_age on invitations (expires_at);

-- Who did what. Rows are added, never changed; they go when they are old, or with their project.
create table audit_log (
    project_id integer not null,
    id uuid not null,
    at timestamptz not null default now(),
    actor_kind text not null check (actor_kind in ('account', 'key', 'operator', 'system')),
    actor_id text,
    action text not null,
    target text,
    request_id text,
    address text,
    before text,
    after text,
    primary key (project_id, id)
);
create index audit_log_by_age on audit_log (at);
create function refuse_change() returns trigger language plpgsql as $$
begin
    raise exception 'rows of % are never changed', tg_table_name;
end
$$;
create trigger audit_log_is_append_only before update on audit_log
for each statement execute function refuse_change();

-- Sign access tokens. Several are known at a time, so that one can take over from the other.
create table signing_keys (
    id uuid primary key,
    secret bytea not null check (octet_length(secret) >= 32),
    created_at timestamptz not null default now()
);

-- Which nodes live, so that each knows its share of a limit when Redis is away.
create table nodes (
    id uuid primary key,
    started_at timestamptz not null default now(),
    seen_at timestamptz not null default now()
);
