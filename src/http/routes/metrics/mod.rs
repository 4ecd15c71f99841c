//! `/v1/metrics/…`: statistics of a project: as JSON, and for its own Prometheus.

pub mod dashboards;
mod exposition;
pub mod prometheus;

use axum::{Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error, histogram::Histogram, ids::ProjectId, job::JobState, limits, stats::Counts,
};
use fencepost_store::{
    self as store,
    queues::stats::{Span, StatsBucket},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use fencepost_web::{
    app::App,
    auth::{Caller, Read},
    wire::{extract::Query, validate::Check},
};

/// Period.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = MetricsPeriod)]
pub enum Period {
    /// One hour, by minute.
    #[serde(rename = "1h")]
    Hour,
    /// One day.
    #[default]
    #[serde(rename = "24h")]
    Day,
    /// One week.
    #[serde(rename = "7d")]
    Week,
    /// Thirty days.
    #[serde(rename = "30d")]
    Month,
}

impl Period {
    const fn seconds(self) -> i32 {
        match self {
            Self::Hour => 3_600,
            Self::Day => 24 * 3_600,
            Self::Week => 7 * 24 * 3_600,
            Self::Month => 30 * 24 * 3_600,
        }
    }

    /// Granularities that are longer than the period are refused.
    fn allows(self, granularity: Granularity) -> bool {
        match granularity {
            // Longer periods would have too many buckets.
            Granularity::Minute => self == Self::Hour,
            Granularity::Hour => true,
            Granularity::Day => self != Self::Hour,
        }
    }
}

/// Length of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = MetricsGranularity)]
pub enum Granularity {
    /// One minute; for the period `1h` only.
    Minute,
    /// One hour.
    Hour,
    /// One day (UTC).
    Day,
}

impl Granularity {
    const fn of(period: Period) -> Self {
        match period {
            Period::Hour => Self::Minute,
            Period::Day | Period::Week => Self::Hour,
            Period::Month => Self::Day,
        }
    }

    /// Days are sums of hours.
    const fn resolution(self) -> &'static str {
        match self {
            Self::Minute => "minute",
            Self::Hour | Self::Day => "hour",
        }
    }

    const fn slot(self) -> (&'static str, i32) {
        match self {
            Self::Minute => ("minute", 60),
            Self::Hour => ("hour", 3_600),
            Self::Day => ("day", 24 * 3_600),
        }
    }
}

/// Period to read.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SummaryQuery {
    /// Period. Default: `24h`.
    period: Option<Period>,
}

/// Statistics of a project's jobs: current states, and what happened in a period.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct MetricsSummary {
    /// Period of the numbers below `processing`.
    pub period: Period,
    /// Sum of the counts below.
    pub total: i64,
    /// Jobs that wait for a worker or for the end of a backoff, at present.
    pub pending: i64,
    /// Jobs that wait for their `run_at` or for parents, at present.
    pub scheduled: i64,
    /// Running jobs, at present.
    pub processing: i64,
    /// Succeeded jobs.
    pub succeeded: i64,
    /// Attempts that failed, timed out or lost their worker; their jobs were retried.
    pub failed: i64,
    /// Cancelled jobs.
    pub cancelled: i64,
    /// Jobs in each state, at present. Those that have ended count while they are retained.
    pub current: StateCounts,
    /// Dead-lettered jobs.
    pub dead_letter: i64,
    /// `succeeded` divided by `succeeded + failed + dead_letter`, to four decimal places; null:
    /// none ended.
    #[schema(required)]
    pub success_rate: Option<f64>,
    /// Mean run time of acknowledged attempts; null: there were none.
    #[schema(required)]
    pub avg_duration_ms: Option<i64>,
    /// Run time of acknowledged attempts.
    pub run: Percentiles,
    /// Time from when jobs could run to their first lease.
    pub wait: Percentiles,
}

/// Number of jobs in each state.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, ToSchema)]
pub struct StateCounts {
    /// Jobs that wait for their `run_at` or for parents.
    pub scheduled: i64,
    /// Jobs that wait for a worker or for the end of a backoff.
    pub pending: i64,
    /// Running jobs.
    pub processing: i64,
    /// Succeeded jobs.
    pub succeeded: i64,
    /// Dead letters.
    pub dead_letter: i64,
    /// Cancelled jobs.
    pub cancelled: i64,
}

