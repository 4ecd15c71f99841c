//! Mails: each waits in the database until a mail server has accepted it, so that none is lost when
//! a node or the mail server stops. A row says who is notified of what. Its text and the tokens in
//! it are made when it is sent, so that no secret waits.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::{Error, chain},
    ids::{AccountId, IncidentId, InvitationId, ProjectId},
    limits::{INVITATION_SECONDS, MAIL_SECONDS, MAX_WAITING_MAILS, RESET_SECONDS, VERIFY_SECONDS},
};
use fencepost_net::mail::{Mail, Mailer, Outcome, SEND_TIMEOUT};
use fencepost_signals::{
    telemetry,
    wakeups::{BackgroundTask, Wake},
};
use fencepost_store::{
    self as store,
    connection::pools::Pool,
    people::{accounts::Purpose, mails::TakenMail},
};
use futures_util::future::join_all;
use metrics::counter;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{
    mails,
    secret::{self, MAIL_PREFIX},
    throttle::Throttle,
};

/// Mails that a node sends at a time.
const MAX_AT_ONCE: i64 = 16;
/// For how long a node has taken a mail: its conversation with the server has ended by then.
const TAKEN_SECONDS: i32 = 60;
const _: () = assert!(SEND_TIMEOUT.as_secs() * 2 < TAKEN_SECONDS as u64);
/// The pause after the first try, in seconds; it doubles with each further one.
const FIRST_PAUSE_SECONDS: i32 = 5;
/// The longest pause.
const MAX_PAUSE_SECONDS: i32 = 300;
/// The pause between two mails while the mail server accepts none.
const FAILURE_PAUSE: Duration = Duration::from_secs(5);
/// How often mails are looked for that another node has stored, and did not send.
const LOOK_PERIOD: Duration = Duration::from_secs(10);
/// Accounts that a reset mail names: of those that claim an address, this many oldest ones, and as
/// many newest ones.
pub(super) const MAILED_ACCOUNTS: i64 = 5;
/// The kind under which mails that verify addresses are counted.
pub(super) const VERIFICATIONS: &str = "verifications";

/// The content of a mail. Stored as JSON; `address` is the network address that caused it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Content {
    /// Asks the owner of an address to verify it.
    Verification { account: Uuid, address: String },
    /// Notifies the owner of an address that someone signed up with it once more.
    Known { account: Uuid, address: String },
    /// Links for each account that the address may mean.
    Reset { to: String },
    /// Asks for the confirmation of a new address; `old` is the verified one before.
    Change { account: Uuid, to: String, old: Option<String>, new: String, address: String },
    /// Entries of an account's security log.
    Security { to: String, what: String, address: String },
    /// To a project.
    Invitation { project: i32, invitation: Uuid, to: String },
    /// An incident of a project. The engine stores these mails.
    Alarm { project: i32, incident: Uuid, account: Uuid, is_resolved: bool },
}

impl Content {
    /// For how long it is tried: no longer than what it offers can be used.
    const fn life_seconds(&self) -> i64 {
        match self {
            Self::Verification { .. } | Self::Change { .. } => VERIFY_SECONDS,
            Self::Reset { .. } => RESET_SECONDS,
            Self::Invitation { .. } => INVITATION_SECONDS,
            Self::Known { .. } | Self::Security { .. } | Self::Alarm { .. } => MAIL_SECONDS,
        }
    }

    /// The project or account that it ends with.
    fn about(&self) -> (Option<ProjectId>, Option<AccountId>) {
        match self {
            Self::Verification { account, .. }
            | Self::Known { account, .. }
            | Self::Change { account, .. } => (None, Some(AccountId(*account))),
            Self::Invitation { project, .. } => (Some(ProjectId(*project)), None),
            Self::Alarm { project, account, .. } => {
                (Some(ProjectId(*project)), Some(AccountId(*account)))
            }
            Self::Reset { .. } | Self::Security { .. } => (None, None),
        }
    }
}

/// The pause after this many tries.
fn pause_seconds(tries: i32) -> i32 {
    let doubled = u32::try_from(tries - 1).ok().and_then(|it| 2_i32.checked_pow(it));
    let pause = doubled.and_then(|it| it.checked_mul(FIRST_PAUSE_SECONDS));
    pause.unwrap_or(MAX_PAUSE_SECONDS).min(MAX_PAUSE_SECONDS)
}

