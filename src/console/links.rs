//! The pages that mailed links lead to. The secret of a link is behind its `#`, which browsers do
//! not send, so that no proxy logs it. A script posts it to the page; without scripts the visitor
//! pastes the link. A cookie keeps it while they log in or sign up.

use askama::Template;
use axum::{
    extract::Path,
    http::{HeaderMap, Method},
    response::Response,
};
use fencepost_domain::error::Error;
use fencepost_http::routes::{me::email::EmailConfirmed, members::invitations::InvitationPreview};
use fencepost_identity::accounts::secret::{MAIL_PREFIX, RANDOM_CHARS};
use serde_json::json;

use super::{
    action_table,
    api::Api,
    form::{Fields, encode},
    location::{HX_REQUEST, LOGIN, Link},
    page::render,
    session::{self, go},
};

/// In the query of the sign-up page: it is for the invitation whose link was opened.
pub const INVITED: &str = "invited";

#[derive(Template)]
#[template(path = "link.html")]
struct LinkPage {
    link: Link,
    /// None: the link was not read yet.
    token: Option<String>,
    /// Whether a link was read that is none.
    is_unreadable: bool,
    invited: Option<InvitationPreview>,
    is_logged_in: bool,
    /// The login, which leads back here.
    login: String,
}

impl LinkPage {
    async fn of(link: Link, token: Option<String>, api: &Api) -> Result<Self, Error> {
        let invited = match &token {
            Some(token) if link == Link::Invitation => look_at(token, api).await?,
            _ => None,
        };
        let login = format!("{LOGIN}?{}", encode(&[("next", link.page())]));
        let is_logged_in = api.is_logged_in();
        Ok(Self { link, token, is_unreadable: false, invited, is_logged_in, login })
    }

    fn title(&self) -> &'static str {
        match self.link {
            Link::Reset => "New password",
            Link::Verify => "Verify your address",
            Link::Email => "New address",
            Link::Invitation => "Invitation",
        }
    }

    fn token(&self) -> &str {
        self.token.as_deref().unwrap_or_default()
    }
}

/// Adds to [`InvitationPreview`] what pages show of it.
pub trait InvitationPreviewExt {
    /// The invited address; addresses below `.invalid` (RFC 2606) belong to no one, like the demo
    /// owner's.
    fn address(&self) -> Option<&str>;
}

impl InvitationPreviewExt for InvitationPreview {
    fn address(&self) -> Option<&str> {
        Some(self.email.as_str()).filter(|it| !it.ends_with(".invalid"))
    }
}

/// The content of an invitation; none: it is not valid any more.
pub async fn look_at(invitation: &str, api: &Api) -> Result<Option<InvitationPreview>, Error> {
    let request = json!({ "token": invitation }).to_string();
    match api.send(Method::POST, "/v1/invitations/preview", Some(request)).await {
        Ok(invited) => Ok(Some(invited)),
        Err(Error::Invalid(_)) => Ok(None),
        Err(other) => Err(other),
    }
}

/// The page of a reset mail.
pub async fn reset_page(api: Api, headers: HeaderMap) -> Result<Response, Error> {
    page(Link::Reset, &api, &headers).await
}

/// The page of a verification mail.
pub async fn verify_page(api: Api, headers: HeaderMap) -> Result<Response, Error> {
    page(Link::Verify, &api, &headers).await
}

/// The page of a mail about a new address.
pub async fn email_page(api: Api, headers: HeaderMap) -> Result<Response, Error> {
    page(Link::Email, &api, &headers).await
}

/// The page of an invitation mail.
pub async fn invitation_page(api: Api, headers: HeaderMap) -> Result<Response, Error> {
    page(Link::Invitation, &api, &headers).await
}

/// The page of a link, which was read already or is asked for.
async fn page(link: Link, api: &Api, headers: &HeaderMap) -> Result<Response, Error> {
    render(&LinkPage::of(link, session::kept_link(headers, link.name()), api).await?)
}

/// Reads a link, and shows its page.
pub async fn open(Path(name): Path<String>, api: Api, form: Fields) -> Result<Response, Error> {
    let link = Link::ALL.into_iter().find(|it| it.name() == name).ok_or(Error::NoSuchRoute)?;
    let Some(token) = secret_in(form.text("token")) else {
        return render(&LinkPage { is_unreadable: true, ..LinkPage::of(link, None, &api).await? });
    };
    let mut response = render(&LinkPage::of(link, Some(token.to_owned()), &api).await?)?;
    // A reset needs no login: its form has the secret, and nothing else may keep it.
    if link != Link::Reset {
        session::keep_link(response.headers_mut(), link.name(), token);
    }
    Ok(response)
}

/// The secret of a mailed link, or of a text with one.
fn secret_in(text: &str) -> Option<&str> {
    let secret = &text[text.find(MAIL_PREFIX)?..];
    let random = secret[MAIL_PREFIX.len()..].bytes().take_while(u8::is_ascii_alphanumeric).count();
    (random == RANDOM_CHARS).then(|| &secret[..MAIL_PREFIX.len() + RANDOM_CHARS])
}

/// Resets the password.
pub async fn confirm_reset(api: Api, headers: HeaderMap, form: Fields) -> Result<Response, Error> {
    let request = json!({"token": form.text("token"), "new_password": form.text("new_password")});
    let path = "/v1/auth/password/reset/confirm";
    api.send::<()>(Method::POST, path, Some(request.to_string())).await?;
    let to = action_table::saying(LOGIN, "auth_password_reset_confirm");
    // All sessions have been revoked, possibly this browser's, too.
    let mut response = go(headers.contains_key(HX_REQUEST), &to);
    session::forget(response.headers_mut());
    session::forget_link(response.headers_mut());
    Ok(response)
}

#[derive(Template)]
#[template(path = "verified.html")]
struct Verified {
    text: &'static str,
}

impl Verified {
    fn response(text: &'static str) -> Result<Response, Error> {
        let mut response = render(&Self { text })?;
        session::forget_link(response.headers_mut());
        Ok(response)
    }
}

/// Confirms a new address.
pub async fn confirm_email(api: Api, form: Fields) -> Result<Response, Error> {
    let request = json!({"token": form.text("token")}).to_string();
    let confirmed: EmailConfirmed =
        api.send(Method::POST, "/v1/me/email/confirm", Some(request)).await?;
    Verified::response(match confirmed.is_changed {
        true => "The address of your account is changed.",
        false => "Now open the link in the mail to the other address.",
    })
}

/// Verifies an address.
pub async fn verify(api: Api, form: Fields) -> Result<Response, Error> {
    let request = json!({"token": form.text("token")}).to_string();
    api.send::<()>(Method::POST, "/v1/auth/verify", Some(request)).await?;
    Verified::response("Your address is verified.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_found_alone_and_in_its_link() {
        let secret = format!("{MAIL_PREFIX}{}", "a1Z".repeat(15).split_at(RANDOM_CHARS).0);
        let check = |text: String, expected: Option<&str>| {
            assert_eq!(secret_in(&text), expected, "{text}");
        };
        check(secret.clone(), Some(&secret));
        check(format!(" https://a.example/console/verify#token={secret}\r\n"), Some(&secret));
        check(format!("{secret}a"), None);
        check(secret[..secret.len() - 1].to_owned(), None);
        check(format!("{secret}; Path=/"), Some(&secret));
        check("fp_live_x".to_owned(), None);
        check(String::new(), None);
    }
}
