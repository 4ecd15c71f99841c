//! The mails, from `templates/mail/`.

use askama::Template;

use crate::{error::Error, mail::Mail};

#[derive(Template)]
#[template(path = "mail/verification.txt")]
struct Verification<'a> {
    url: &'a str,
    token: &'a str,
}

#[derive(Template)]
#[template(path = "mail/reset.txt")]
struct Reset<'a> {
    url: &'a str,
    token: &'a str,
}

#[derive(Template)]
#[template(path = "mail/invitation.txt")]
struct Invitation<'a> {
    url: &'a str,
    project: &'a str,
    token: &'a str,
}

/// Asks the owner of an address to verify it.
pub(super) fn verification(to: &str, url: &str, token: &str) -> Result<Mail, Error> {
    mail(to, "Verify your e-mail address".to_owned(), &Verification { url, token })
}

/// Offers a new password.
pub(super) fn reset(to: &str, url: &str, token: &str) -> Result<Mail, Error> {
    mail(to, "Reset your password".to_owned(), &Reset { url, token })
}

/// Invites a person to a project.
pub(super) fn invitation(to: &str, url: &str, project: &str, token: &str) -> Result<Mail, Error> {
    // No words of a tenant: the subject is what filters and people look at first.
    mail(to, "You are invited to a project".to_owned(), &Invitation { url, project, token })
}

fn mail(to: &str, subject: String, template: &impl Template) -> Result<Mail, Error> {
    let text = template.render().map_err(Error::internal)?;
    Ok(Mail { to: to.to_owned(), subject, text: text + "\n" })
}
