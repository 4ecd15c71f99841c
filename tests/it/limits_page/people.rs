//! The rows about people and keys.

use fencepost_domain::limits;
use fencepost_http::server::late_refusals;
use fencepost_identity::accounts::{self, password};
use fencepost_signals::limiter::Rate;
use fencepost_web::auth;

/// The rows of "People and keys".
pub fn people_limits() -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("an e-mail address", format!("3–{} characters", limits::MAX_EMAIL_CHARS)),
        (
            "a password",
            format!("{}–{} characters", limits::MIN_PASSWORD_CHARS, limits::MAX_PASSWORD_CHARS),
        ),
        ("an access token", format!("valid for {} s", limits::ACCESS_TOKEN_SECONDS)),
        (
            "a session",
            format!(
                "expires after {} s, or {} s without a refresh",
                limits::SESSION_SECONDS,
                limits::SESSION_IDLE_SECONDS
            ),
        ),
        (
            "a login that waits for a code",
            format!("valid for {} s", limits::LOGIN_CHALLENGE_SECONDS),
        ),
        ("wrong codes of one login", limits::MAX_CODE_TRIES.to_string()),
        (
            "a session that began or was stepped up",
            format!("may change keys and members for {} s", limits::STEP_UP_SECONDS),
        ),
        (
            "the secret of an authenticator app",
            format!("waits {} s for its first code", limits::PENDING_TOTP_SECONDS),
        ),
        ("recovery codes", limits::RECOVERY_CODES.to_string()),
        ("passkeys of an account", limits::MAX_PASSKEYS.to_string()),
        ("the challenge of a passkey", format!("valid for {} s", limits::PASSKEY_SECONDS)),
        ("the answer of a passkey", format!("{} bytes", limits::MAX_PASSKEY_BYTES)),
        ("identities at login providers, of an account", limits::MAX_IDENTITIES.to_string()),
        ("a login with a provider", format!("valid for {} s", accounts::oidc::LOGIN_SECONDS)),
        ("the mail that verifies an address", format!("valid for {} s", limits::VERIFY_SECONDS)),
        ("the mail that resets a password", format!("valid for {} s", limits::RESET_SECONDS)),
        ("an invitation", format!("valid for {} s", limits::INVITATION_SECONDS)),
        (
            "a mail that the mail server does not accept",
            format!("tried for {} s, or as long as its link is valid", limits::MAIL_SECONDS),
        ),
        ("mails that wait, on all nodes", limits::MAX_WAITING_MAILS.to_string()),
        (
            "projects that an account owns on the plan of new projects, whatever it says",
            limits::MAX_OWNED_PROJECTS.to_string(),
        ),
        ("members and open invitations, whatever the plan", limits::MAX_MEMBERS.to_string()),
    ];
    rows.extend(key_limits());
    rows.extend(log_limits());
    rows.extend(people_rates());
    rows.extend(terminal_rates());
    rows
}

/// What keys may have.
fn key_limits() -> Vec<(&'static str, String)> {
    vec![
        ("a key's `expires_at`", format!("{} s ahead", limits::MAX_KEY_SECONDS)),
        ("`overlap_seconds`", format!("0–{} s", limits::MAX_KEY_OVERLAP_SECONDS)),
        ("a key's `allowed_ips`", limits::MAX_KEY_NETWORKS.to_string()),
        ("a key's `queues`", limits::MAX_KEY_QUEUES.to_string()),
        ("a key's `job_types`", limits::MAX_KEY_JOB_TYPES.to_string()),
        ("a key's `trusts.subject`", format!("1–{} characters", limits::MAX_SUBJECT_CHARS)),
        (
            "the login of a terminal",
            format!(
                "a name of {} characters, {} s to approve it, a key of {} s",
                limits::MAX_DEVICE_NAME_CHARS,
                limits::DEVICE_LOGIN_SECONDS,
                limits::DEVICE_KEY_SECONDS
            ),
        ),
        ("a token that is exchanged for a key", format!("{} bytes", limits::MAX_TOKEN_BYTES)),
        (
            "a key that a token is exchanged for",
            format!("lives for {} s", limits::EXCHANGED_KEY_SECONDS),
        ),
        (
            "such live keys of a project, not among its `keys`",
            limits::MAX_EXCHANGED_KEYS.to_string(),
        ),
        ("a key's own `…_per_minute`", format!("1–{}", limits::MAX_KEY_CALLS_PER_MINUTE)),
        (
            "keys of a scanner's report",
            format!("{}, in {} bytes", limits::MAX_REPORTED_KEYS, limits::MAX_REPORT_BYTES),
        ),
        ("keys on one page", format!("1–{}", limits::MAX_PAGE_KEYS)),
    ]
}