/// Mails to people.
#[derive(Clone)]
pub struct Mailing {
    pub(super) pool: Pool,
    pub(super) mailer: Mailer,
    pub(super) public_url: String,
    /// Has mails sent.
    pub(super) wake: Wake,
    pub(super) throttle: Throttle,
}

impl Mailing {
    /// True if this server sends mails, or prints them.
    pub(super) fn is_used(&self) -> bool {
        self.mailer.is_used()
    }

    /// True if mails reach people other than the operator.
    pub(super) fn reaches_others(&self) -> bool {
        self.mailer.reaches_others()
    }

    /// Stores a mail, in the transaction of what it reports. Call [`Self::hurry`] after the
    /// commit.
    pub(super) async fn store(
        &self,
        conn: &mut PgConnection,
        content: &Content,
    ) -> Result<(), Error> {
        let is_stored = self.mailer.is_used() && {
            let text = serde_json::to_string(content).map_err(Error::internal)?;
            let (about, life) = (content.about(), content.life_seconds());
            store::people::mails::insert(conn, &text, about, life, MAX_WAITING_MAILS).await?
        };
        if !is_stored {
            counter!(telemetry::MAILS, "outcome" => "dropped").increment(1);
        }
        Ok(())
    }

    /// Stores a mail, and has it sent.
    pub(super) async fn send(&self, content: &Content) -> Result<(), Error> {
        let mut conn = self.pool.acquire().await?;
        self.store(&mut conn, content).await?;
        self.hurry();
        Ok(())
    }

    /// Has mails sent that were just stored.
    pub(super) fn hurry(&self) {
        self.wake.ask(BackgroundTask::Mails);
    }

    /// Sends some mails that are due. Returns after how long to look again; at once, if more are.
    /// `fails` keeps whether the server accepted none lately.
    pub async fn send_due(&self, fails: &AtomicBool) -> sqlx::Result<Duration> {
        if !self.mailer.is_used() {
            return Ok(LOOK_PERIOD);
        }
        // While the server accepts none, one at a time finds out whether it does again.
        let was_failing = fails.load(Ordering::Relaxed);
        let limit = if was_failing { 1 } else { MAX_AT_ONCE };
        let (taken, next_seconds) = {
            let mut conn = self.pool.acquire().await?;
            let expired = store::people::mails::delete_expired(&mut conn, MAX_AT_ONCE).await?;
            counter!(telemetry::MAILS, "outcome" => "expired").increment(expired);
            let taken = store::people::mails::take(&mut conn, TAKEN_SECONDS, limit).await?;
            (taken, store::people::mails::next_try_seconds(&mut conn).await?)
        };
        // The server is asked for all of them at once: it may be slow.
        let sent = join_all(taken.iter().map(|it| self.send_mail(it))).await;
        let sent = sent.into_iter().collect::<sqlx::Result<Vec<_>>>()?;
        let is_failing = match sent.is_empty() {
            true => was_failing,
            false => sent.iter().all(|it| *it == Outcome::Failed),
        };
        fails.store(is_failing, Ordering::Relaxed);
        let wait = next_seconds.map(|it| Duration::try_from_secs_f64(it).unwrap_or_default());
        let wait = wait.unwrap_or(LOOK_PERIOD).min(LOOK_PERIOD);
        Ok(if is_failing { wait.max(FAILURE_PAUSE) } else { wait })
    }

    /// Sends one, and notes what became of it.
    async fn send_mail(&self, taken: &TakenMail) -> sqlx::Result<Outcome> {
        let outcome = match self.write_mail(taken).await {
            Ok(Some((id, mail))) => self.mailer.hand_over(&id, mail).await,
            Ok(None) => Outcome::NotNeeded,
            Err(error) => {
                tracing::error!(error = chain(&error), mail.id = %taken.id, "mail could not be written");
                Outcome::Failed
            }
        };
        counter!(telemetry::MAILS, "outcome" => outcome.name()).increment(1);
        let mut conn = self.pool.acquire().await?;
        if outcome == Outcome::Failed {
            let pause = pause_seconds(taken.tries);
            store::people::mails::note_failed(&mut conn, taken.id, pause).await?;
        } else {
            store::people::mails::note_done(&mut conn, taken.id).await?;
        }
        Ok(outcome)
    }

