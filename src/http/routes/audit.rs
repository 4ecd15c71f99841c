//! `/v1/audit-log`: who changed what in a project, with which request, and the state before and
//! after.

use axum::{
    Json as Reply,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderValue, header::CONTENT_TYPE},
    response::Response,
};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::{Error, chain},
    formats,
    ids::AuditId,
    limits::{self, MAX_EXPORTED_AUDIT},
};
use fencepost_store::{
    self as store,
    connection::deadline::bounded,
    people::audit::{AuditFilter, AuditRow, Place},
};
use fencepost_web::{
    app::App,
    auth::{Audit, Caller},
    wire::{
        extract::Query,
        validate::{Check, stored_json},
    },
};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use crate::{
    cursor::{self, List},
    page::{PageSize, page},
};

pub use fencepost_web::wire::audit::{NewAuditEntry, note, note_detached};

const DEFAULT_PAGE_AUDIT: u32 = 50;
/// Rows of one query of an export.
const EXPORT_BATCH: i64 = 500;
/// Maximum characters of the filters by action, actor and target.
const MAX_FILTER_CHARS: usize = 200;

/// The actor of a change.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AuditActor {
    /// `account`, `key`, `operator` (a person with access to the database) or `system`.
    #[schema(example = "account")]
    pub kind: String,
    /// The account's or key's id.
    #[schema(required, example = "acct_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: Option<String>,
    /// IP address.
    #[schema(required)]
    pub address: Option<String>,
}

/// An audit entry.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    /// Id of the entry.
    #[schema(example = "aud_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Time of the change.
    pub created_at: DateTime<Utc>,
    /// The key, member or operator that made the change.
    pub actor: AuditActor,
    /// Type of the change, such as `key.revoked`.
    #[schema(example = "key.revoked")]
    pub action: String,
    /// Id of what was changed.
    #[schema(required)]
    pub target: Option<String>,
    /// Id of the request.
    #[schema(required)]
    pub request_id: Option<String>,
    /// State before, without secrets.
    #[schema(value_type = serde_json::Value, required)]
    pub before: Option<Box<RawValue>>,
    /// State after, without secrets.
    #[schema(value_type = serde_json::Value, required)]
    pub after: Option<Box<RawValue>>,
}

impl AuditEntry {
    /// A stored entry.
    ///
    /// # Errors
    /// [`Error::Internal`] when a stored state is not JSON.
    pub fn of(row: AuditRow) -> Result<Self, Error> {
        Ok(Self {
            id: row.id.to_string(),
            created_at: row.at,
            actor: AuditActor { kind: row.actor_kind, id: row.actor_id, address: row.address },
            action: row.action,
            target: row.target,
            request_id: row.request_id,
            before: row.before.map(stored_json).transpose()?,
            after: row.after.map(stored_json).transpose()?,
        })
    }
}

/// Filter and page of entries.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct AuditQuery {
    /// Only this action, or all of a kind: `key.*`.
    action: Option<String>,
    /// Only by this account or key.
    actor_id: Option<String>,
    /// Only on this target.
    target: Option<String>,
    /// Only entries at this time or later.
    #[serde(default, deserialize_with = "formats::optional_time")]
    created_after: Option<DateTime<Utc>>,
    /// Only entries before this time.
    #[serde(default, deserialize_with = "formats::optional_time")]
    created_before: Option<DateTime<Utc>>,
    /// Maximum number of entries to return. Default: 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// Filter of exported entries.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct AuditExportQuery {
    /// Only this action, or all of a kind: `key.*`.
    action: Option<String>,
    /// Only by this account or key.
    actor_id: Option<String>,
    /// Only on this target.
    target: Option<String>,
    /// Only entries at this time or later.
    #[serde(default, deserialize_with = "formats::optional_time")]
    created_after: Option<DateTime<Utc>>,
    /// Only entries before this time.
    #[serde(default, deserialize_with = "formats::optional_time")]
    created_before: Option<DateTime<Utc>>,
    /// Id of the entry that was exported last: those after it follow, oldest first, without those
    /// of the last minute, which are not all there. `aud_00000000000000000000000000` begins with
    /// the oldest.
    after: Option<String>,
}

impl AuditExportQuery {
    fn accept(self, check: &mut Check) -> AuditFilter {
        let texts =
            [("action", &self.action), ("actor_id", &self.actor_id), ("target", &self.target)];
        for (field, text) in texts {
            check.optional_name(field, text.as_deref(), MAX_FILTER_CHARS);
        }
        check.time("created_after", self.created_after);
        check.time("created_before", self.created_before);
        let Self { action, actor_id, target, created_after, created_before, after: _ } = self;
        AuditFilter { action, actor_id, target, created_after, created_before }
    }
}

page! {
    /// A page of audit entries.
    AuditPage {
        /// Newest first.
        entries: AuditEntry
    }
}