/// How long things about people are kept.
fn log_limits() -> Vec<(&'static str, String)> {
    vec![
        ("entries of the audit log on one page", format!("1–{}", limits::MAX_PAGE_AUDIT)),
        (
            "the audit log",
            format!(
                "kept {} days, {} entries of an export",
                limits::AUDIT_KEEP_DAYS,
                limits::MAX_EXPORTED_AUDIT
            ),
        ),
        ("usage by day", format!("kept {} days, then added to its month", limits::USAGE_KEEP_DAYS)),
        (
            "the state before or after a change",
            format!(
                "{} bytes, then values above {} bytes become hashes",
                limits::MAX_AUDIT_STATE_BYTES,
                limits::MAX_AUDIT_VALUE_BYTES
            ),
        ),
        (
            "an account that was neither verified nor used",
            format!("deleted after {} days, where mail is sent", limits::UNUSED_ACCOUNT_DAYS),
        ),
        (
            "an account's security log",
            format!(
                "kept {} days, {} entries shown, {} of one kind a day",
                limits::SECURITY_LOG_KEEP_DAYS,
                limits::MAX_SHOWN_SECURITY_ENTRIES,
                accounts::security::MAX_ENTRIES_A_DAY,
            ),
        ),
    ]
}

fn rate(it: Rate) -> String {
    format!("{} in {} s", it.count, it.window_seconds)
}

fn terminal_rates() -> [(&'static str, String); 5] {
    [
        ("logins of terminals, per IP address", rate(accounts::DEVICE_LOGINS_PER_ADDRESS)),
        ("the same, per /16 network, and /32 of IPv6", rate(accounts::DEVICE_LOGINS_PER_NETWORK)),
        ("the same, all together", rate(accounts::DEVICE_LOGINS)),
        (
            "requests of terminals for their keys, per IP address",
            rate(accounts::DEVICE_COLLECTS_PER_ADDRESS),
        ),
        ("codes of terminals that an account tries", rate(accounts::USER_CODES_PER_ACCOUNT)),
    ]
}

/// How often people may do things.
fn people_rates() -> Vec<(&'static str, String)> {
    vec![
        (
            "sign-up, login, reset and mailed links, per IP address",
            rate(accounts::CALLS_PER_ADDRESS),
        ),
        ("refreshes, per IP address", rate(accounts::REFRESHES_PER_ADDRESS)),
        ("refreshes, per session", rate(accounts::REFRESHES_PER_SESSION)),
        ("sign-ups, per IP address", rate(accounts::SIGNUPS_PER_ADDRESS)),
        ("sign-ups and resets, per e-mail address and IP address", rate(accounts::MAILS_PER_ASKER)),
        ("invitations, per e-mail address and project", rate(accounts::MAILS_PER_ASKER)),
        (
            "mails to one e-mail address",
            format!(
                "{}, then {}",
                rate(accounts::MAILS_TO_EMAIL),
                rate(accounts::LATE_MAILS_TO_EMAIL)
            ),
        ),
        ("invitations, per account", rate(accounts::INVITATIONS_PER_ACCOUNT)),
        ("invitations, per account of at most 7 days", rate(accounts::INVITATIONS_PER_NEW_ACCOUNT)),
        ("exports, per account", rate(accounts::EXPORTS_PER_ACCOUNT)),
        (
            "tokens that are exchanged for keys, per IP address",
            rate(accounts::EXCHANGES_PER_ADDRESS),
        ),
        ("tokens that are exchanged for keys, per subject", rate(accounts::EXCHANGES_PER_SUBJECT)),
        (
            "look-ups of unknown credentials, per IP address on one node",
            rate(accounts::LOOKUPS_PER_ADDRESS),
        ),
        ("wrong passwords, per e-mail address and IP address", rate(accounts::TRIES_PER_PAIR)),
        ("codes but recovery codes, per account", rate(accounts::CODES_PER_ACCOUNT)),
        ("wrong codes, per account and IP address", rate(accounts::TRIES_PER_PAIR)),
        (
            "refusals of one project or address, while a node refuses more than 200 a second",
            format!(
                "{}, then {} s delayed",
                rate(late_refusals::PROMPT_REFUSALS),
                late_refusals::LATENESS.as_secs()
            ),
        ),
        (
            "logins, per e-mail address",
            format!(
                "{}, then {} s delayed",
                rate(accounts::TRIES_PER_EMAIL),
                accounts::DELAY_OF_A_TRY.as_secs()
            ),
        ),
        ("calls about itself, an account", rate(auth::CALLS_PER_ACCOUNT)),
        ("console reads, per member and project", rate(auth::CONSOLE_READS_PER_MEMBER)),
        ("console changes, per member and project", rate(auth::CONSOLE_ACTIONS_PER_MEMBER)),
        (
            "console reads or changes of all members of a project",
            format!(
                "{} times `manage_per_minute`, at least as many as one",
                auth::CONSOLE_CALLS_PER_MANAGE_CALL
            ),
        ),
        passwords_hashed(),
    ]
}

fn passwords_hashed() -> (&'static str, String) {
    let (hashed, waiting) = (password::MAX_HASHING, password::MAX_WAITING);
    let text = format!("{hashed}, on at most half of the cores; {waiting} more wait, then 503");
    ("passwords hashed at the same time", text)
}
