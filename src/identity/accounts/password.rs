//! Passwords: argon2id with OWASP's parameters, on the blocking pool, a few at a time; and the
//! rules for new passwords. Source: OWASP Password Storage Cheat Sheet (argon2id, m = 19 MiB, t =
//! 2, p = 1).

pub mod lists;

use std::sync::{Arc, LazyLock};

use argon2::{
    Argon2,
    password_hash::{PasswordHasher, PasswordVerifier},
};
use fencepost_domain::{
    error::Error,
    limits::{MAX_PASSWORD_CHARS, MIN_PASSWORD_CHARS},
};
use secrecy::{ExposeSecret, SecretString};
use zxcvbn::{Score, feedback::Feedback, zxcvbn};

pub use fencepost_fair::hashing::{MAX_HASHING, MAX_WAITING, Turn, Turns};

use self::lists::{BreachedPasswords, is_common};

/// Characters of a password that are rated.
const JUDGED_CHARS: usize = 36;
/// Hashes that a login always compares: its duration must not reveal whether the address is known.
pub const COMPARISONS: usize = 2;
/// Prefix of hashes with the current parameters.
const PRESENT: &str = "$argon2id$v=19$m=19456,t=2,p=1$";

/// A hash that no password has.
static DUMMY: LazyLock<String> = LazyLock::new(|| hash(b"no account has this password"));

fn hash(password: &[u8]) -> String {
    let hashed = Argon2::default().hash_password(password);
    hashed.map(|it| it.to_string()).unwrap_or_default()
}

/// Hashes and compares passwords. Cheap to clone. Each call names the client that it serves, by
/// address or account: when many wait, those of networks that got the fewest hashes go first.
#[derive(Debug, Clone, Default)]
pub struct Passwords {
    turns: Turns,
    breached: Option<Arc<BreachedPasswords>>,
}

impl Passwords {
    /// With the operator's list of breached passwords, if there is one, and the node's turns.
    #[must_use]
    pub fn new(breached: Option<Arc<BreachedPasswords>>, turns: Turns) -> Self {
        Self { turns, breached }
    }

    /// A password's hash, as a PHC string.
    ///
    /// # Errors
    /// [`Error::Overloaded`] when too many wait already.
    pub async fn hash(&self, client: &str, password: SecretString) -> Result<String, Error> {
        self.work(client, move || hash(password.expose_secret().as_bytes())).await
    }

    /// Which of these hashes matches the password, if any. Takes as long as [`COMPARISONS`]
    /// comparisons, if there are no more; more count as more hashes of the client.
    ///
    /// # Errors
    /// [`Error::Overloaded`] when too many wait already.
    pub async fn compare(
        &self,
        client: &str,
        password: SecretString,
        hashes: Vec<String>,
    ) -> Result<Option<usize>, Error> {
        let all = hashes.len().max(COMPARISONS);
        let turns = u32::try_from(all.div_ceil(COMPARISONS)).unwrap_or(u32::MAX);
        self.work_for(client, turns, move || {
            let padding = std::iter::repeat_n(&*DUMMY, COMPARISONS.saturating_sub(hashes.len()));
            let all = hashes.iter().chain(padding);
            let is_it = |hash: &String| {
                let password = password.expose_secret().as_bytes();
                Argon2::default().verify_password(password, hash.as_str()).is_ok()
            };
            // Compare all of them, even after a match.
            let fits: Vec<bool> = all.map(is_it).collect();
            fits.iter().position(|it| *it).filter(|it| *it < hashes.len())
        })
        .await
    }

