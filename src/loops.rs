//! The background loops of every node. A step is one bounded, idempotent batch that any number of
//! nodes may run at once, so no leader is elected.

use std::{
    future::Future,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use fencepost_domain::{
    error::chain,
    limits::{AUDIT_KEEP_DAYS, NAME_KEEP_DAYS, SECURITY_LOG_KEEP_DAYS, UNUSED_ACCOUNT_DAYS},
};
use fencepost_engine::{
    Engine,
    alarms::Alarms,
    canary::Canary,
    enqueue::quota,
    groups::admission::{self, Admitting},
    jobs::wait,
    maintenance::{
        self, PROBE_PERIOD, byte_hours, cascade, completions,
        counts::{self, CORRECTION_PAUSE_SECONDS},
        dead_letter_age, excess_workers, gauges, idle_batches, known_projects, promote, reap,
        retention, revive,
    },
    operations,
    schedules::fire,
    stats::flush,
    webhooks::{
        deliver::{Deliverer, REFRESH_PERIOD},
        empty, notify_endpoints,
        pusher::Pusher,
    },
    workers,
};
use fencepost_identity::accounts::token::KEY_SETTLE_SECONDS;
use fencepost_signals::{telemetry, wakeups::BackgroundTask};
use fencepost_store::{connection::deadline::bounded_query, jobs::stored_bytes, sweep::purge};
use metrics::{counter, gauge, histogram};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use fencepost_web::app::App;

/// Short leases that are given within this time wake the reaper once: each pass writes a row that
/// all nodes share.
const REAP_GATHERING: Duration = Duration::from_millis(20);
/// The sleep of a loop that the probe wakes when there is work.
const IDLE_PERIOD: Duration = Duration::from_secs(30);
/// Between two merges of changes of stored bytes: readers add up those that are not merged.
const MERGE_PERIOD: Duration = Duration::from_secs(5);
/// How often projects that were full are counted again.
const COUNT_PERIOD: Duration = Duration::from_secs(10);
/// How often events that another node has committed are looked for, if that node has died since.
const EVENTS_PERIOD: Duration = Duration::from_secs(2);
/// How often workers' heartbeat times are written and their directives read.
const WORKERS_PERIOD: Duration = Duration::from_secs(2);
/// How often watched jobs are checked for changes that other nodes made.
const WATCH_PERIOD: Duration = Duration::from_secs(2);
/// How often rows past their retention are deleted.
const PRUNE_PERIOD: Duration = Duration::from_secs(60);
/// How often queues that are empty are forgotten: it reads the counts of all.
const FORGET_PERIOD: Duration = Duration::from_secs(3_600);
/// How often the hot table is checked for a due vacuum.
const VACUUM_PERIOD: Duration = Duration::from_secs(1);
/// How often statistics are flushed: a killed node loses at most this much.
const STATS_PERIOD: Duration = Duration::from_secs(5);
/// How often a new hour is looked for, in which stored bytes are added to the usage of projects.
const BYTE_HOURS_PERIOD: Duration = Duration::from_secs(10);
/// How often gauges are set. Those of the database and of waiting work are the same on all nodes,
/// so each node reads them that much less often: together they read as much as one node.
const GAUGES_PERIOD: Duration = Duration::from_secs(10);
/// More nodes than this read together more than one node, so that no gauge is older than a minute.
const MAX_GAUGE_NODES: u32 = 6;
/// The pause is this many times as long as the database counted queues: however many there are, the
/// nodes together keep a core busy for 1 % of the time, or as little as the longest period allows.
const GAUGES_PAUSE_FACTOR: u32 = 100;
/// The longest pause, however many queues there are.
const MAX_GAUGES_PERIOD: Duration = Duration::from_secs(60);
/// A node counts as gone after three of these without a sign of life.
const NODES_PERIOD: Duration = Duration::from_secs(4);
/// How often expired sessions, tokens and audit entries are deleted.
const ACCOUNTS_PERIOD: Duration = Duration::from_secs(60);
/// Every node knows a new key before any node signs with it.
const _: () = assert!(ACCOUNTS_PERIOD.as_secs() * 2 < KEY_SETTLE_SECONDS as u64);
/// How often dead letters that are too old are looked for.
const DEAD_LETTERS_PERIOD: Duration = Duration::from_secs(3_600);
/// How often alarms look. As for gauges, nodes look that much less often together.
const ALARMS_PERIOD: Duration = Duration::from_secs(5);
/// More nodes than this look together more often, so that no incident is reported later than after
/// half a minute.
const MAX_ALARM_NODES: u32 = 6;
/// Pause between two readings of all projects with breakers or endpoints. The probe sees new ones.
const KNOWN_PERIOD: Duration = Duration::from_secs(60);
/// How often deleted projects are purged.
const PURGE_PERIOD: Duration = Duration::from_secs(5);
/// The pause after a failed step.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// The time of the next step.
enum Next {
    /// The batch was full: run the next step at once.
    Continue,
    /// The batch was short.
    Sleep(Duration),
}

impl Next {
    fn continue_if(is_more: bool, period: Duration) -> Self {
        if is_more { Self::Continue } else { Self::Sleep(period) }
    }

    fn after(sleep: Duration) -> Self {
        Self::continue_if(sleep.is_zero(), sleep)
    }
}

/// Starts all loops. They end, each after its batch, when `stopping` is cancelled.
pub fn start(app: &App, stopping: &CancellationToken, tracker: &TaskTracker) {
    let loops = Loops { engine: &app.engine, stopping, tracker };
    start_instance_loops(app, &loops);
    loops.start("reap", Some(BackgroundTask::Reap), |engine| async move {
        tokio::time::sleep(REAP_GATHERING).await;
        Ok(Next::after(reap::pass(&engine).await?))
    });
    loops.start("promote", Some(BackgroundTask::Promote), |engine| async move {
        Ok(Next::after(promote::pass(&engine).await?))
    });
    loops.start("probe", None, |engine| async move {
        maintenance::probe(&engine).await?;
        Ok(Next::Sleep(PROBE_PERIOD))
    });
    loops.start("known_projects", None, |engine| async move {
        known_projects::pass(&engine).await?;
        Ok(Next::Sleep(KNOWN_PERIOD))
    });
    let plans = Arc::clone(&app.plans);
    loops.start("cascade", Some(BackgroundTask::Cascade), move |engine| {
        let plans = Arc::clone(&plans);
        async move {
            let is_more =
                cascade::pass(&engine).await? | completions::pass(&engine, &plans).await?;
            Ok(Next::continue_if(is_more, IDLE_PERIOD))
        }
    });
    let (plans, limiter) = (Arc::clone(&app.plans), app.accounts.limiter.clone());
    loops.start("events", Some(BackgroundTask::Events), move |engine| {
        let (plans, limiter) = (Arc::clone(&plans), limiter.clone());
        async move {
            let is_more = notify_endpoints::pass(&engine, &plans, &limiter).await?;
            Ok(Next::continue_if(is_more, EVENTS_PERIOD))
        }
    });
    loops.start("revive", Some(BackgroundTask::Revive), |engine| async move {
        Ok(Next::continue_if(revive::pass(&engine).await?, IDLE_PERIOD))
    });
    let admitting = Arc::new(Admitting::default());
    loops.start("groups", Some(BackgroundTask::Groups), move |engine| {
        let admitting = Arc::clone(&admitting);
        async move { Ok(Next::after(admission::pass(&engine, &admitting).await?)) }
    });
    loops.start("expire", Some(BackgroundTask::Expire), |engine| async move {
        Ok(Next::continue_if(cascade::pass_expired(&engine).await?, IDLE_PERIOD))
    });
    loops.start("counts", Some(BackgroundTask::MergeCounts), |engine| async move {
        Ok(Next::continue_if(counts::pass(&engine).await?, IDLE_PERIOD))
    });
    loops.start("operations", Some(BackgroundTask::Operations), |engine| async move {
        let sleep = operations::pass(&engine).await?;
        Ok(Next::after(sleep.unwrap_or(IDLE_PERIOD).min(IDLE_PERIOD)))
    });
    loops.start("plan", Some(BackgroundTask::Plan), |engine| async move {
        Ok(Next::continue_if(fire::plan(&engine).await?, IDLE_PERIOD))
    });
    loops.start("fire", Some(BackgroundTask::Fire), |engine| async move {
        Ok(Next::after(fire::pass(&engine).await?))
    });
    loops.start("workers", None, |engine| async move {
        workers::pass(&engine).await?;
        Ok(Next::Sleep(WORKERS_PERIOD))
    });
    loops.start("watch", None, |engine| async move {
        wait::pass(&engine).await?;
        engine.notifier.feed.prune_idle();
        Ok(Next::Sleep(WATCH_PERIOD))
    });
    start_upkeep_loops(app, &loops);
}

/// The loops that keep the database and the metrics in order.
fn start_upkeep_loops(app: &App, loops: &Loops<'_>) {
    loops.start("stored_bytes", None, |engine| async move {
        let mut conn = engine.pools.background.acquire().await?;
        let merged = stored_bytes::merge(&mut conn).await?;
        engine.backlogs.full.note_stored(merged.noted);
        Ok(Next::continue_if(merged.deltas >= stored_bytes::MAX_MERGED_DELTAS, MERGE_PERIOD))
    });
    let plans = Arc::clone(&app.plans);
    loops.start("full_projects", None, move |engine| {
        let plans = Arc::clone(&plans);
        async move {
            quota::count_stored(&engine, &plans).await?;
            Ok(Next::Sleep(COUNT_PERIOD))
        }
    });
    loops.start("prune", None, |engine| async move {
        Ok(Next::continue_if(maintenance::prune(&engine).await?, PRUNE_PERIOD))
    });
    loops.start("running_counts", None, |engine| async move {
        let is_more = counts::correct(&engine, CORRECTION_PAUSE_SECONDS).await?;
        Ok(Next::continue_if(is_more, PRUNE_PERIOD))
    });
    loops.start("empty", None, |engine| async move {
        empty::pass(&engine).await?;
        Ok(Next::Sleep(PURGE_PERIOD))
    });
    loops.start("empty_queues", None, |engine| async move {
        retention::forget_empty_queues(&engine).await?;
        Ok(Next::Sleep(FORGET_PERIOD))
    });
    loops.start("retention", None, |engine| async move {
        let is_more = retention::pass(&engine).await? | idle_batches::pass(&engine).await?;
        Ok(Next::continue_if(is_more, PRUNE_PERIOD))
    });
    loops.start("stats", None, |engine| async move {
        flush::write(&engine).await?;
        Ok(Next::Sleep(STATS_PERIOD))
    });
    loops.start("byte_hours", None, |engine| async move {
        Ok(Next::continue_if(byte_hours::pass(&engine).await?, BYTE_HOURS_PERIOD))
    });
    loops.start("pools", None, |engine| async move {
        gauges::show_pools(&engine.pools);
        Ok(Next::Sleep(GAUGES_PERIOD))
    });
    loops.start("vacuum", None, |engine| async move {
        maintenance::vacuum_if_due(&engine).await?;
        Ok(Next::Sleep(VACUUM_PERIOD))
    });
}

/// Starts the loop of this node's canary.
pub fn start_canary(
    engine: &Engine,
    stopping: &CancellationToken,
    tracker: &TaskTracker,
    period: Duration,
) {
    let canary = Arc::new(Canary::of_this_node());
    Loops { engine, stopping, tracker }.start("canary", None, move |engine| {
        let canary = Arc::clone(&canary);
        async move {
            canary.run(&engine).await;
            Ok(Next::Sleep(period))
        }
    });
}

/// Starts the loops that push the jobs of queues.
pub fn start_pusher(
    pusher: &Arc<Pusher>,
    engine: &Engine,
    stopping: &CancellationToken,
    tracker: &TaskTracker,
) {
    let loops = Loops { engine, stopping, tracker };
    let this = Arc::clone(pusher);
    loops.start("pushes", Some(BackgroundTask::Pushes), move |engine| {
        let this = Arc::clone(&this);
        async move {
            tokio::time::sleep(engine.targets.pushes.gathering()).await;
            let refresh = engine.targets.pushes.refresh();
            Arc::clone(&this).refresh().await?;
            refresh.end();
            this.write_outcomes().await?;
            Ok(Next::Sleep(REFRESH_PERIOD))
        }
    });
}

/// Starts the loops that send deliveries.
pub fn start_deliverer(
    deliverer: &Arc<Deliverer>,
    engine: &Engine,
    stopping: &CancellationToken,
    tracker: &TaskTracker,
) {
    let loops = Loops { engine, stopping, tracker };
    let this = Arc::clone(deliverer);
    loops.start("endpoints", Some(BackgroundTask::Endpoints), move |engine| {
        let this = Arc::clone(&this);
        async move {
            tokio::time::sleep(engine.targets.endpoints.gathering()).await;
            let refresh = engine.targets.endpoints.refresh();
            this.refresh().await?;
            refresh.end();
            Ok(Next::Sleep(REFRESH_PERIOD))
        }
    });
    let this = Arc::clone(deliverer);
    loops.start("outcomes", None, move |_| {
        let this = Arc::clone(&this);
        async move {
            this.write_outcomes().await?;
            Ok(Next::Sleep(REFRESH_PERIOD))
        }
    });
}

/// The loops about nodes, accounts and projects.
fn start_instance_loops(app: &App, loops: &Loops<'_>) {
    let this = app.clone();
    loops.start("nodes", None, move |_| {
        let app = this.clone();
        async move {
            app.count_nodes().await?;
            app.used_keys.write(&app.engine.pools.background).await?;
            Ok(Next::Sleep(NODES_PERIOD))
        }
    });
    let this = app.clone();
    loops.start("accounts", None, move |engine| {
        let app = this.clone();
        async move {
            app.accounts.signing_keys.refresh().await?;
            let mut conn = engine.pools.background.acquire().await?;
            let expired = purge::prune_expired(&mut conn).await?;
            let old = purge::prune_logs(&mut conn, AUDIT_KEEP_DAYS, SECURITY_LOG_KEEP_DAYS).await?;
            purge::forget_names(&mut conn, NAME_KEEP_DAYS).await?;
            // Elsewhere, no address can be verified.
            if app.accounts.mailer.reaches_others() {
                purge::prune_unused(&mut conn, UNUSED_ACCOUNT_DAYS).await?;
            }
            Ok(Next::continue_if(expired.max(old) >= purge::MAX_PRUNED_PEOPLE, ACCOUNTS_PERIOD))
        }
    });
    let (accounts, fails) = (app.accounts.clone(), Arc::new(AtomicBool::new(false)));
    loops.start("mails", Some(BackgroundTask::Mails), move |_| {
        let (accounts, fails) = (accounts.clone(), Arc::clone(&fails));
        async move { Ok(Next::after(accounts.mailing.send_due(&fails).await?)) }
    });
    let alarms = Arc::new(Alarms::new(app.accounts.mailer.is_used()));
    let bus = app.bus.clone();
    loops.start("alarms", None, move |engine| {
        let (alarms, nodes) = (Arc::clone(&alarms), bus.nodes().min(MAX_ALARM_NODES));
        async move { Ok(Next::continue_if(alarms.pass(&engine).await?, ALARMS_PERIOD * nodes)) }
    });
    let plans = app.accounts.plans.clone();
    loops.start("dead_letters", None, move |engine| {
        let plans = plans.clone();
        async move {
            dead_letter_age::pass(&engine, &plans).await?;
            Ok(Next::Sleep(DEAD_LETTERS_PERIOD))
        }
    });
    let plans = app.accounts.plans.clone();
    loops.start("excess_workers", None, move |engine| {
        let plans = plans.clone();
        async move { Ok(Next::continue_if(excess_workers::pass(&engine, &plans).await?, PRUNE_PERIOD)) }
    });
    let bus = app.bus.clone();
    loops.start("gauges", None, move |engine| {
        let nodes = bus.nodes().min(MAX_GAUGE_NODES);
        async move {
            let took = gauges::refresh(&engine).await?;
            Ok(Next::Sleep(gauges_pause(took, nodes)))
        }
    });
    loops.start("purge", None, |engine| async move {
        Ok(Next::continue_if(maintenance::purge(&engine).await?, PURGE_PERIOD))
    });
}

/// The pause of one of these nodes after the database counted queues for this long.
fn gauges_pause(took: Duration, nodes: u32) -> Duration {
    (took * GAUGES_PAUSE_FACTOR).max(GAUGES_PERIOD).saturating_mul(nodes).min(MAX_GAUGES_PERIOD)
}

struct Loops<'a> {
    engine: &'a Engine,
    stopping: &'a CancellationToken,
    tracker: &'a TaskTracker,
}

