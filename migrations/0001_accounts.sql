-- Tenants, their keys and members, accounts and sessions, the audit log, and this instance.
--
-- In all files: `project_id` comes first in every tenant's key and index, so that a statement that
-- forgets it finds no plan. Indexes that do not begin with it serve the background loops, which
-- work across projects. Hot tables have no foreign keys: each check would lock a row that all of a
-- tenant's writes share. Times are those of the database's clock. A column without a comment is
-- what its name says.

-- Facts of this installation: one row.
create table instance (
    only_row boolean primary key default true check (only_row),
    -- Signs list cursors: 244 random bits from two random uuids.
    cursor_key bytea not null,
    -- Separates this installation's names in a shared Redis from those of others.
    public_id uuid not null default gen_random_uuid()
);
insert into instance (cursor_key)
values (decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'));

-- Tenants.
create table projects (
    -- Four bytes, because every row and index entry of a tenant begins with it.
    id integer primary key generated always as identity,
    -- The id that the API shows; `id` would tell how many projects there are.
    public_id uuid not null unique,
    -- Names the project in paths.
    slug text not null unique check (slug <> ''),
    name text not null,
    created_at timestamptz not null default now(),
    -- A plan of `ops/plans.toml`; nodes that do not know it use the strictest one.
    plan text not null,
    -- Single limits that replace those of the plan. Null: none.
    overrides jsonb,
    -- Decides the prefix of its keys.
    mode text not null check (mode in ('live', 'test')),
    -- Others than `user` are hidden from lists and totals. `outbox`: its jobs deliver the webhooks
    -- of its owner. `canary`: the server's own.
    kind text not null default 'user' check (kind in ('user', 'outbox', 'canary')),
    -- Of an outbox: the project whose webhooks it delivers.
    owner_project_id integer unique,
    -- Which acks and heartbeats must show an attempt or a lease.
    require_fence text not null default 'ambiguous'
        check (require_fence in ('ambiguous', 'always')),
    -- Set by the operator: callers get 403, but for the workers of its running jobs.
    suspended_at timestamptz,
    -- From then on it does not exist for any caller; its rows are deleted in the background.
    deleted_at timestamptz,
    -- When its rows were gone, but for the audit log. Its slug stays taken until that is gone, too.
    purged_at timestamptz,
    check ((kind = 'outbox') = (owner_project_id is not null))
);
-- Deleted projects whose rows are still to be deleted.
create index projects_deleted on projects (deleted_at)
where deleted_at is not null and purged_at is null;
-- Retention.
create index projects_purged on projects (purged_at) where purged_at is not null;

create table api_keys (
    project_id integer not null references projects,
    id uuid not null,
    name text not null,
    -- SHA-256 of the whole key; the key itself is stored nowhere.
    secret_hash bytea not null check (octet_length(secret_hash) = 32),
    -- The beginning and end of the key, by which people recognise it in a list.
    shown_prefix text not null,
    shown_end text not null,
    created_at timestamptz not null default now(),
    revoked_at timestamptz,
    -- What the key may do: produce, work, read, payload:read, manage, schedules, webhooks,
    -- keys.
    scopes text[] not null,
    -- Null: never.
    expires_at timestamptz,
    -- To within some seconds: nodes write it in batches.
    last_used_at timestamptz,
    -- Calls of deprecated operations, and when the last one was written.
    deprecated_calls bigint not null default 0,
    deprecated_call_at timestamptz,
    -- Public id of an account or key; null: the operator.
    created_by text,
    -- Own limits of calls per minute, besides those of the project. Null: none.
    produce_per_minute integer check (produce_per_minute > 0),
    work_per_minute integer check (work_per_minute > 0),
    manage_per_minute integer check (manage_per_minute > 0),
    -- As in projects, for the calls of this key; the stricter one holds.
    require_fence text not null default 'ambiguous'
        check (require_fence in ('ambiguous', 'always')),
    -- False: unknown fields in the bodies of enqueues and of workers' calls are ignored.
    strict boolean not null default true,
    -- Networks from which it may be used, such as `192.0.2.0/24`; none: all.
    allowed_ips text[] not null default '{}' check (cardinality(allowed_ips) <= 32),
    -- Queues and job types that it is bound to; none: all.
    queues text[] not null default '{}' check (cardinality(queues) <= 20),
    job_types text[] not null default '{}' check (cardinality(job_types) <= 100),
    -- The key has no secret that is known: tokens of this OpenID Connect issuer for this subject
    -- are exchanged for keys with its rights. The subject may end in `*`.
    token_issuer text,
    token_subject text,
    -- What such a token was exchanged for: a key of minutes.
    is_exchanged boolean not null default false,
    primary key (project_id, id),
    check ((token_issuer is null) = (token_subject is null))
);
-- Retention of exchanged ones.
create index api_keys_exchanged on api_keys (expires_at) where is_exchanged;
-- Authentication: the key is what names the project.
create unique index api_keys_by_secret on api_keys (secret_hash);
-- What a removed member or a revoked key has made.
create index api_keys_by_maker on api_keys (project_id, created_by) where created_by is not null;

-- People. An address belongs to an account once it is verified; before that, several accounts may
-- claim it, so that a sign-up answers the same whether or not the address is known.
create table accounts (
    id uuid primary key,
    -- In lower case.
    email text not null check (email = lower(email)),
    -- argon2id, as a PHC string.
    password_hash text not null,
    created_at timestamptz not null default now(),
    verified_at timestamptz,
    last_login_at timestamptz,
    -- Set by the operator: nobody can log in.
    suspended_at timestamptz
);
-- Accounts that are neither verified nor used are deleted.
create index accounts_unverified on accounts (created_at) where verified_at is null;
-- The operator's list, oldest first.
create index accounts_by_age on accounts (created_at, id);
-- A verified address has one account.
create unique index accounts_by_verified_email on accounts (email) where verified_at is not null;
-- Login: all accounts that claim the address, the newest first.
create index accounts_by_email on accounts (email, created_at desc);

create table sessions (
    id uuid primary key,
    account_id uuid not null references accounts on delete cascade,
    created_at timestamptz not null default now(),
    last_used_at timestamptz not null default now(),
    -- The end, however often the session is refreshed.
    expires_at timestamptz not null,
    revoked_at timestamptz,
    -- Of the login, so that people recognise the session in a list.
    user_agent text,
    address text,
    -- Begun in the console: its tabs share a refresh token, so that one may come twice within a
    -- moment.
    is_browser boolean not null default false,
    -- When its person last proved who they are: by the login, or by a password or code since.
    stepped_up_at timestamptz not null default now()
);
-- The list of an account's sessions.
create index sessions_by_account on sessions (account_id, created_at desc);
-- Retention.
create index sessions_by_age on sessions (expires_at);

-- Each is used once; a used one that is presented again revokes its session.
create table refresh_tokens (
    -- SHA-256 of the token.
    secret_hash bytea primary key check (octet_length(secret_hash) = 32),
    session_id uuid not null references sessions on delete cascade,
    created_at timestamptz not null default now(),
    -- Null: not used.
    used_at timestamptz
);
-- Deleting a session.
create index refresh_tokens_by_session on refresh_tokens (session_id);

-- Tokens that were mailed: presenting one proves that the caller reads the address.
create table mail_tokens (
    -- SHA-256 of the token.
    secret_hash bytea primary key check (octet_length(secret_hash) = 32),
    account_id uuid not null references accounts on delete cascade,
    -- What the token permits.
    purpose text not null check (purpose in ('verify', 'reset')),
    expires_at timestamptz not null,
    -- Null: not used.
    used_at timestamptz
);
-- Deleting an account.
create index mail_tokens_by_account on mail_tokens (account_id);
-- Retention.
create index mail_tokens_by_age on mail_tokens (expires_at);

-- Mails that wait to be sent, and those that were sent within the last day. A token is made when the
-- mail that has it is sent.
create table mails (
    -- Also of its `Message-ID`.
    id uuid primary key,
    -- What it says, as JSON: its kind, and what that kind needs.
    content text not null,
    -- Whom it is about. Null: an address without an account, or an account of none.
    project_id integer,
    account_id uuid references accounts on delete cascade,
    created_at timestamptz not null default now(),
    -- Tries so far.
    tries integer not null default 0,
    -- A node that has taken it takes no longer.
    next_try_at timestamptz not null default now(),
    -- Null: it waits.
    sent_at timestamptz,
    -- It is not sent later, and the row is deleted.
    expires_at timestamptz not null
);
create index mails_due on mails (next_try_at) where sent_at is null;
-- How many a project was sent lately.
create index mails_by_project on mails (project_id, created_at) where project_id is not null;
-- Deleting an account.
create index mails_by_account on mails (account_id) where account_id is not null;
-- Retention.
create index mails_by_age on mails (expires_at);

-- A change of an account's address, until both addresses have confirmed it.
create table email_changes (
    account_id uuid primary key references accounts on delete cascade,
    new_email text not null check (new_email = lower(new_email)),
    -- SHA-256 of the tokens that were mailed to the new and the old address. Null: it has
    -- confirmed, or need not.
    new_hash bytea check (octet_length(new_hash) = 32),
    old_hash bytea check (octet_length(old_hash) = 32),
    expires_at timestamptz not null
);
-- Retention.
create index email_changes_by_age on email_changes (expires_at);

-- Who an account is at an OpenID Connect provider.
create table identities (
    account_id uuid not null references accounts on delete cascade,
    id uuid not null,
    issuer text not null,
    -- Its `sub`: the provider never gives it to another person. Addresses it may.
    subject text not null,
    -- What the provider said last: shown to the owner, and never searched.
    email text,
    created_at timestamptz not null default now(),
    last_used_at timestamptz,
    primary key (account_id, id)
);
-- Logging in; and no identity has two accounts.
create unique index identities_by_subject on identities (issuer, subject);

-- Passkeys: a second factor, and a login without a password.
create table passkeys (
    account_id uuid not null references accounts on delete cascade,
    id uuid not null,
    -- As its owner calls it.
    name text not null,
    credential_id bytea not null check (octet_length(credential_id) <= 1023),
    -- As COSE (RFC 9053).
    public_key bytea not null,
    -- Greater with each use, or always 0.
    sign_count bigint not null,
    -- False after a reset of the password: a person with the old one may have added it. It then
    -- logs in after the password only.
    logs_in_alone boolean not null default true,
    created_at timestamptz not null default now(),
    last_used_at timestamptz,
    primary key (account_id, id)
);
-- A login: the passkey is what names the account.
create unique index passkeys_by_credential on passkeys (credential_id);

-- Challenges of passkeys that were answered, until they have expired: each is answered once.
create table used_challenges (
    challenge text primary key,
    expires_at timestamptz not null
);
create index used_challenges_by_age on used_challenges (expires_at);

-- An account's authenticator app (TOTP, RFC 6238).
create table totp (
    account_id uuid primary key references accounts on delete cascade,
    -- Asked for at login, once it is confirmed. Encrypted, if there is a master key.
    secret bytea,
    confirmed_at timestamptz,
    -- The time step of the last code: no code is accepted twice, and none of an earlier step.
    last_step bigint not null default 0,
    -- Shown to its owner, who must prove with a code that an app has it.
    pending_secret bytea,
    pending_until timestamptz,
    check ((secret is null) = (confirmed_at is null))
);

-- Retention of what was never confirmed.
create index totp_by_end on totp (pending_until) where pending_until is not null;

-- Each replaces a code of the app, once.
create table recovery_codes (
    account_id uuid not null references accounts on delete cascade,
    -- SHA-256 of the code.
    secret_hash bytea not null check (octet_length(secret_hash) = 32),
    primary key (account_id, secret_hash)
);

-- Logins whose password was right, and that wait for the second factor.
create table login_challenges (
    -- SHA-256 of the token.
    secret_hash bytea primary key check (octet_length(secret_hash) = 32),
    account_id uuid not null references accounts on delete cascade,
    -- That the login was compared with: another password ends it.
    password_hash text not null,
    -- Wrong codes.
    tries int not null default 0,
    expires_at timestamptz not null
);
-- Deleting an account.
create index login_challenges_by_account on login_challenges (account_id);
-- Retention.
create index login_challenges_by_age on login_challenges (expires_at);

-- Logins of terminals (RFC 8628), until their key is collected or they have expired.
create table device_logins (
    -- SHA-256 of the device code, which the terminal keeps.
    secret_hash bytea primary key check (octet_length(secret_hash) = 32),
    -- SHA-256 of the user code, which its user types.
    code_hash bytea not null check (octet_length(code_hash) = 32),
    -- What the key will be called.
    name text not null,
    -- Of the terminal.
    address text not null,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null,
    -- In which session it was approved, for which project, with which scopes. Null: it was not. An
    -- ended session takes its approval with it.
    approved_in uuid references sessions on delete cascade,
    approved_for integer references projects,
    scopes text[],
    check ((approved_in is null) = (approved_for is null)),
    check ((approved_in is null) = (scopes is null))
);
-- Approving: the user has this code alone.
create unique index device_logins_by_code on device_logins (code_hash);
-- Deleting a session.
create index device_logins_by_session on device_logins (approved_in) where approved_in is not null;
-- Retention.
create index device_logins_by_age on device_logins (expires_at);

-- What happened to an account: logins, failed ones, changes of its password. Its owner reads it.
create table account_log (
    account_id uuid not null references accounts on delete cascade,
    -- Ordered by time.
    id uuid not null,
    at timestamptz not null default now(),
    -- Such as `login.succeeded`.
    action text not null,
    -- Of the client; null: the operator.
    address text,
    user_agent text,
    -- Finds the request in the logs of the nodes.
    request_id text,
    primary key (account_id, id)
);
-- How often an action was noted lately.
create index account_log_by_action on account_log (account_id, action, at);
-- Retention.
create index account_log_by_age on account_log (at);

create table members (
    project_id integer not null,
    account_id uuid not null references accounts on delete cascade,
    role text not null check (role in ('owner', 'admin', 'member', 'viewer')),
    created_at timestamptz not null default now(),
    primary key (project_id, account_id)
);
-- The projects of an account.
create index members_by_account on members (account_id, project_id);

create table invitations (
    project_id integer not null,
    id uuid not null,
    -- In lower case.
    email text not null check (email = lower(email)),
    -- The role that accepting it gives.
    role text not null check (role in ('owner', 'admin', 'member', 'viewer')),
    -- SHA-256 of the token that was answered.
    secret_hash bytea not null check (octet_length(secret_hash) = 32),
    -- SHA-256 of the token that was mailed. Null: none was.
    mailed_hash bytea check (octet_length(mailed_hash) = 32),
    -- The account; null: the operator.
    invited_by uuid,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null,
    primary key (project_id, id)
);
-- Accepting: the caller is no member yet, so no project is known.
create unique index invitations_by_secret on invitations (secret_hash);
create unique index invitations_by_mail on invitations (mailed_hash);
-- Retention.
create index invitations_by_age on invitations (expires_at);

-- Who changed what. Rows are never changed, and deleted by age alone: they outlive their project.
create table audit_log (
    project_id integer not null,
    -- Ordered by time.
    id uuid not null,
    at timestamptz not null default now(),
    -- What `actor_id` names.
    actor_kind text not null check (actor_kind in ('account', 'key', 'operator', 'system')),
    -- Public id. Null: the operator or the system.
    actor_id text,
    -- Such as `key.revoked`.
    action text not null,
    -- Public id or name of what was changed.
    target text,
    -- Finds the request in the logs of the nodes.
    request_id text,
    -- Of the client.
    address text,
    -- JSON of what was changed, without secrets and payloads. Null: there was nothing.
    before text,
    after text,
    primary key (project_id, id)
);
-- What one account did, for its export and the filter of the list.
create index audit_log_by_actor on audit_log (project_id, actor_id, id) where actor_id is not null;
-- Retention.
create index audit_log_by_age on audit_log (at);
create function refuse_change() returns trigger language plpgsql as $$
begin
    raise exception 'rows of % are never changed', tg_table_name;
end
$$;
create trigger audit_log_is_append_only before update on audit_log
for each statement execute function refuse_change();

-- Keys that sign access tokens. Several are valid at a time, so that one can replace another. A
-- secret of 32 bytes is plain; longer ones are encrypted with a master key, which is not in here.
create table signing_keys (
    id uuid primary key,
    secret bytea not null check (octet_length(secret) >= 32),
    created_at timestamptz not null default now()
);

-- Live nodes, so that each knows its share of a limit while Redis is unavailable.
create table nodes (
    id uuid primary key,
    started_at timestamptz not null default now(),
    seen_at timestamptz not null default now()
);