    /// Checks a new password: see [`weakness`]; and that it is not on the operator's list.
    ///
    /// # Errors
    /// [`Error::Invalid`] names `field`. [`Error::Overloaded`] when too many wait already.
    /// [`Error::NotReady`] when the list cannot be read.
    pub async fn check(
        &self,
        client: &str,
        (field, password): (&str, &SecretString),
        known: &[&str],
    ) -> Result<(), Error> {
        let known: Vec<String> = known.iter().map(|it| (*it).to_owned()).collect();
        let password = password.clone();
        let breached = self.breached.clone();
        let weakness = self.work(client, move || {
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            let password = password.expose_secret();
            if let Some(weakness) = weakness(password, &known) {
                return Ok(Some(weakness));
            }
            let is_breached = breached.map_or(Ok(false), |it| it.contains(password))?;
            Ok(is_breached.then(|| "was found in a breach of another service".to_owned()))
        });
        match weakness.await? {
            Ok(Some(weakness)) => Err(Error::invalid(field, weakness)),
            Ok(None) => Ok(()),
            Err::<_, std::io::Error>(error) => {
                tracing::error!(%error, "the list of breached passwords cannot be read");
                Err(Error::NotReady("new passwords cannot be checked"))
            }
        }
    }

    async fn work<T: Send + 'static>(
        &self,
        client: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        self.work_for(client, 1, work).await
    }

    async fn work_for<T: Send + 'static>(
        &self,
        client: &str,
        hashes: u32,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let turn = self.turns.take_for(client, hashes).await?;
        let done = tokio::task::spawn_blocking(move || {
            let done = work();
            drop(turn);
            done
        });
        done.await.map_err(Error::internal)
    }
}

/// Whether a hash was made with the current parameters.
#[must_use]
pub fn is_present(hash: &str) -> bool {
    hash.starts_with(PRESENT)
}

/// Why a new password is weak, if it is. `known` are words related to its owner.
///
/// ```
/// # use fencepost_identity::accounts::password::weakness;
/// assert!(weakness("short", &[]).is_some());
/// assert!(weakness("password1234", &[]).is_some());
/// assert!(weakness("!!Weihnachten1984", &[]).is_some());
/// assert!(weakness("ada.lovelace@example.com", &["ada.lovelace@example.com"]).is_some());
/// assert!(weakness("quiet otters borrow umbrellas", &[]).is_none());
/// ```
#[must_use]
pub fn weakness(password: &str, known: &[&str]) -> Option<String> {
    let chars = password.chars().count();
    if !(MIN_PASSWORD_CHARS..=MAX_PASSWORD_CHARS).contains(&chars) {
        return Some(format!(
            "must have {MIN_PASSWORD_CHARS} to {MAX_PASSWORD_CHARS} characters, has {chars}"
        ));
    }
    let mut inputs = vec!["fencepost"];
    inputs.extend(known);
    inputs.extend(known.iter().flat_map(|it| it.split(|it: char| !it.is_alphanumeric())));
    inputs.retain(|it| !it.is_empty());
    // Rating time grows with the square of the length: this prefix is enough.
    let beginning: String = password.chars().take(JUDGED_CHARS).collect();
    let guess = zxcvbn(&beginning, &inputs);
    if guess.score() >= Score::Three {
        let common = || "is common, or common with digits or symbols around it".to_owned();
        return is_common(password).then(common);
    }
    let advice = guess.feedback().and_then(Feedback::warning).map(|it| it.to_string());
    let advice = advice.unwrap_or_else(|| "Choose a few unusual words.".to_owned());
    Some(format!("is too easy to guess. {advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_password_fits_its_own_hash_and_no_other() {
        let passwords = Passwords::default();
        let secret = |it: &str| SecretString::from(it);
        let hash = passwords.hash("a", secret("one password")).await.expect("a hash");
        assert!(is_present(&hash), "{hash}");
        let other = passwords.hash("a", secret("another password")).await.expect("a hash");
        let both = vec![other, hash];
        let compare = async |password: &str, hashes: &[String]| {
            passwords.compare("a", secret(password), hashes.to_vec()).await.expect("an answer")
        };
        assert_eq!(compare("one password", &both).await, Some(1));
        assert_eq!(compare("no password", &both).await, None);
        assert_eq!(
            compare("no account has this password", &[]).await,
            None,
            "the padding is no account's"
        );
    }
}