impl StateCounts {
    /// The number of jobs in this state.
    #[must_use]
    pub const fn of(&self, state: JobState) -> i64 {
        match state {
            JobState::Scheduled => self.scheduled,
            JobState::Pending => self.pending,
            JobState::Processing => self.processing,
            JobState::Succeeded => self.succeeded,
            JobState::DeadLetter => self.dead_letter,
            JobState::Cancelled => self.cancelled,
        }
    }
}

/// Latency percentiles; null if there are no samples. Estimated within these buckets: 1, 2, 5, 10,
/// 25, 50, 100, 250, 500 ms, 1, 2.5, 5, 10, 30 s, 1, 2, 5, 15 min, 1, 4, 24 h.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Percentiles {
    /// Median (p50).
    #[schema(required)]
    pub p50_ms: Option<i64>,
    /// 95th percentile (p95).
    #[schema(required)]
    pub p95_ms: Option<i64>,
    /// 99th percentile (p99).
    #[schema(required)]
    pub p99_ms: Option<i64>,
}

impl Percentiles {
    pub(super) fn of(times: &Histogram) -> Self {
        let [p50_ms, p95_ms, p99_ms] = [0.5, 0.95, 0.99].map(|it| times.quantile_ms(it));
        Self { p50_ms, p95_ms, p99_ms }
    }
}

/// Attempts without success after which the job was retried.
fn failures(counts: &Counts) -> i64 {
    let failed = counts.failed + counts.timed_out + counts.lease_expired;
    (failed - counts.dead_lettered).max(0)
}

fn success_rate(counts: &Counts) -> Option<f64> {
    let ended = counts.succeeded + failures(counts) + counts.dead_lettered;
    let rate = counts.succeeded as f64 / ended as f64;
    (ended > 0).then(|| (rate * 10_000.0).round() / 10_000.0)
}

/// Sums over all queues and types.
fn span(period: Period, granularity: Granularity) -> Span<'static> {
    let (slot, slot_seconds) = granularity.slot();
    let (resolution, period_seconds) = (granularity.resolution(), period.seconds());
    Span { resolution, slot, slot_seconds, period_seconds, queue: None, job_type: None }
}

async fn read(
    app: &App,
    project_id: ProjectId,
    span: &Span<'_>,
) -> Result<Vec<StatsBucket>, Error> {
    let mut conn = app.engine.pools.read_for(project_id).await?;
    Ok(store::queues::stats::buckets(&mut conn, project_id, span).await?)
}

/// Summarize a project's jobs.
///
/// Current states, and what happened since the start of the minute (of `1h`), hour or day in which
/// the period begins. Statistics are written every five seconds; a killed node loses its last
/// seconds.
#[utoipa::path(
    get, path = "/metrics/summary", tag = "metrics", operation_id = "metrics_summary",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(SummaryQuery),
    responses(
        (status = 200, description = "The statistics.", body = MetricsSummary),
    ),
)]
pub async fn summary(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<SummaryQuery>,
) -> Result<Reply<MetricsSummary>, Error> {
    let period = query.period.unwrap_or_default();
    let span = span(period, Granularity::of(period));
    let mut counts = Counts::default();
    for it in read(&app, caller.project_id, &span).await? {
        counts.merge(&it.counts);
    }
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let now = store::queues::counts::totals(&mut conn, caller.project_id).await?;
    let pending = (now.active - now.processing).max(0);
    let failed = failures(&counts);
    let ended = counts.succeeded + failed + counts.cancelled + counts.dead_lettered;
    Ok(Reply(MetricsSummary {
        period,
        total: pending + now.scheduled + now.processing + ended,
        pending,
        scheduled: now.scheduled,
        processing: now.processing,
        succeeded: counts.succeeded,
        failed,
        cancelled: counts.cancelled,
        current: StateCounts {
            scheduled: now.scheduled,
            pending,
            processing: now.processing,
            succeeded: now.succeeded,
            dead_letter: now.dead_letter,
            cancelled: now.cancelled,
        },
        dead_letter: counts.dead_lettered,
        success_rate: success_rate(&counts),
        avg_duration_ms: counts.run.mean_ms(),
        run: Percentiles::of(&counts.run),
        wait: Percentiles::of(&counts.wait),
    }))
}

/// Buckets to read.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ThroughputQuery {
    /// Period. Default: `24h`.
    period: Option<Period>,
    /// Length of a bucket. Default: minutes of an hour, hours of a day or a week, days of a month.
    granularity: Option<Granularity>,
    /// Only this queue.
    #[param(min_length = 1, max_length = 100)]
    queue: Option<String>,
    /// Only this type.
    #[param(min_length = 1, max_length = 500)]
    job_type: Option<String>,
}

