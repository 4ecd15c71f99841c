-- Whether the authenticator of a passkey may copy it to other devices (backup eligibility, WebAuthn
-- 6.1.3), which never changes. Null: it was added before this column, and not used since.
alter table passkeys add column may_be_copied boolean;