    /// A mail with new tokens, and its id for receivers; none: what it is about is gone.
    async fn write_mail(&self, taken: &TakenMail) -> Result<Option<(String, Mail)>, Error> {
        let content = serde_json::from_str(&taken.content).map_err(Error::internal)?;
        let url = &*self.public_url;
        // A new try may replace the token of the one before: receivers must show both.
        let is_new = matches!(content, Content::Change { .. } | Content::Invitation { .. });
        let id =
            if is_new { format!("{}.{}", taken.id, taken.tries) } else { taken.id.to_string() };
        let mut conn = self.pool.acquire().await?;
        let mail = match content {
            Content::Verification { account, address } => {
                let account = store::people::accounts::find(&mut conn, AccountId(account)).await?;
                let Some(account) = account else { return Ok(None) };
                let token = new_token(&mut conn, account.id, Purpose::Verify).await?;
                mails::verification(&account, url, &token, &address)?
            }
            Content::Known { account, address } => {
                let account = store::people::accounts::find(&mut conn, AccountId(account)).await?;
                let Some(account) = account else { return Ok(None) };
                mails::known(&account, url, &address)?
            }
            Content::Reset { to } => {
                let links = reset_links(&mut conn, &to).await?;
                if links.is_empty() {
                    return Ok(None);
                }
                mails::reset(&to, url, &links)?
            }
            Content::Change { account, to, old, new, address } => {
                let (token, is_of_new) = (secret::generate(MAIL_PREFIX), to == new);
                let (id, hash) = (AccountId(account), secret::hash(&token));
                let has_changed =
                    store::people::email_changes::set_hash(&mut conn, id, &new, &hash, is_of_new);
                if !has_changed.await? {
                    return Ok(None);
                }
                mails::change(&to, url, (old.as_deref(), &new), (&token, &address))?
            }
            Content::Security { to, what, address } => mails::security(&to, url, &what, &address)?,
            Content::Invitation { project, invitation, to } => {
                let key = (ProjectId(project), InvitationId(invitation));
                let token = secret::generate(MAIL_PREFIX);
                let hash = secret::hash(&token);
                let name = store::people::invitations::note_mailed(&mut conn, key, &hash).await?;
                let Some(name) = name else { return Ok(None) };
                mails::invitation(&to, url, &name, &token)?
            }
            Content::Alarm { project, incident, account, is_resolved } => {
                let (project_id, id) = (ProjectId(project), IncidentId(incident));
                let project = store::people::projects::get(&mut conn, project_id).await?;
                let incident = store::outbound::incidents::find(&mut conn, project_id, id).await?;
                // They may have left meanwhile.
                let to =
                    store::outbound::incidents::recipient(&mut conn, (project_id, id), account)
                        .await?;
                let found = project.zip(incident).zip(to);
                let Some(((project, incident), to)) = found else { return Ok(None) };
                mails::alarm(&to, url, &project.slug, &incident, is_resolved)?
            }
        };
        Ok(Some((id, mail)))
    }
}

/// A token for each account that an address may mean, with the time of its creation.
async fn reset_links(
    conn: &mut PgConnection,
    email: &str,
) -> sqlx::Result<Vec<(DateTime<Utc>, SecretString)>> {
    let mut links = Vec::new();
    for account in store::people::accounts::with_address(conn, email, MAILED_ACCOUNTS).await? {
        let token = new_token(conn, account.id, Purpose::Reset).await?;
        links.push((account.created_at, token));
    }
    Ok(links)
}

/// A token that proves that its holder reads the account's address.
async fn new_token(
    conn: &mut PgConnection,
    account_id: AccountId,
    purpose: Purpose,
) -> sqlx::Result<SecretString> {
    let life_seconds = match purpose {
        Purpose::Verify => VERIFY_SECONDS,
        Purpose::Reset => RESET_SECONDS,
    };
    let token = secret::generate(MAIL_PREFIX);
    let hash = secret::hash(&token);
    store::people::accounts::insert_mail_token(conn, account_id, purpose, &hash, life_seconds)
        .await?;
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_five_minutes() {
        let pauses = [1, 2, 3, 6, 7, 40, i32::MAX].map(pause_seconds);
        assert_eq!(pauses, [5, 10, 20, 160, 300, 300, 300]);
    }
}
