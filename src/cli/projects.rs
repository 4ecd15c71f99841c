//! `fencepost projects`: list projects, set their limits, and suspend them.

use std::{io::Write, path::PathBuf};

use anyhow::{Context, bail, ensure};
use chrono::SecondsFormat;
use clap::{Args, Subcommand};
use fencepost_domain::{
    access::Role,
    ids::ProjectId,
    plan::{self, Limits, Plans},
};
use fencepost_identity::accounts::{author::Author, members, projects, read_email};
use fencepost_store::{self as store, people::projects::Project};
use secrecy::ExposeSecret;
use serde_json::{Map, Value};
use sqlx::PgConnection;

use super::{keys::find, target::TargetArgs};

/// Projects read at a time.
const PAGE: i64 = 500;

/// Options of `projects`.
#[derive(Debug, Args)]
pub struct ProjectsArgs {
    #[command(flatten)]
    target: TargetArgs,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List all projects, oldest first
    List,
    /// Invite a person to a project, such as its first member; prints the link to accept
    Invite {
        /// Project, by slug or id
        project: String,
        /// E-mail address
        #[arg(long, value_name = "ADDRESS")]
        email: String,
        /// Role in the project
        #[arg(long, value_enum, default_value = "owner", value_name = "ROLE")]
        role: InvitedRole,
    },
    /// Set a project's plan or single limits; nodes apply them within five seconds
    Set {
        /// Project, by slug or id
        project: String,
        /// Plan; nodes that do not know it use the strictest known one
        #[arg(long, value_name = "PLAN")]
        plan: Option<String>,
        /// Override of a limit, as waiting_jobs=50000; `NAME=` removes it
        #[arg(long = "limit", value_name = "NAME=NUMBER")]
        limits: Vec<String>,
        /// Plans file like ops/plans.toml [default: the built-in plans]
        #[arg(long, env = "FENCEPOST_PLANS", value_name = "FILE")]
        plans: Option<PathBuf>,
    },
    /// Refuse all calls of a project with 403 `suspended`, but for acks and heartbeats of its
    /// running jobs; nodes apply it within five seconds
    Suspend(SuspendArgs),
    /// End a project's suspension
    Resume(SuspendArgs),
}

#[derive(Debug, Args)]
struct SuspendArgs {
    /// Project, by slug or id
    project: String,
    /// Reason, for the project's audit log
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

/// [`Role`], as the command line names it.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum InvitedRole {
    /// Reads
    Viewer,
    /// Manages jobs, queues, dead letters and schedules
    Member,
    /// Also keys, members, settings and the audit log
    Admin,
    /// Also owners, and deleting the project
    Owner,
}

