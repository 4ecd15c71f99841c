//! Accounts: sign-up, login, passwords, tokens, keys, members, invitations and projects. Knows no
//! HTTP; it limits, hashes, mails, and writes what it decides to the database.

mod address;
pub mod author;
mod base;
mod codes;
pub mod device_login;
mod invitation;
pub mod key;
pub mod keys;
mod known_device;
mod links;
mod login;
pub mod mailing;
mod mails;
pub mod members;
pub mod oidc;
mod own_password;
pub mod passkeys;
pub mod password;
mod password_change;
pub mod projects;
mod public_key;
mod removal;
pub mod scanners;
mod second_factor;
pub mod secret;
pub mod security;
mod sessions;
mod signing_keys;
mod signup;
mod throttle;
pub mod token;
mod token_crypto;
mod totp;
mod use_cases;

use std::{sync::Arc, time::Duration};

use fencepost_domain::{error::Error, limits::MAX_EMAIL_CHARS};
use fencepost_signals::limiter::Rate;
use fencepost_store::people::{audit::Actor, sessions::Origin};
use lettre::Address;
use secrecy::SecretString;

pub use self::{
    password_change::PasswordChange,
    second_factor::{Proof, SecondStep},
    sessions::{Reuse, SignedIn},
    signing_keys::seal_signing_keys,
    signup::{SignUp, SignedUp},
    totp::{NewTotp, seal_totp_secrets},
    use_cases::{Accounts, Parts},
};

/// Calls per minute from one address to sign-up, login, reset and verification together.
pub const CALLS_PER_ADDRESS: Rate = Rate::per_minute(20);
/// Refreshes from one address.
pub const REFRESHES_PER_ADDRESS: Rate = Rate::per_minute(240);
pub const REFRESHES_PER_SESSION: Rate = Rate { count: 60, window_seconds: 3_600 };
/// Sign-ups from one address.
pub const SIGNUPS_PER_ADDRESS: Rate = Rate { count: 10, window_seconds: 3_600 };
/// Mails of one kind to one e-mail address, from anywhere. Beyond it, as many as
/// [`LATE_MAILS_TO_EMAIL`] allows are sent, and the others are not: their requests are answered all
/// the same, so that strangers cannot keep the owner out.
pub const MAILS_TO_EMAIL: Rate = Rate { count: 20, window_seconds: 86_400 };
pub const LATE_MAILS_TO_EMAIL: Rate = Rate { count: 1, window_seconds: 1_800 };
/// Tokens of OpenID Connect that one address exchanges for keys: a CI service has few addresses for
/// many runs.
pub const EXCHANGES_PER_ADDRESS: Rate = Rate::per_minute(240);
/// Such tokens of one subject (`sub`).
pub const EXCHANGES_PER_SUBJECT: Rate = Rate::per_minute(60);
/// Logins that terminals at one address begin.
pub const DEVICE_LOGINS_PER_ADDRESS: Rate = Rate { count: 20, window_seconds: 600 };
/// Logins that terminals in a wide network begin (/16, and /32 of IPv6), which may have addresses
/// without end.
pub const DEVICE_LOGINS_PER_NETWORK: Rate = Rate { count: 200, window_seconds: 600 };
/// Logins that all terminals begin. Each is stored for these ten minutes, some 300 bytes, and
/// belongs to no project yet.
pub const DEVICE_LOGINS: Rate = Rate { count: 100_000, window_seconds: 600 };
/// Requests of such terminals for their keys.
pub const DEVICE_COLLECTS_PER_ADDRESS: Rate = Rate::per_minute(240);
/// User codes that one account tries. A guess is right once in 25,600,000,000 tries for each
/// terminal that waits.
pub const USER_CODES_PER_ACCOUNT: Rate = Rate { count: 30, window_seconds: 600 };
/// Invitations that one account sends.
pub const INVITATIONS_PER_ACCOUNT: Rate = Rate { count: 50, window_seconds: 86_400 };
/// The same for an account of at most [`NEW_ACCOUNT_DAYS`].
pub const INVITATIONS_PER_NEW_ACCOUNT: Rate = Rate { count: 5, window_seconds: 86_400 };
/// Days for which an account counts as new.
pub const NEW_ACCOUNT_DAYS: i32 = 7;
/// Exports of one account: each reads entries of all of its projects.
pub const EXPORTS_PER_ACCOUNT: Rate = Rate { count: 10, window_seconds: 86_400 };
/// Lookups of unknown credentials from one address. One that was found is not
/// counted again for a while.
pub const LOOKUPS_PER_ADDRESS: Rate = Rate::per_minute(1_200);
/// Mails of one kind to one e-mail address for which one client, project or account can ask:
/// sign-ups, resets, invitations, verifications and changes of the address.
pub const MAILS_PER_ASKER: Rate = Rate { count: 3, window_seconds: 86_400 };
/// Wrong passwords for one e-mail address from one client.
pub const TRIES_PER_PAIR: Rate = Rate { count: 5, window_seconds: 900 };
/// Wrong passwords for one e-mail address from anywhere, after which each further try is delayed. A
/// delay, not a lock, so that no attacker can lock an account.
pub const TRIES_PER_EMAIL: Rate = Rate { count: 20, window_seconds: 900 };
/// Second-factor codes that are tried for one account; recovery codes are not counted. A guess is
/// right once in 300,000 tries, and needs the password or a session.
pub const CODES_PER_ACCOUNT: Rate = Rate { count: 20, window_seconds: 3_600 };
/// The delay of a try beyond [`TRIES_PER_EMAIL`].
pub const DELAY_OF_A_TRY: Duration = Duration::from_secs(2);

