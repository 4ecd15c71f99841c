//! The parts of the page of limits that are about people and plans, as the code has them.

use fencepost::{
    accounts::{self, password},
    auth,
    domain::{
        limits,
        plan::{Limits, Plans},
    },
};

use crate::docs::read;

/// The rows of "People and keys".
pub fn people_limits() -> Vec<(&'static str, String)> {
    let rate = |it: fencepost::limiter::Rate| format!("{} in {} s", it.count, it.window_seconds);
    vec![
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
        ("the mail that verifies an address", format!("valid for {} s", limits::VERIFY_SECONDS)),
        ("the mail that resets a password", format!("valid for {} s", limits::RESET_SECONDS)),
        ("an invitation", format!("valid for {} s", limits::INVITATION_SECONDS)),
        ("projects that an account owns", limits::MAX_OWNED_PROJECTS.to_string()),
        ("members and open invitations, whatever the plan", limits::MAX_MEMBERS.to_string()),
        ("a key's `expires_at`", format!("{} s ahead", limits::MAX_KEY_SECONDS)),
        ("`overlap_seconds`", format!("0–{} s", limits::MAX_KEY_OVERLAP_SECONDS)),
        ("a key's own `…_per_minute`", format!("1–{}", limits::MAX_KEY_CALLS_PER_MINUTE)),
        ("keys on one page", format!("1–{}", limits::MAX_PAGE_KEYS)),
        ("entries of the audit log on one page", format!("1–{}", limits::MAX_PAGE_AUDIT)),
        (
            "the audit log",
            format!(
                "kept {} days, {} entries of an export",
                limits::AUDIT_KEEP_DAYS,
                limits::MAX_EXPORTED_AUDIT
            ),
        ),
        (
            "sign-up, login, reset and mailed links, per IP address",
            rate(accounts::CALLS_PER_ADDRESS),
        ),
        ("refreshes, per IP address", rate(accounts::REFRESHES_PER_ADDRESS)),
        ("refreshes, per session", rate(accounts::REFRESHES_PER_SESSION)),
        ("sign-ups, per IP address", rate(accounts::SIGNUPS_PER_ADDRESS)),
        ("sign-ups, invitations and mails, per e-mail address", rate(accounts::MAILS_PER_EMAIL)),
        ("password resets, per e-mail address", rate(accounts::RESETS_PER_EMAIL)),
        ("invitations, per account", rate(accounts::INVITATIONS_PER_ACCOUNT)),
        ("credential look-ups, per IP address on one node", rate(accounts::LOOKUPS_PER_ADDRESS)),
        ("wrong passwords, per e-mail address and IP address", rate(accounts::TRIES_PER_PAIR)),
        (
            "logins, per e-mail address",
            format!(
                "{}, then {} s delayed",
                rate(accounts::TRIES_PER_EMAIL),
                accounts::LATE.as_secs()
            ),
        ),
        ("calls about itself, an account", rate(auth::CALLS_PER_ACCOUNT)),
        ("console reads, per member and project", rate(auth::CONSOLE_READS_PER_MEMBER)),
        ("console changes, per member and project", rate(auth::CONSOLE_ACTIONS_PER_MEMBER)),
        (
            "passwords hashed at the same time",
            format!("{}, {} more wait, then 503", password::MAX_HASHING, password::MAX_WAITING),
        ),
    ]
}

#[test]
fn every_plan_is_listed_with_its_numbers() {
    let page = read("docs/limits.md");
    let plans = Plans::built_in();
    let columns = ["free", "pro", "business"].map(|it| plans.limits(it));
    let number = |limits: &Limits, name: &str| {
        serde_json::to_value(limits).expect("JSON")[name].as_i64().expect("a number")
    };
    let names = serde_json::to_value(columns[0]).expect("JSON");
    for name in names.as_object().expect("limits").keys() {
        let cells = columns.map(|it| number(&it, name).to_string());
        let row = format!("`{name}` | {} |", cells.join(" | "));
        assert!(page.contains(&row), "{row}");
    }
}
