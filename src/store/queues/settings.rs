//! Changes to the settings of a queue.

use fencepost_domain::{
    backoff::RetryPolicy,
    group::{GroupOrder, OnDead},
    ids::ProjectId,
    rate::RateLimit,
};
use sqlx::{PgConnection, types::Json};

use crate::sweep::groups::walks;

/// Changes to a queue's settings. The outer none: keep it. The inner none: remove it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SettingsChange {
    pub max_concurrency: Option<Option<i32>>,
    /// Jobs, and seconds.
    pub rate_limit: Option<Option<(i32, i32)>>,
    pub default_lease_seconds: Option<Option<i32>>,
    pub retention_days: Option<Option<i32>>,
    pub default_max_attempts: Option<Option<i32>>,
    pub default_retry: Option<Option<RetryPolicy>>,
    pub brake_after: Option<Option<i32>>,
    pub max_waiting: Option<Option<i32>>,
    pub groups: Option<GroupRulesChange>,
    /// Names of limits that it shares with other queues.
    pub shared_limits: Option<Option<Vec<String>>>,
}

/// Changes to the rules of a queue's groups. None: keep it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupRulesChange {
    pub order: Option<GroupOrder>,
    pub on_dead: Option<OnDead>,
    pub max_running: Option<Option<i32>>,
    pub rates: Option<Vec<RateLimit>>,
    pub fair: Option<bool>,
}

impl GroupRulesChange {
    /// Groups have no rules any more.
    pub const END: Self = Self {
        order: Some(GroupOrder::None),
        on_dead: Some(OnDead::Block),
        max_running: Some(None),
        rates: Some(Vec::new()),
        fair: Some(false),
    };
}

