//! One query for everything that may be due, so that an idle node asks one question and not ten.

use sqlx::PgConnection;

use fencepost_domain::ids::ProjectId;

/// The work that is due, on any node.
#[derive(Debug, Clone, PartialEq)]
pub struct ProbeResult {
    /// Ended jobs have children, callbacks, a batch or a workflow with an endpoint.
    pub has_ends: bool,
    /// Families are being retried.
    pub has_revived: bool,
    /// Waiting jobs are past their `expires_at`.
    pub has_outdated: bool,
    /// Deltas of queue counts are not merged yet.
    pub has_deltas: bool,
    /// An operation's next step is due.
    pub has_operations: bool,
    /// Something is set aside.
    pub has_set_aside: bool,
    /// The next tick of a schedule is not planned yet.
    pub has_unplanned: bool,
    /// Milliseconds until a schedule's tick is due; none: there is none.
    pub next_tick_ms: Option<f64>,
    /// Queues whose settings or pauses have changed lately.
    pub changed_queues: Vec<ChangedQueue>,
    /// Projects whose endpoints ask for other events than before.
    pub subscribed: Vec<ProjectId>,
}

/// A queue whose settings or pauses have changed lately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangedQueue {
    pub project_id: ProjectId,
    pub name: String,
    pub has_breaker: bool,
}

/// Finds out what is due. What has changed lately has within the last `within_ms`.
pub async fn probe(conn: &mut PgConnection, within_ms: i64) -> sqlx::Result<ProbeResult> {
    let row = sqlx::query!(
        r#"
        select exists (select from ended_parents) or exists (select from job_ends) "has_ends!",
               exists (select from revived_parents) "has_revived!",
               exists (select from job_expiries where expires_at <= now()) "has_outdated!",
               exists (select from unmerged_deltas) "has_deltas!",
               exists (select from operations where next_step_at <= now()) "has_operations!",
               exists (select from set_aside) "has_set_aside!",
               exists (
                   select from recurring_schedules
                   where next_tick is null and problem is null and not is_paused
               ) "has_unplanned!",
               (
                   select (extract(epoch from next_tick - now()) * 1000)::float8
                   from recurring_schedules
                   where next_tick is not null
                   order by next_tick
                   limit 1
               ) as next_tick_ms,
               array(
                   select distinct project_id
                   from event_subscriptions
                   where created_at > now() - make_interval(secs => $1::bigint / 1000.0)
                   limit 10000
               ) "subscribed!",
               array_agg(changed.project_id) filter (where changed.project_id is not null) as projects,
               array_agg(changed.name) filter (where changed.name is not null) as names,
               array_agg(changed.has_breaker) filter (where changed.name is not null) as breakers
        from (select) as always
        left join (
            select project_id, name, brake_after is not null as has_breaker
            from queues
            where updated_at > now() - make_interval(secs => $1::bigint / 1000.0)
            limit 10000
        ) changed on true
        "#,
        within_ms,
    )
    .fetch_one(conn)
    .await?;
    let names = row.names.unwrap_or_default().into_iter();
    let changed = row.projects.unwrap_or_default().into_iter().zip(names);
    let changed = changed.zip(row.breakers.unwrap_or_default());
    let changed = changed.map(|((project_id, name), has_breaker)| ChangedQueue {
        project_id: ProjectId(project_id),
        name,
        has_breaker,
    });
    Ok(ProbeResult {
        has_ends: row.has_ends,
        has_revived: row.has_revived,
        has_outdated: row.has_outdated,
        has_deltas: row.has_deltas,
        has_operations: row.has_operations,
        has_set_aside: row.has_set_aside,
        has_unplanned: row.has_unplanned,
        next_tick_ms: row.next_tick_ms,
        changed_queues: changed.collect(),
        subscribed: row.subscribed.into_iter().map(ProjectId).collect(),
    })
}
