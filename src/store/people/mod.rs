//! Accounts and what belongs to them: projects, members, keys, sessions, mails, the audit log.

pub mod account_log;
pub mod accounts;
pub mod actors;
pub mod audit;
pub mod device_logins;
pub mod email_changes;
pub mod identities;
pub mod invitations;
pub mod keys;
pub mod mails;
pub mod members;
pub mod passkeys;
pub mod projects;
pub mod second_factors;
pub mod sessions;
pub mod usage;