pub async fn change_settings(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    change: &SettingsChange,
) -> sqlx::Result<()> {
    let rate_limit = change.rate_limit.flatten();
    let groups = change.groups.clone().unwrap_or_default();
    let rates = groups.rates.as_ref().filter(|it| !it.is_empty());
    let counts = rates.map(|it| it.iter().map(|it| it.count).collect());
    let seconds = rates.map(|it| it.iter().map(|it| it.per_seconds).collect());
    sqlx::query!(
        r#"
        insert into queues (
            project_id, name, max_concurrency, rate_limit_count, rate_limit_per_seconds,
            default_lease_seconds, retention_days, default_max_attempts, default_retry, brake_after,
            max_waiting, group_order, group_on_dead, group_max_running, has_gate, group_rules_at,
            group_walk_at, group_walks, group_rate_counts, group_rate_seconds, group_fair,
            group_walk_job, shared_limits
        )
        values (
            $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $18, coalesce($20, 'none'), coalesce($21, 'block'),
            $24::int, coalesce($20 = 'strict', false) or $24::int is not null
                or $26::int[] is not null or coalesce($29, false) or $31::text[] is not null, case when $22 then now() end, case when $22 then now() end, case when $22 then $23::smallint else 0 end, $26, $27::int[],
            coalesce($29, false), case
                when $29 and coalesce($20, 'none') <> 'strict'
                then '00000000-0000-0000-0000-000000000000'::uuid
            end, $31
        )
        on conflict (project_id, name) do update
        set max_concurrency = case when $11 then $3 else queues.max_concurrency end,
            rate_limit_count = case when $12 then $4 else queues.rate_limit_count end,
            rate_limit_per_seconds = case when $12 then $5 else queues.rate_limit_per_seconds end,
            default_lease_seconds = case when $13 then $6 else queues.default_lease_seconds end,
            retention_days = case when $14 then $7 else queues.retention_days end,
            default_max_attempts = case when $15 then $8 else queues.default_max_attempts end,
            default_retry = case when $16 then $9 else queues.default_retry end,
            brake_after = case when $17 then $10 else queues.brake_after end,
            max_waiting = case when $19 then $18 else queues.max_waiting end,
            group_order = coalesce($20, queues.group_order),
            group_on_dead = coalesce($21, queues.group_on_dead),
            group_max_running = case when $25 then $24 else queues.group_max_running end,
            group_rate_counts = case when $28 then $26 else queues.group_rate_counts end,
            group_rate_seconds = case when $28 then $27 else queues.group_rate_seconds end,
            group_fair = coalesce($29::bool, queues.group_fair),
            shared_limits = case when $30 then $31::text[] else queues.shared_limits end,
            -- The last walk opens it.
            has_gate = queues.has_gate or coalesce($20 = 'strict', false) or $24 is not null
                or $26 is not null or coalesce($29, false) or $31 is not null,
            group_rules_at = case when queues.group_order <> $20 or queues.group_on_dead <> $21
                then now() else queues.group_rules_at end,
            group_walk_at = case
                when queues.group_order <> $20 or queues.group_on_dead <> $21
                    or $30 and queues.shared_limits is distinct from $31
                    or queues.group_fair <> $29 or $25 and queues.group_max_running is distinct from $24
                    or $28 and (queues.group_rate_counts, queues.group_rate_seconds)
                        is distinct from ($26::int[], $27::int[])
                then now()
                else queues.group_walk_at
            end,
            group_walk_after = case
                when queues.group_order <> $20 or queues.group_on_dead <> $21
                    or $30 and queues.shared_limits is distinct from $31
                    or queues.group_fair <> $29 or $25 and queues.group_max_running is distinct from $24
                    or $28 and (queues.group_rate_counts, queues.group_rate_seconds)
                        is distinct from ($26::int[], $27::int[])
                then ''
                else queues.group_walk_after
            end,
            -- It goes over the jobs when their groups are to take turns.
            group_walk_job = case
                when coalesce($29, queues.group_fair) and coalesce($20, queues.group_order) <> 'strict'
                    and (not queues.group_fair or queues.group_order = 'strict')
                then '00000000-0000-0000-0000-000000000000'::uuid
                else queues.group_walk_job
            end,
            group_walks = case
                when queues.group_order <> $20 or queues.group_fair <> $29
                    or $30 and queues.group_fair and queues.shared_limits is distinct from $31
                    or $25 and queues.group_max_running is distinct from $24
                    or $28 and (queues.group_rate_counts, queues.group_rate_seconds)
                        is distinct from ($26::int[], $27::int[])
                then $23::smallint
                when queues.group_on_dead <> $21 or $30 and queues.shared_limits is distinct from $31
                    then greatest(queues.group_walks, 1)
                else queues.group_walks
            end,
            updated_at = now()
        "#,
        project_id.0,
        queue,
        change.max_concurrency.flatten(),
        rate_limit.map(|it| it.0),
        rate_limit.map(|it| it.1),
        change.default_lease_seconds.flatten(),
        change.retention_days.flatten(),
        change.default_max_attempts.flatten(),
        change.default_retry.clone().flatten().map(Json) as Option<Json<RetryPolicy>>,
        change.brake_after.flatten(),
        change.max_concurrency.is_some(),
        change.rate_limit.is_some(),
        change.default_lease_seconds.is_some(),
        change.retention_days.is_some(),
        change.default_max_attempts.is_some(),
        change.default_retry.is_some(),
        change.brake_after.is_some(),
        change.max_waiting.flatten(),
        change.max_waiting.is_some(),
        groups.order as Option<GroupOrder>,
        groups.on_dead as Option<OnDead>,
        change.groups.is_some(),
        walks::WALKS,
        groups.max_running.flatten(),
        groups.max_running.is_some(),
        counts as Option<Vec<i32>>,
        seconds as Option<Vec<i32>>,
        groups.rates.is_some(),
        groups.fair,
        change.shared_limits.is_some(),
        change.shared_limits.clone().flatten() as Option<Vec<String>>,
    )
    .execute(conn)
    .await?;
    Ok(())
}