/// The client of a request.
#[derive(Debug, Clone, Default)]
pub struct Client {
    /// The address; of IPv6 the first 64 bits, as limits count.
    pub address: Arc<str>,
    /// The user agent.
    pub user_agent: Option<Arc<str>>,
    pub request_id: Arc<str>,
    /// Whether a page of the console makes the request.
    pub is_browser: bool,
    /// The token of a browser that has logged in before, from the console's cookie.
    pub device_token: Option<SecretString>,
}

impl Client {
    fn origin(&self) -> Origin {
        Origin {
            user_agent: self.user_agent.as_deref().map(str::to_owned),
            address: Some(self.address.to_string()),
            is_browser: self.is_browser,
        }
    }

    /// As the audit log names an account.
    #[must_use]
    pub fn actor(&self, kind: &'static str, id: String) -> Actor {
        Actor {
            kind,
            id: Some(id),
            request_id: Some(self.request_id.to_string()),
            address: Some(self.address.to_string()),
        }
    }
}

/// Normalises an e-mail address.
///
/// # Errors
/// [`Error::Invalid`] when it is malformed.
pub fn read_email(field: &str, email: &str) -> Result<String, Error> {
    let email = email.trim().to_lowercase();
    if email.chars().count() > MAX_EMAIL_CHARS {
        let message = format!("must be at most {MAX_EMAIL_CHARS} characters");
        return Err(Error::invalid(field, message));
    }
    let address: Result<Address, _> = email.parse();
    let is_plain = !email.chars().any(|it| it.is_control() || it.is_whitespace());
    match address {
        Ok(_) if is_plain => Ok(email),
        _ => Err(Error::invalid(field, "must be an e-mail address")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_kept_in_lower_case_and_junk_is_refused() {
        assert_eq!(
            read_email("email", " Ada@Example.COM ").ok().as_deref(),
            Some("ada@example.com")
        );
        let long = format!("{}@example.com", "x".repeat(MAX_EMAIL_CHARS));
        for junk in ["", "ada", "ada@", "@example.com", "a b@example.com", "a@b\0.com", &long] {
            assert!(read_email("email", junk).is_err(), "{junk}");
        }
    }
}
