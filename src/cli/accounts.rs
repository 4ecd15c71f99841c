//! `fencepost accounts`: list accounts, suspend them, end their sessions, and reset second factors.

use std::io::Write;

use anyhow::{Context, bail};
use chrono::{DateTime, SecondsFormat, Utc};
use clap::{Args, Subcommand};
use fencepost_domain::ids::AccountId;
use fencepost_identity::accounts::{read_email, security};
use fencepost_store::{self as store, people::accounts::ListedAccount};
use sqlx::PgConnection;
use uuid::Uuid;

use super::target::TargetArgs;

/// Accounts read at a time.
const PAGE: i64 = 500;
/// Accounts that one e-mail address may mean: one has verified it, the others claim it.
const MAX_CLAIMS: i64 = 2;

/// Options of `accounts`.
#[derive(Debug, Args)]
pub struct AccountsArgs {
    #[command(flatten)]
    target: TargetArgs,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List all accounts, oldest first
    List,
    /// End an account's sessions, and refuse its logins; its projects and keys go on working
    Suspend {
        /// Account, by id or e-mail address
        account: String,
    },
    /// Let a suspended account log in again
    Resume {
        /// Account, by id or e-mail address
        account: String,
    },
    /// Remove the second factor of an account whose owner has lost it, and end its sessions
    ResetSecondFactor {
        /// Account, by id or e-mail address
        account: String,
    },
    /// End the sessions of one account, or of all; nodes apply it within five seconds
    EndSessions {
        /// Account, by id or e-mail address
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        account: Option<String>,
        /// Of all accounts, as after the restore of a backup
        #[arg(long)]
        all: bool,
    },
}

/// Runs the command.
///
/// # Errors
/// When the database does not answer, or the account does not exist.
pub async fn run(args: AccountsArgs) -> anyhow::Result<()> {
    let mut conn = args.target.connect().await?;
    let mut out = std::io::stdout();
    match args.command {
        Command::List => {
            writeln!(
                out,
                "{:<31} {:<20} {:<20} {:>8} STATE, EMAIL",
                "ID", "CREATED", "LOGIN", "PROJECTS"
            )?;
            each(&mut conn, |it| Ok(writeln!(std::io::stdout(), "{}", line(it))?)).await?;
        }
        Command::Suspend { account } => {
            let id = find(&mut conn, &account).await?;
            let ended = security::suspend(&mut conn, id, true).await?;
            writeln!(out, "suspended {id}, {ended} sessions ended")?;
        }
        Command::Resume { account } => {
            let id = find(&mut conn, &account).await?;
            security::suspend(&mut conn, id, false).await?;
            writeln!(out, "resumed {id}")?;
        }
        Command::ResetSecondFactor { account } => {
            let id = find(&mut conn, &account).await?;
            let had_one = security::reset_second_factor(&mut conn, id).await?;
            let state = if had_one { "removed: a login needs the password alone" } else { "none" };
            writeln!(out, "second factor of {id}: {state}")?;
        }
        Command::EndSessions { account: Some(account), .. } => {
            let id = find(&mut conn, &account).await?;
            writeln!(out, "{} sessions ended", security::end_sessions(&mut conn, id).await?)?;
        }
        Command::EndSessions { account: None, .. } => {
            let ended = store::people::sessions::revoke_all(&mut conn).await?;
            writeln!(out, "{ended} sessions ended")?;
        }
    }
    Ok(())
}

fn line(it: &ListedAccount) -> String {
    let time = |at: DateTime<Utc>| at.to_rfc3339_opts(SecondsFormat::Secs, true);
    let login = it.last_login_at.map_or_else(|| "never".to_owned(), time);
    let state = match (it.suspended_at, it.verified_at) {
        (Some(_), _) => "suspended",
        (None, Some(_)) => "verified",
        (None, None) => "not verified",
    };
    let (id, created) = (it.id.to_string(), time(it.created_at));
    format!("{id:<31} {created:<20} {login:<20} {:>8} {state}, {}", it.projects, it.email)
}

async fn each(
    conn: &mut PgConnection,
    show: impl Fn(&ListedAccount) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut after = (DateTime::UNIX_EPOCH, AccountId(Uuid::nil()));
    loop {
        let page = store::people::accounts::list(conn, after, None, PAGE).await?;
        let Some(last) = page.last() else { return Ok(()) };
        after = (last.created_at, last.id);
        page.iter().try_for_each(&show)?;
    }
}

/// The account with this id or address. If several claim the address, the one that has verified it.
async fn find(conn: &mut PgConnection, account: &str) -> anyhow::Result<AccountId> {
    if let Ok(id) = account.parse::<AccountId>() {
        let found = store::people::accounts::find(conn, id).await?;
        return found.map(|it| it.id).with_context(|| format!("no such account: {id}"));
    }
    let email = read_email("account", account)
        .map_err(|_| anyhow::anyhow!("`{account}` is neither an account's id nor an address"))?;
    let first = (DateTime::UNIX_EPOCH, AccountId(Uuid::nil()));
    let claims = store::people::accounts::list(conn, first, Some(&email), MAX_CLAIMS).await?;
    match &claims[..] {
        [] => bail!("no account has the address {email}"),
        [one] => Ok(one.id),
        several => {
            let verified = several.iter().find(|it| it.verified_at.is_some());
            let verified = verified.map(|it| it.id);
            verified.with_context(|| format!("several accounts claim {email}: give an id"))
        }
    }
}