impl InvitedRole {
    fn role(self) -> Role {
        match self {
            Self::Viewer => Role::Viewer,
            Self::Member => Role::Member,
            Self::Admin => Role::Admin,
            Self::Owner => Role::Owner,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// When the database does not answer, or the project, plan or limit does not exist.
pub async fn run(args: ProjectsArgs) -> anyhow::Result<()> {
    let mut conn = args.target.connect().await?;
    let mut out = std::io::stdout();
    match args.command {
        Command::List => {
            writeln!(
                out,
                "{:<31} {:<24} {:<10} {:<5} {:<9} {:>9} {:>9} OVERRIDES",
                "ID", "SLUG", "PLAN", "MODE", "STATE", "LIVE", "STORED"
            )?;
            let mut after = ProjectId(0);
            loop {
                let page = store::people::projects::list(&mut conn, after, PAGE).await?;
                let Some(last) = page.last() else { break };
                after = last.id;
                for it in page {
                    let own = it.overrides.as_ref().map(ToString::to_string).unwrap_or_default();
                    let (id, state) = (it.public_id.to_string(), state(&it));
                    let jobs = store::queues::counts::totals(&mut conn, it.id).await?;
                    let live = jobs.scheduled + jobs.active;
                    let stored = live + jobs.dead_letter + jobs.succeeded + jobs.cancelled;
                    writeln!(
                        out,
                        "{id:<31} {:<24} {:<10} {:<5} {state:<9} {live:>9} {stored:>9} {own}",
                        it.slug, it.plan, it.mode
                    )?;
                }
            }
        }
        Command::Invite { project, email, role } => {
            invite(&mut conn, &project, &email, role.role()).await?;
        }
        Command::Set { project, plan, limits, plans } => {
            set(&mut conn, &project, plan, &limits, plans).await?;
        }
        Command::Suspend(args) => suspend(&mut conn, args, true).await?,
        Command::Resume(args) => suspend(&mut conn, args, false).await?,
    }
    Ok(())
}

fn state(project: &Project) -> &'static str {
    if project.suspended_at.is_some() { "suspended" } else { "active" }
}

async fn suspend(
    conn: &mut PgConnection,
    args: SuspendArgs,
    is_suspended: bool,
) -> anyhow::Result<()> {
    let project = find(conn, &args.project).await?;
    projects::suspend(conn, &project, is_suspended, args.reason.as_deref()).await?;
    let now = if is_suspended { "suspended" } else { "active" };
    writeln!(std::io::stdout(), "{} is {now}", project.slug)?;
    Ok(())
}

async fn invite(
    conn: &mut PgConnection,
    project: &str,
    email: &str,
    role: Role,
) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    let project = find(conn, project).await?;
    let email = read_email("--email", email)
        .map_err(|_| anyhow::anyhow!("--email: `{email}` is not an e-mail address"))?;
    let author = Author::operator(project.id);
    let (row, token) = members::invite(conn, &author, (&email, role), i64::MAX).await?;
    writeln!(out, "invitation  {}", token.expose_secret())?;
    writeln!(out, "for         {email}, as {} of {}", role.name(), project.slug)?;
    writeln!(out, "until       {}", row.expires_at.to_rfc3339_opts(SecondsFormat::Secs, true))?;
    writeln!(
        out,
        "\nAccept it at /console/invitation#token=INVITATION, with POST /v1/auth/signup, or, with an"
    )?;
    writeln!(out, "existing account, with POST /v1/invitations/accept. It is shown only once.")?;
    Ok(())
}

async fn set(
    conn: &mut PgConnection,
    project: &str,
    plan: Option<String>,
    limits: &[String],
    plans: Option<PathBuf>,
) -> anyhow::Result<()> {
    let project = find(conn, project).await?;
    let plan = plan.unwrap_or_else(|| project.plan.clone());
    let known = match plans {
        Some(file) => Plans::parse(&std::fs::read_to_string(&file)?)?,
        None => Plans::built_in(),
    };
    let names = known.names().join(", ");
    ensure!(known.has(&plan), "no such plan: `{plan}`; plans are {names}");
    let overrides = change(project.overrides.as_ref(), limits)?;
    projects::set_plan(conn, &project, &plan, overrides.as_ref()).await?;
    writeln!(std::io::stdout(), "{} is on plan {plan}", project.slug)?;
    Ok(())
}

/// The overrides after these changes.
fn change(present: Option<&Value>, changes: &[String]) -> anyhow::Result<Option<Value>> {
    let mut limits: Map<String, Value> =
        present.and_then(Value::as_object).cloned().unwrap_or_default();
    for change in changes {
        let Some((name, number)) = change.split_once('=') else {
            bail!("--limit {change}: write NAME=NUMBER");
        };
        if number.is_empty() {
            limits.remove(name);
            continue;
        }
        let number: i64 =
            number.parse().with_context(|| format!("--limit {change}: not a number"))?;
        limits.insert(name.to_owned(), number.into());
    }
    if limits.is_empty() {
        return Ok(None);
    }
    let limits = Value::Object(limits);
    let read: Limits = serde_json::from_value(limits.clone()).context("--limit: no such limit")?;
    ensure!(!plan::has_zero(&read), "--limit: every limit must be at least 1");
    Ok(Some(limits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_limits_are_added_replaced_and_taken_away() {
        let change = |present: Value, changes: &[&str]| {
            let changes: Vec<_> = changes.iter().map(|it| (*it).to_owned()).collect();
            super::change(Some(&present), &changes)
        };
        let changed = change(serde_json::json!({"keys": 5}), &["waiting_jobs=7", "keys=9"]);
        let expected = serde_json::json!({"keys": 9, "waiting_jobs": 7});
        assert_eq!(changed.expect("limits"), Some(expected));
        assert_eq!(change(serde_json::json!({"keys": 5}), &["keys="]).expect("limits"), None);
        for bad in ["keys", "keys=x", "locks=1", "keys=0", "keys=-1"] {
            assert!(change(Value::Null, &[bad]).is_err(), "{bad}");
        }
    }
}