impl Loops<'_> {
    fn start<Stepping>(
        &self,
        name: &'static str,
        chore: Option<BackgroundTask>,
        step: impl Fn(Engine) -> Stepping + Send + 'static,
    ) where
        Stepping: Future<Output = sqlx::Result<Next>> + Send + 'static,
    {
        let (engine, wake) = (self.engine.clone(), self.engine.notifier.wake.clone());
        let step = move || step(engine.clone());
        let hurry = move || {
            let wake = wake.clone();
            async move {
                match chore {
                    Some(chore) => wake.asked(chore).await,
                    None => std::future::pending().await,
                }
            }
        };
        self.tracker.spawn(every(name, self.stopping.clone(), hurry, step));
    }
}

/// Runs step after step until `stopping`. A failed or panicked step is counted, and followed by a
/// pause. `hurry` cuts a sleep short.
async fn every<Step, Stepping, Hurry, Hurrying>(
    name: &'static str,
    stopping: CancellationToken,
    hurry: Hurry,
    step: Step,
) where
    Step: Fn() -> Stepping,
    Stepping: Future<Output = sqlx::Result<Next>> + Send + 'static,
    Hurry: Fn() -> Hurrying,
    Hurrying: Future<Output = ()>,
{
    // Alerts also see a loop that has never completed a step, and its first error.
    counter!(telemetry::LOOP_ERRORS, "loop" => name).increment(0);
    gauge!(telemetry::LOOP_LAST_STEP, "loop" => name).set(unix_seconds());
    while !stopping.is_cancelled() {
        let started = Instant::now();
        let stepped = tokio::spawn(bounded_query(step())).await;
        histogram!(telemetry::LOOP_SECONDS, "loop" => name).record(started.elapsed().as_secs_f64());
        if matches!(stepped, Ok(Ok(_))) {
            gauge!(telemetry::LOOP_LAST_STEP, "loop" => name).set(unix_seconds());
        }
        let sleep = match stepped {
            Ok(Ok(Next::Continue)) => continue,
            Ok(Ok(Next::Sleep(sleep))) => sleep,
            Ok(Err(error)) => {
                counter!(telemetry::LOOP_ERRORS, "loop" => name).increment(1);
                let error = chain(&error);
                tracing::warn!(error, loop.name = name, "background loop failed, will retry");
                FAILURE_PAUSE
            }
            Err(panic) => {
                counter!(telemetry::PANICS).increment(1);
                let error = chain(&panic);
                tracing::error!(error, loop.name = name, "background loop panicked, will retry");
                FAILURE_PAUSE
            }
        };
        let due = Instant::now() + sleep;
        tokio::select! {
            () = stopping.cancelled() => (),
            () = tokio::time::sleep(sleep) => {
                let late = due.elapsed().as_secs_f64();
                histogram!(telemetry::LOOP_LATENESS_SECONDS, "loop" => name).record(late);
            }
            () = hurry() => (),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "for display only: nothing is decided by it")]
fn unix_seconds() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gauges_cost_the_database_no_more_the_more_queues_there_are() {
        let pause = |took_ms, nodes| gauges_pause(Duration::from_millis(took_ms), nodes).as_secs();
        assert_eq!((pause(5, 1), pause(5, 3)), (10, 30), "few queues");
        assert_eq!((pause(400, 1), pause(400, 3)), (40, 60), "a million queues");
        assert_eq!(pause(5_000, 1), 60, "never older than a minute");
    }
}