/// List audit entries.
///
/// Changes to keys, members, settings, queues, dead letters and schedules, kept for 400 days. Jobs
/// have their own history.
#[utoipa::path(
    get, path = "/audit-log", tag = "audit", operation_id = "audit_list", params(AuditQuery),
    security(("api_key" = ["manage"]), ("session" = ["admin"])),
    responses(
        (status = 200, description = "A page of entries.", body = AuditPage),
    ),
)]
pub async fn list(
    caller: Caller<Audit>,
    State(app): State<App>,
    Query(query): Query<AuditQuery>,
) -> Result<Reply<AuditPage>, Error> {
    let AuditQuery { action, actor_id, target, created_after, created_before, limit, cursor } =
        query;
    let mut check = Check::default();
    let size = PageSize::read(limit, DEFAULT_PAGE_AUDIT, limits::MAX_PAGE_AUDIT, &mut check);
    let filter =
        AuditExportQuery { action, actor_id, target, created_after, created_before, after: None }
            .accept(&mut check);
    check.finish()?;
    let list = List::of(caller.project_id, "audit").filtered(&filter);
    let before = cursor::read_id(&app, list, cursor.as_deref())?.map(AuditId);
    let place = before.map_or(Place::Newest, Place::Before);
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let mut rows =
        store::people::audit::page(&mut conn, caller.project_id, &filter, place, size.one_more())
            .await?;
    let next_cursor = size.cut(&mut rows, |it| cursor::write_id(&app, list, it.id.0));
    let entries = rows.into_iter().map(AuditEntry::of).collect::<Result<_, _>>()?;
    Ok(Reply(AuditPage::of(entries, next_cursor)))
}

/// Export audit entries.
///
/// One JSON object per line, newest first, at most 100,000. To follow the log, as a SIEM does, send
/// the last `id` that you have as `after`: it loses and repeats no entry.
#[utoipa::path(
    get, path = "/audit-log/export", tag = "audit", operation_id = "audit_export", params(AuditExportQuery),
    security(("api_key" = ["manage"]), ("session" = ["admin"])),
    responses(
        (status = 200, description = "Entries, as NDJSON.", body = String, content_type = "application/x-ndjson"),
    ),
)]
pub async fn export(
    caller: Caller<Audit>,
    State(app): State<App>,
    Query(query): Query<AuditExportQuery>,
) -> Result<Response, Error> {
    let mut check = Check::default();
    let after = query.after.as_deref().map(str::parse::<AuditId>);
    let place = match after {
        None => Place::Newest,
        Some(Ok(id)) => Place::After(id),
        Some(Err(_)) => {
            check.refuse("after", "must be the id of an entry");
            Place::Newest
        }
    };
    let filter = query.accept(&mut check);
    check.finish()?;
    let export = Export { app, caller, filter, place, left: MAX_EXPORTED_AUDIT };
    // The first query runs before the answer starts, so that it can still fail with a status.
    let first = export.next().await?;
    let rest = stream::unfold(first, async |state| {
        let (lines, export) = state?;
        let next = match export.next().await {
            Ok(next) => next,
            Err(error) => {
                tracing::warn!(error = chain(&error), "audit export was interrupted");
                return Some((Err(std::io::Error::other("the export was interrupted")), None));
            }
        };
        Some((Ok(lines), next))
    });
    let mut response = Response::new(Body::from_stream(rest));
    let kind = HeaderValue::from_static("application/x-ndjson");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

/// The progress of an export.
struct Export {
    app: App,
    caller: Caller<Audit>,
    filter: AuditFilter,
    place: Place,
    left: i64,
}

impl Export {
    /// The next lines, and the new progress; none: there are no more.
    async fn next(self) -> Result<Option<(Bytes, Self)>, Error> {
        if self.left == 0 {
            return Ok(None);
        }
        // In a task of its own: the client may disconnect at any time.
        let looking = tokio::spawn(bounded(async move {
            if !self.caller.is_live(&self.app).await {
                return Err(Error::Unauthorized);
            }
            let mut conn = self.app.engine.pools.read_for(self.caller.project_id).await?;
            let limit = EXPORT_BATCH.min(self.left);
            let rows = store::people::audit::page(
                &mut conn,
                self.caller.project_id,
                &self.filter,
                self.place,
                limit,
            )
            .await?;
            drop(conn);
            Ok::<_, Error>((rows, self))
        }));
        let looked = looking.await.map_err(Error::internal)?;
        let (rows, export) = looked.map_err(sqlx::Error::from)??;
        let Some(last) = rows.last().map(|it| it.id) else { return Ok(None) };
        let left = export.left - rows.len() as i64;
        let mut lines = Vec::new();
        for row in rows {
            serde_json::to_writer(&mut lines, &AuditEntry::of(row)?).map_err(Error::internal)?;
            lines.push(b'\n');
        }
        let place = match export.place {
            Place::After(_) => Place::After(last),
            Place::Newest | Place::Before(_) => Place::Before(last),
        };
        Ok(Some((lines.into(), Self { place, left, ..export })))
    }
}
