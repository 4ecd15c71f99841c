//! `fencepost audit`: the audit log of a project, also of a deleted one.

use std::io::Write;

use anyhow::Context;
use clap::Args;
use fencepost_domain::ids::ProjectPublicId;
use fencepost_store::{
    self as store,
    people::audit::{AuditFilter, AuditRow, Place},
};
use serde_json::{Value, json};

use super::target::TargetArgs;

/// Entries read at a time.
const PAGE: i64 = 500;

/// Options of `audit`.
#[derive(Debug, Args)]
pub struct AuditArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Project, by id
    project: String,
}

/// Prints the entries, one JSON object per line, newest first.
///
/// # Errors
/// When the database does not answer, or there is no such project.
pub async fn run(args: AuditArgs) -> anyhow::Result<()> {
    let mut conn = args.target.connect().await?;
    let missing = || format!("no such project: `{}`", args.project);
    let public_id: ProjectPublicId = args.project.parse().ok().with_context(missing)?;
    let id =
        store::people::projects::find_ever(&mut conn, public_id).await?.with_context(missing)?;
    let (filter, mut place) = (AuditFilter::default(), Place::Newest);
    loop {
        let page = store::people::audit::page(&mut conn, id, &filter, place, PAGE).await?;
        let Some(last) = page.last() else { return Ok(()) };
        place = Place::Before(last.id);
        for row in page {
            writeln!(std::io::stdout(), "{}", entry(row))?;
        }
    }
}

fn entry(row: AuditRow) -> Value {
    let json = |text: Option<String>| -> Value {
        text.and_then(|it| serde_json::from_str(&it).ok()).unwrap_or_default()
    };
    json!({
        "id": row.id.to_string(), "at": row.at, "actor_kind": row.actor_kind,
        "actor_id": row.actor_id, "action": row.action, "target": row.target,
        "request_id": row.request_id, "address": row.address,
        "before": json(row.before), "after": json(row.after),
    })
}
