//! Actor and reason of a change of a job: as callers send them, and as the API shows them.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use fencepost_domain::{
    actor::{ActorKind, ChangedBy, MAX_REASON_CHARS},
    error::Error,
    ids::{AccountId, JobId, KeyId, ProjectId},
    text,
};
use fencepost_store::{
    jobs::events::{self, LastChange},
    people::actors,
};
use fencepost_web::{
    auth::Who,
    wire::{extract::RequestBody, openapi::chars, validate::Check},
};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use utoipa::ToSchema;

/// The reason for a change. No body: none is recorded.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"reason": "The customer has left."}))]
pub struct ReasonRequest {
    /// Shown with the change in the job's history. One line.
    #[schema(extensions(("bounds" = json!(chars(1, MAX_REASON_CHARS)))))]
    pub(crate) reason: Option<String>,
}

impl RequestBody for ReasonRequest {}

/// Checks the reason of a change: terminals and pages show it in one line.
pub fn check_reason(check: &mut Check, reason: Option<&str>) {
    if let Some(Err(error)) = reason.map(|it| text::check_line(it, MAX_REASON_CHARS)) {
        check.refuse("reason", error.to_string());
    }
}

impl ReasonRequest {
    /// The author and the reason of the change.
    pub fn accept(self, who: &Who) -> Result<ChangedBy, Error> {
        let mut check = Check::default();
        check_reason(&mut check, self.reason.as_deref());
        check.finish()?;
        Ok(who.changed_by().because(self.reason))
    }
}

/// Author of a change of a job.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Actor)]
pub struct ActorView {
    /// Kind of the actor.
    pub kind: ActorKind,
    /// Id of the key, the account, the operation, the parent job or the schedule.
    #[schema(required, example = "key_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: Option<String>,
    /// Name of a key that exists, or the address of a member; an address is shown to members only.
    #[schema(required, example = "deploy")]
    pub name: Option<String>,
}

/// A change of a job.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = JobChange)]
pub struct ChangeView {
    /// Type of its event in the history.
    #[serde(rename = "type")]
    #[schema(example = "fencepost.cancelled")]
    pub kind: String,
    /// Time of the change.
    pub at: DateTime<Utc>,
    /// Author of the change.
    pub actor: ActorView,
    /// Reason that the author has given.
    #[schema(required)]
    pub reason: Option<String>,
}

/// Names of actors, by their ids.
pub struct Names(HashMap<String, String>);

impl Names {
    /// The names that this reader may see.
    pub async fn read(
        conn: &mut PgConnection,
        who: &Who,
        project_id: ProjectId,
        actors: impl Iterator<Item = (ActorKind, &str)>,
    ) -> sqlx::Result<Self> {
        let (mut keys, mut members) = (Vec::new(), Vec::new());
        for (kind, id) in actors {
            match kind {
                ActorKind::Key => keys.extend(id.parse::<KeyId>()),
                ActorKind::Member if who.account_id().is_some() => {
                    members.extend(id.parse::<AccountId>());
                }
                _ => (),
            }
        }
        let mut names = HashMap::new();
        if !keys.is_empty() {
            names.extend(actors::names_of_keys(conn, project_id, &keys).await?);
        }
        if !members.is_empty() {
            names.extend(actors::names_of_members(conn, project_id, &members).await?);
        }
        Ok(Self(names))
    }

    /// The actor with its name.
    #[must_use]
    pub fn actor(&self, kind: ActorKind, id: Option<String>) -> ActorView {
        let name = id.as_ref().and_then(|it| self.0.get(it)).cloned();
        ActorView { kind, id, name }
    }
}

/// The latest change of each of these jobs.
pub async fn last_changes(
    conn: &mut PgConnection,
    who: &Who,
    project_id: ProjectId,
    ids: &[JobId],
) -> sqlx::Result<HashMap<JobId, ChangeView>> {
    let changes = events::last_changes(conn, project_id, ids).await?;
    let actors = changes.values().filter_map(|it| Some((it.by.kind, it.by.id.as_deref()?)));
    let names = Names::read(conn, who, project_id, actors).await?;
    let view = |LastChange { kind, at, by }: LastChange| ChangeView {
        kind,
        at,
        actor: names.actor(by.kind, by.id),
        reason: by.reason,
    };
    Ok(changes.into_iter().map(|(id, it)| (id, view(it))).collect())
}