/// Statistics of a period, bucket by bucket.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Throughput {
    /// Period.
    pub period: Period,
    /// Length of a bucket.
    pub granularity: Granularity,
    /// Oldest first, without gaps; the last is still in progress. At most 721.
    pub buckets: Vec<ThroughputBucket>,
}

/// Statistics of one bucket.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ThroughputBucket {
    /// Start of the bucket.
    pub start_at: DateTime<Utc>,
    /// Enqueued jobs.
    pub enqueued: i64,
    /// Claimed jobs.
    pub claimed: i64,
    /// Succeeded jobs.
    pub succeeded: i64,
    /// Attempts that their workers reported as failed.
    pub failed: i64,
    /// Attempts that exceeded their timeout.
    pub timed_out: i64,
    /// Attempts whose lease expired without an ack.
    pub lease_expired: i64,
    /// Released attempts.
    pub released: i64,
    /// Dead-lettered jobs.
    pub dead_letter: i64,
    /// Cancelled jobs.
    pub cancelled: i64,
    /// Mean run time of acknowledged attempts; null: there were none.
    #[schema(required)]
    pub avg_duration_ms: Option<i64>,
    /// Median run time (p50).
    #[schema(required)]
    pub p50_ms: Option<i64>,
    /// 95th percentile of run times (p95).
    #[schema(required)]
    pub p95_ms: Option<i64>,
    /// 99th percentile of run times (p99).
    #[schema(required)]
    pub p99_ms: Option<i64>,
    /// Time from when jobs could run to their first lease.
    pub wait: Percentiles,
}

impl ThroughputBucket {
    fn of(slot: StatsBucket) -> Self {
        let StatsBucket { at, counts } = slot;
        let Percentiles { p50_ms, p95_ms, p99_ms } = Percentiles::of(&counts.run);
        Self {
            start_at: at,
            enqueued: counts.enqueued,
            claimed: counts.claimed,
            succeeded: counts.succeeded,
            failed: counts.failed,
            timed_out: counts.timed_out,
            lease_expired: counts.lease_expired,
            released: counts.released,
            dead_letter: counts.dead_lettered,
            cancelled: counts.cancelled,
            avg_duration_ms: counts.run.mean_ms(),
            p50_ms,
            p95_ms,
            p99_ms,
            wait: Percentiles::of(&counts.wait),
        }
    }
}

/// Read throughput over time.
///
/// Of a project, or of one queue or type. Each node counts the first 100 queues of a project, 100
/// types in each and 500 pairs of both by name, and later ones as `other`.
#[utoipa::path(
    get, path = "/metrics/throughput", tag = "metrics", operation_id = "metrics_throughput",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    params(ThroughputQuery),
    responses(
        (status = 200, description = "The statistics.", body = Throughput),
    ),
)]
pub async fn throughput(
    caller: Caller<Read>,
    State(app): State<App>,
    Query(query): Query<ThroughputQuery>,
) -> Result<Reply<Throughput>, Error> {
    let period = query.period.unwrap_or_default();
    let granularity = query.granularity.unwrap_or(Granularity::of(period));
    let mut check = Check::default();
    check.optional_name("queue", query.queue.as_deref(), limits::MAX_QUEUE_CHARS);
    check.optional_name("job_type", query.job_type.as_deref(), limits::MAX_JOB_TYPE_CHARS);
    if !period.allows(granularity) {
        check.refuse(
            "granularity",
            "`minute` goes with a `period` of `1h`, `day` with longer ones, `hour` with all",
        );
    }
    check.finish()?;
    let (queue, job_type) = (query.queue.as_deref(), query.job_type.as_deref());
    let span = Span { queue, job_type, ..span(period, granularity) };
    let buckets = read(&app, caller.project_id, &span).await?;
    let buckets = buckets.into_iter().map(ThroughputBucket::of).collect();
    Ok(Reply(Throughput { period, granularity, buckets }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_success_rate_counts_each_dead_letter_once() {
        let counts = Counts { succeeded: 2, failed: 1, dead_lettered: 1, ..Counts::default() };
        assert_eq!(success_rate(&counts), Some(0.6667));
        assert_eq!(success_rate(&Counts::default()), None);
    }
}
