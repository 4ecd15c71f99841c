//! `/v1/limits`: every limit of a project, its usage, and when a rate limit is fully available
//! again.

pub mod usage;

use axum::{Json as Reply, extract::State};
use fencepost_domain::{error::Error, ids::ProjectId, limits as bounds, plan::Limits};
use fencepost_engine::enqueue::quota;
use fencepost_store as store;
use fencepost_web::{
    app::App,
    auth::{Anybody, Bound, Budget, Caller, Who, body_bytes, project_limits},
    wire::streams,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Kind of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LimitKind {
    /// Calls in a time window.
    Rate,
    /// Number of things at the same time.
    Quota,
    /// Maximum of a single value.
    Bound,
}

/// A limit.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct LimitStatus {
    /// Name; a plan's limits are named as in the plans file.
    #[schema(example = "produce_per_minute")]
    pub name: String,
    /// Kind of the limit.
    pub kind: LimitKind,
    /// Maximum; null: unlimited.
    #[schema(required)]
    pub limit: Option<i64>,
    /// Current usage; null: not counted.
    #[schema(required)]
    pub used: Option<i64>,
    /// For a rate: seconds until it is fully available again.
    #[schema(required)]
    pub reset_seconds: Option<u32>,
}

/// A project's limits.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct LimitList {
    /// Plan.
    #[schema(example = "free")]
    pub plan: String,
    /// Where to ask for a larger plan; null: the operator has named no place.
    #[schema(required, example = "mailto:sales@example.com")]
    pub plan_contact: Option<String>,
    /// All limits.
    pub limits: Vec<LimitStatus>,
}

fn quota(name: &'static str, limit: Option<i64>, used: i64) -> LimitStatus {
    LimitStatus {
        name: name.to_owned(),
        kind: LimitKind::Quota,
        limit,
        used: Some(used),
        reset_seconds: None,
    }
}

fn bound(name: &'static str, limit: i64) -> LimitStatus {
    LimitStatus {
        name: name.to_owned(),
        kind: LimitKind::Bound,
        limit: Some(limit),
        used: None,
        reset_seconds: None,
    }
}

/// The use of everything that a plan counts.
async fn quotas(
    app: &App,
    project_id: ProjectId,
    limits: &Limits,
) -> Result<Vec<LimitStatus>, Error> {
    let waiting = quota::waiting(&app.engine, project_id).await?;
    let stored = quota::stored_bytes(&app.engine, project_id).await?;
    let mut conn = app.engine.pools.read_for(project_id).await?;
    let schedules = store::schedules::count(&mut conn, project_id).await?.schedules;
    let queues =
        store::queues::counts::count_queues(&mut conn, project_id, limits.max_queues()).await?;
    let workers = store::workers::count(&mut conn, project_id, limits.max_workers()).await?;
    let max_batches = limits.max_open_batches();
    let batches = store::workflows::batches::count_open(&mut conn, project_id, max_batches).await?;
    let endpoints =
        store::outbound::webhooks::count(&mut conn, project_id, limits.max_endpoints()).await?;
    let max_pushed = limits.max_pushed_queues();
    let pushed = store::queues::pushes::count(&mut conn, project_id, max_pushed).await?;
    let keys = store::people::keys::count(&mut conn, project_id).await?;
    let members = store::people::members::count(&mut conn, project_id).await?;
    Ok(vec![
        quota("waiting_jobs", limits.waiting_jobs, waiting),
        quota("stored_bytes", limits.stored_bytes, stored),
        quota("queues", Some(limits.max_queues()), queues),
        quota("workers", Some(limits.max_workers()), workers),
        quota("schedules", Some(limits.max_schedules()), schedules),
        quota("open_batches", Some(max_batches), batches),
        quota("endpoints", Some(limits.max_endpoints()), endpoints),
        quota("pushed_queues", Some(max_pushed), pushed),
        quota("keys", Some(limits.max_keys()), keys),
        quota("members", Some(limits.max_members()), members),
    ])
}

async fn bytes_per_minute(app: &App, project_id: ProjectId, limits: &Limits) -> LimitStatus {
    let standing = body_bytes(app, project_id, limits).await;
    LimitStatus {
        name: "bytes_per_minute".to_owned(),
        kind: LimitKind::Rate,
        limit: limits.bytes_per_minute.and_then(|it| i64::try_from(it).ok()),
        used: standing.map(|it| it.0),
        reset_seconds: standing.map(|it| it.1),
    }
}

/// Read your limits.
///
/// With current usage. A key with its own rate limits sees the tighter ones.
#[utoipa::path(
    get, path = "/limits", tag = "limits", operation_id = "limits_list",
    security(("api_key" = []), ("session" = ["viewer"])),
    responses((status = 200, description = "Every limit.", body = LimitList)),
)]
pub async fn list(
    caller: Caller<Bound<Anybody>>,
    State(app): State<App>,
) -> Result<Reply<LimitList>, Error> {
    let (project_id, limits) = (caller.project_id, &caller.limits);
    let (standings, parked) = project_limits(&app, &caller.who, project_id, limits).await;
    let rate = |name: &str, budget: Budget| {
        let planned = budget.of(limits);
        let budget = budget.name();
        let standing = standings.iter().find(|it| it.0 == budget).map(|it| it.1);
        LimitStatus {
            name: name.to_owned(),
            kind: LimitKind::Rate,
            limit: standing.map(|it| it.rate.count).or(planned).map(i64::from),
            used: standing.map(|it| i64::from(it.rate.count.saturating_sub(it.remaining))),
            reset_seconds: standing.map(|it| it.reset_seconds),
        }
    };
    let quotas = quotas(&app, project_id, limits).await?;
    let open_streams = streams::count(&app, project_id).into();
    let period = limits.min_schedule_period().num_seconds();
    let payload = i64::try_from(limits.max_payload_bytes()).unwrap_or(i64::MAX);
    let plan = match &caller.who {
        Who::Key(it, _) => it.owner.plan.clone(),
        Who::Member(it, _) => it.membership.plan.clone(),
    };
    let parked_polls = limits.parked_polls.map(i64::from);
    let rates = vec![
        rate("produce_per_minute", Budget::Produce),
        rate("work_per_minute", Budget::Work),
        rate("manage_per_minute", Budget::Manage),
        bytes_per_minute(&app, project_id, limits).await,
        LimitStatus { used: parked.map(i64::from), ..quota("parked_polls", parked_polls, 0) },
        LimitStatus {
            used: None,
            ..quota("parked_polls_per_key", limits.parked_polls_per_key.map(i64::from), 0)
        },
        quota("streams", Some(limits.max_streams().into()), open_streams),
    ];
    let bounds = vec![
        bound("min_schedule_period_seconds", period),
        bound("payload_bytes", payload),
        bound("push_in_flight", limits.max_push_in_flight().into()),
        LimitStatus {
            limit: limits.deliveries_per_minute.map(i64::from),
            ..bound("deliveries_per_minute", 0)
        },
        bound("retention_days", limits.max_retention_days().into()),
        LimitStatus {
            limit: limits.dead_letter_days.map(i64::from),
            ..bound("dead_letter_days", 0)
        },
        bound("batch_jobs", bounds::MAX_ENQUEUE_BATCH_JOBS as i64),
    ];
    let plan_contact = app.accounts.plan_contact.clone();
    Ok(Reply(LimitList {
        plan,
        plan_contact,
        limits: [rates, quotas, bounds].into_iter().flatten().collect(),
    }))
}
