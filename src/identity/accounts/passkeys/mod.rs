//! Passkeys: they are a second factor, and log in without a password.
//!
//! A challenge is signed and not stored, so that strangers store nothing; used ones are stored, so
//! that each is used once. A passkey that was there when the password was reset by mail logs in
//! only after the new password: a person with the old one may have added it.

mod ceremony;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use fencepost_domain::{
    error::{Error, is_unique_violation},
    ids::{AccountId, PasskeyId},
    limits::{MAX_PASSKEYS, PASSKEY_SECONDS},
};
use fencepost_store::{self as store, people::passkeys::PasskeyRow};
use reqwest::Url;
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::{Acquire, PgConnection};

use self::ceremony::{ALGORITHMS, NewPasskey, Refused, RelyingParty, SUSPICIOUS, Use};
pub use self::ceremony::{Assertion, Registration};
use super::{
    Client,
    base::Base,
    codes,
    security::{self, AccountEvent},
    sessions::{Login, SignedIn, lock_stepped_up},
    token::{Bearer, Tokens},
};

/// The audience of signed challenges.
const PURPOSE: &str = "passkey";
/// The name of the server, as authenticators show it.
const NAME: &str = "Fencepost";
const MILLIS: u64 = 1_000;

/// The purpose of a challenge.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct SignedChallenge {
    challenge: String,
    /// The account that adds a passkey; none: one is used.
    adds_to: Option<String>,
}

/// A challenge for a browser.
#[derive(Debug)]
pub struct PasskeyChallenge {
    /// Comes back with the answer.
    pub challenge_token: String,
    /// `PublicKeyCredentialCreationOptionsJSON`, or `PublicKeyCredentialRequestOptionsJSON`.
    pub options: Value,
}

/// The answer of a passkey.
#[derive(Debug)]
pub struct PasskeyAnswer {
    pub challenge_token: SecretString,
    pub assertion: Assertion,
}

/// An added passkey.
#[derive(Debug)]
pub struct AddedPasskey {
    pub row: PasskeyRow,
    /// Of an account that had no second factor.
    pub recovery_codes: Option<Vec<String>>,
}

/// A passkey whose answer is right. It was not used up yet.
struct Proved {
    id: PasskeyId,
    account_id: AccountId,
    challenge: String,
    used: Use,
}

/// The passkeys of accounts.
#[derive(Clone)]
pub struct Passkeys {
    pub(super) base: Base,
    pub(super) tokens: Tokens,
    pub(super) public_url: String,
}

impl Passkeys {
    /// The domain and the origin of this server; none: it has an IP address for a name, and
    /// browsers use no passkeys there.
    fn relying_party(&self) -> Option<(String, String)> {
        let url = Url::parse(&self.public_url).ok()?;
        Some((url.domain()?.to_owned(), url.origin().ascii_serialization()))
    }

