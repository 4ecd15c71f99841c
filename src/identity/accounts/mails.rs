//! The mails, from `templates/mail/`.

use askama::Template;
use chrono::{DateTime, Utc};
use fencepost_domain::{alarm::summary, error::Error, text::unlinked};
use fencepost_store::{outbound::incidents::IncidentRow, people::accounts::Account};
use secrecy::{ExposeSecret, SecretString};

use fencepost_net::mail::Mail;

#[derive(Template)]
#[template(path = "mail/verification.txt")]
struct Verification<'a> {
    url: &'a str,
    token: &'a str,
    created_at: String,
    address: &'a str,
}

#[derive(Template)]
#[template(path = "mail/reset.txt")]
struct Reset<'a> {
    url: &'a str,
    /// When the account was created, and its token.
    links: Vec<(String, &'a str)>,
}

#[derive(Template)]
#[template(path = "mail/change.txt")]
struct Change<'a> {
    url: &'a str,
    old: Option<&'a str>,
    new: &'a str,
    token: &'a str,
    address: &'a str,
}

#[derive(Template)]
#[template(path = "mail/known.txt")]
struct Known<'a> {
    url: &'a str,
    address: &'a str,
}

#[derive(Template)]
#[template(path = "mail/security.txt")]
struct Security<'a> {
    what: &'a str,
    url: &'a str,
    address: &'a str,
}

#[derive(Template)]
#[template(path = "mail/invitation.txt")]
struct Invitation<'a> {
    url: &'a str,
    project: &'a str,
    token: &'a str,
}

#[derive(Template)]
#[template(path = "mail/alarm.txt")]
struct Alarm<'a> {
    url: &'a str,
    /// Its slug.
    project: &'a str,
    alarm: &'a str,
    summary: String,
    began_at: String,
    /// None: it lasts.
    ended_at: Option<String>,
}

/// Asks the owner of an address to verify it. Says when the account was created, and from which
/// network address the mail was requested, so that they can distinguish it from one of a stranger.
pub(super) fn verification(
    account: &Account,
    url: &str,
    token: &SecretString,
    address: &str,
) -> Result<Mail, Error> {
    let (token, created_at) = (token.expose_secret(), shown(account.created_at));
    let template = Verification { url, token, created_at, address };
    mail(&account.email, "Verify your e-mail address".to_owned(), &template)
}

/// Offers a new password for each account that the address may mean.
pub(super) fn reset(
    to: &str,
    url: &str,
    links: &[(DateTime<Utc>, SecretString)],
) -> Result<Mail, Error> {
    let links = links.iter().map(|(at, token)| (shown(*at), token.expose_secret())).collect();
    mail(to, "Reset your password".to_owned(), &Reset { url, links })
}

/// Asks an address to confirm the change from an old address to a new one.
pub(super) fn change(
    to: &str,
    url: &str,
    (old, new): (Option<&str>, &str),
    (token, address): (&SecretString, &str),
) -> Result<Mail, Error> {
    let token = token.expose_secret();
    let template = Change { url, old, new, token, address };
    mail(to, "Confirm the new e-mail address".to_owned(), &template)
}

/// Notifies the owner of an address that it has an account already.
pub(super) fn known(account: &Account, url: &str, address: &str) -> Result<Mail, Error> {
    mail(&account.email, "You already have an account".to_owned(), &Known { url, address })
}

/// Notifies the owner of an account of a change. Names no user agent: a stranger chooses it.
pub(super) fn security(to: &str, url: &str, what: &str, address: &str) -> Result<Mail, Error> {
    mail(to, what.to_owned(), &Security { what, url, address })
}

/// Notifies a member of what an alarm has found, or that it has ended.
pub(super) fn alarm(
    to: &str,
    url: &str,
    project: &str,
    it: &IncidentRow,
    is_resolved: bool,
) -> Result<Mail, Error> {
    let (rule, details) = it.read();
    let began_at = shown(it.began_at);
    let summary = summary(rule, &details);
    let ended_at = it.resolved_at.filter(|_| is_resolved).map(shown);
    let template = Alarm { url, project, alarm: &it.alarm, summary, began_at, ended_at };
    let end = if is_resolved { "Resolved: " } else { "" };
    mail(to, format!("[{project}] {end}{}", rule.title()), &template)
}

fn shown(at: DateTime<Utc>) -> String {
    at.format("%Y-%m-%d %H:%M UTC").to_string()
}

/// Invites a person to a project.
pub(super) fn invitation(
    to: &str,
    url: &str,
    project: &str,
    token: &SecretString,
) -> Result<Mail, Error> {
    let (token, project) = (token.expose_secret(), &unlinked(project));
    // No words of a tenant: the subject is what filters and people look at first.
    mail(to, "You are invited to a project".to_owned(), &Invitation { url, project, token })
}

fn mail(to: &str, subject: String, template: &impl Template) -> Result<Mail, Error> {
    let text = template.render().map_err(Error::internal)?;
    Ok(Mail { to: to.to_owned(), subject, text: text + "\n" })
}