    fn new_challenge_token(&self, adds_to: Option<AccountId>) -> Result<(String, String), Error> {
        let challenge = BASE64_URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>());
        let adds_to = adds_to.map(|it| it.to_string());
        let signed = SignedChallenge { challenge: challenge.clone(), adds_to };
        Ok((self.tokens.sign_value(PURPOSE, &signed, PASSKEY_SECONDS)?, challenge))
    }

    /// Asks for a passkey of whatever account.
    ///
    /// # Errors
    /// [`Error::PasskeyRefused`] when this server cannot have passkeys; [`Error::NotReady`].
    pub fn ask(&self) -> Result<PasskeyChallenge, Error> {
        let (rp_id, _) = self.relying_party().ok_or(NO_DOMAIN)?;
        let (challenge_token, challenge) = self.new_challenge_token(None)?;
        let options = json!({
            "challenge": challenge, "rpId": rp_id, "userVerification": "required",
            "allowCredentials": [], "timeout": PASSKEY_SECONDS * MILLIS,
        });
        Ok(PasskeyChallenge { challenge_token, options })
    }

    /// Asks for a new passkey of the session's account.
    ///
    /// # Errors
    /// The same, and [`Error::StepUpRequired`].
    pub async fn ask_for_new(&self, bearer: Bearer) -> Result<PasskeyChallenge, Error> {
        let (rp_id, _) = self.relying_party().ok_or(NO_DOMAIN)?;
        self.base.sessions.require_step_up(bearer).await?;
        let id = bearer.account_id;
        let mut conn = self.base.pool.acquire().await?;
        let account =
            store::people::accounts::find(&mut conn, id).await?.ok_or(Error::Unauthorized)?;
        let present = store::people::passkeys::list(&mut conn, id).await?;
        drop(conn);
        let described = |it: &PasskeyRow| {
            let id = BASE64_URL_SAFE_NO_PAD.encode(&it.credential_id);
            json!({"type": "public-key", "id": id})
        };
        let (challenge_token, challenge) = self.new_challenge_token(Some(id))?;
        let options = json!({
            "challenge": challenge,
            "rp": {"id": rp_id, "name": NAME},
            "user": {
                "id": BASE64_URL_SAFE_NO_PAD.encode(id.0.as_bytes()),
                "name": account.email, "displayName": account.email,
            },
            "pubKeyCredParams": ALGORITHMS.map(|alg| json!({"type": "public-key", "alg": alg})),
            "excludeCredentials":
                present.iter().map(described).collect::<Vec<_>>(),
            "authenticatorSelection": {
                "residentKey": "required", "requireResidentKey": true,
                "userVerification": "required",
            },
            "attestation": "none",
            "timeout": PASSKEY_SECONDS * MILLIS,
        });
        Ok(PasskeyChallenge { challenge_token, options })
    }

    /// Adds a passkey: from now on, logins need a second factor, and other sessions must step up
    /// again.
    ///
    /// # Errors
    /// [`Error::PasskeyRefused`], [`Error::StepUpRequired`]; [`Error::QuotaExceeded`] when the
    /// account has as many as it may.
    pub async fn add(
        &self,
        bearer: Bearer,
        name: &str,
        token: &SecretString,
        registration: &Registration,
        client: &Client,
    ) -> Result<AddedPasskey, Error> {
        let id = bearer.account_id;
        let asked = self.read_challenge(token)?;
        if asked.adds_to.as_deref() != Some(id.to_string().as_str()) {
            return Err(Error::PasskeyRefused(WRONG_CHALLENGE));
        }
        let new = self.of_this_server(|of| registration.check(of, &asked.challenge))?;
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        // Two at the same time must not exceed the bound.
        lock_stepped_up(&mut tx, bearer).await?;
        use_challenge(&mut tx, &asked.challenge).await?;
        let had_factor = store::people::second_factors::is_required(&mut tx, id).await?;
        let key = store::people::passkeys::NewPasskey {
            id: PasskeyId::generate(),
            name,
            credential_id: &new.credential_id,
            public_key: &new.public_key,
            sign_count: i64::from(new.sign_count),
            may_be_copied: new.may_be_copied,
        };
        let row = store::people::passkeys::insert(&mut tx, id, key, MAX_PASSKEYS).await;
        let row = match row {
            Ok(Some(row)) => row,
            Ok(None) => {
                return Err(Error::QuotaExceeded { what: "passkeys", max: MAX_PASSKEYS });
            }
            Err(error) if is_unique_violation(&error) => {
                return Err(Error::PasskeyRefused("an account has it already"));
            }
            Err(error) => return Err(error.into()),
        };
        let recovery_codes = match had_factor {
            true => None,
            false => Some(codes::replace_recovery_codes(&mut tx, id).await?),
        };
        store::people::second_factors::step_down_others(&mut tx, id, bearer.session_id).await?;
        let event = AccountEvent::PasskeyAdded;
        security::record(&mut tx, id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        self.base.mailing.notify_owner(id, event, client);
        Ok(AddedPasskey { row, recovery_codes })
    }

    /// Removes a passkey; with the last second factor, the recovery codes, too.
    ///
    /// # Errors
    /// [`Error::PasskeyNotFound`], [`Error::StepUpRequired`].
    pub async fn remove(
        &self,
        bearer: Bearer,
        passkey: PasskeyId,
        client: &Client,
    ) -> Result<(), Error> {
        let id = bearer.account_id;
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        lock_stepped_up(&mut tx, bearer).await?;
        if !store::people::passkeys::delete(&mut tx, id, passkey).await? {
            return Err(Error::PasskeyNotFound);
        }
        codes::remove_unneeded_recovery_codes(&mut tx, id).await?;
        let event = AccountEvent::PasskeyRemoved;
        security::record(&mut tx, id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        self.base.mailing.notify_owner(id, event, client);
        Ok(())
    }

    /// Logs in with a passkey alone.
    ///
    /// # Errors
    /// [`Error::PasskeyRefused`], [`Error::Suspended`], [`Error::RateLimited`].
    pub async fn log_in(&self, answer: &PasskeyAnswer, client: &Client) -> Result<SignedIn, Error> {
        self.base.throttle.address(client).await?;
        if !answer.assertion.names_user() {
            return Err(Error::PasskeyRefused(NO_USER));
        }
        let (proved, owner) = {
            let mut conn = self.base.pool.acquire().await?;
            self.prove(&mut conn, answer, client).await?
        };
        if owner.is_suspended {
            return Err(Error::Suspended { what: "account" });
        }
        if !owner.logs_in_alone {
            return Err(Error::PasskeyRefused(AFTER_PASSWORD));
        }
        let id = proved.account_id;
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        if !store::people::accounts::lock_if_hash(&mut tx, id, &owner.password_hash).await? {
            return Err(Error::PasskeyRefused(GONE));
        }
        record_use(&mut tx, &proved).await?;
        let (signed_in, event) =
            self.base.sessions.open(&mut tx, id, Login::Proved, client).await?;
        tx.commit().await?;
        drop(conn);
        self.base.mailing.notify_owner(id, event, client);
        Ok(signed_in)
    }

    /// Uses up the answer of a passkey that this account has, in a transaction of the caller.
    /// Returns its id.
    pub(super) async fn use_up(
        &self,
        tx: &mut PgConnection,
        id: AccountId,
        answer: &PasskeyAnswer,
        client: &Client,
    ) -> Result<PasskeyId, Error> {
        let (proved, _) = self.prove(tx, answer, client).await?;
        if proved.account_id != id {
            return Err(Error::PasskeyRefused(GONE));
        }
        record_use(tx, &proved).await?;
        Ok(proved.id)
    }

    async fn prove(
        &self,
        conn: &mut PgConnection,
        answer: &PasskeyAnswer,
        client: &Client,
    ) -> Result<(Proved, store::people::passkeys::PasskeyOwner), Error> {
        let PasskeyAnswer { challenge_token, assertion } = answer;
        let asked = self.read_challenge(challenge_token)?;
        if asked.adds_to.is_some() {
            return Err(Error::PasskeyRefused(WRONG_CHALLENGE));
        }
        let credential_id = assertion.credential_id().map_err(Error::PasskeyRefused)?;
        let owner = store::people::passkeys::find(conn, &credential_id).await?;
        let owner = owner.ok_or(Error::PasskeyRefused(GONE))?;
        let stored = NewPasskey {
            credential_id,
            public_key: owner.public_key.clone(),
            sign_count: u32::try_from(owner.sign_count).unwrap_or(u32::MAX),
            may_be_copied: owner.may_be_copied,
        };
        let user = owner.account_id.0.as_bytes();
        let checked =
            self.of_this_server(|of| assertion.check(of, &asked.challenge, user, &stored));
        if let Err(Error::PasskeyRefused(why)) = &checked
            && SUSPICIOUS.contains(why)
        {
            // A repeated request is refused for that, and is no news.
            use_challenge(conn, &asked.challenge).await?;
            // The caller's transaction is undone.
            let event = AccountEvent::PasskeySuspicious;
            self.base.note_later(owner.account_id, event, client);
            self.base.mailing.notify_owner(owner.account_id, event, client);
        }
        let used = checked?;
        let challenge = asked.challenge;
        let proved = Proved { id: owner.id, account_id: owner.account_id, challenge, used };
        Ok((proved, owner))
    }

    fn read_challenge(&self, token: &SecretString) -> Result<SignedChallenge, Error> {
        let asked = self.tokens.read_value(PURPOSE, token.expose_secret());
        asked.ok_or(Error::PasskeyRefused("the challenge has expired: try again"))
    }

    fn of_this_server<T>(
        &self,
        check: impl FnOnce(RelyingParty<'_>) -> Result<T, Refused>,
    ) -> Result<T, Error> {
        let (id, origin) = self.relying_party().ok_or(NO_DOMAIN)?;
        check(RelyingParty { id: &id, origin: &origin }).map_err(Error::PasskeyRefused)
    }
}

const NO_DOMAIN: Error =
    Error::PasskeyRefused("this server has no domain name, which passkeys need");
const WRONG_CHALLENGE: &str = "it is an answer to another kind of challenge";
const GONE: &str = "no account has it, or not this one";
const NO_USER: &str = "it does not say whose it is";
const AFTER_PASSWORD: &str =
    "the password was reset after it was added: log in with the password first, and then use it";

async fn use_challenge(tx: &mut PgConnection, challenge: &str) -> Result<(), Error> {
    match store::people::passkeys::use_challenge(tx, challenge, PASSKEY_SECONDS as i64).await? {
        true => Ok(()),
        false => Err(Error::PasskeyRefused("it was used already: try again")),
    }
}

/// No challenge is answered twice, and no counter goes back.
async fn record_use(tx: &mut PgConnection, proved: &Proved) -> Result<(), Error> {
    use_challenge(tx, &proved.challenge).await?;
    let Use { sign_count, may_be_copied } = proved.used;
    let used = (i64::from(sign_count), may_be_copied);
    match store::people::passkeys::record_use(tx, proved.account_id, proved.id, used).await? {
        true => Ok(()),
        false => Err(Error::PasskeyRefused(GONE)),
    }
}
