//! What runs in the background on every node. A step is one bounded idempotent batch that any
//! number of nodes may run at once, so there is no leader to elect.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use metrics::{counter, histogram};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    engine::{Engine, orphans, promote, reap, registry, watch},
    telemetry,
};

/// How often expired leases are looked for: with the time of a pass, they are reaped within 2 s.
const REAP_PERIOD: Duration = Duration::from_millis(1_500);
/// How often children of parents without success are looked for that another node has left.
const ORPHANS_PERIOD: Duration = Duration::from_secs(2);
/// How often waiting jobs are looked for whose `expires_at` has passed.
const OUTDATED_PERIOD: Duration = Duration::from_secs(1);
/// How often the registry of workers is brought up to date.
const WORKERS_PERIOD: Duration = Duration::from_secs(2);
/// How often it is asked what other nodes have done to watched jobs.
const WATCH_PERIOD: Duration = Duration::from_secs(2);
/// How often it is looked for what was kept long enough.
const PRUNE_PERIOD: Duration = Duration::from_secs(60);
/// How often it is asked whether the hot table needs a vacuum.
const VACUUM_PERIOD: Duration = Duration::from_secs(1);
/// The pause after a failed step.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// What a step asks for.
enum Then {
    /// The batch was full: go on at once.
    GoOn,
    /// The batch was short: sleep.
    Sleep(Duration),
}

/// Starts all loops. They end, each after its batch, when `stopping` is cancelled.
pub fn start(engine: &Engine, stopping: &CancellationToken, tracker: &TaskTracker) {
    let loops = Loops { engine, stopping, tracker };
    loops.start("reap", never, |engine| async move {
        let is_full = reap::pass(&engine).await?;
        Ok(if is_full { Then::GoOn } else { Then::Sleep(REAP_PERIOD) })
    });
    let due = engine.tidings.wake.clone();
    let due_time_changed = move || {
        let wake = due.clone();
        async move { wake.due_time_change().await }
    };
    loops.start("promote", due_time_changed, |engine| async move {
        let sleep = promote::pass(&engine).await?;
        Ok(if sleep.is_zero() { Then::GoOn } else { Then::Sleep(sleep) })
    });
    let orphaned = engine.tidings.wake.clone();
    let orphans = move || {
        let wake = orphaned.clone();
        async move { wake.orphans().await }
    };
    loops.start("orphans", orphans, |engine| async move {
        let is_more = orphans::pass(&engine).await?;
        Ok(if is_more { Then::GoOn } else { Then::Sleep(ORPHANS_PERIOD) })
    });
    loops.start("outdated", never, |engine| async move {
        let is_full = orphans::pass_outdated(&engine).await?;
        Ok(if is_full { Then::GoOn } else { Then::Sleep(OUTDATED_PERIOD) })
    });
    loops.start("workers", never, |engine| async move {
        registry::pass(&engine).await?;
        Ok(Then::Sleep(WORKERS_PERIOD))
    });
    loops.start("watch", never, |engine| async move {
        watch::pass(&engine).await?;
        engine.tidings.news.forget_unheard();
        Ok(Then::Sleep(WATCH_PERIOD))
    });
    loops.start("prune", never, |engine| async move {
        let is_full = engine.prune().await?;
        Ok(if is_full { Then::GoOn } else { Then::Sleep(PRUNE_PERIOD) })
    });
    loops.start("vacuum", never, |engine| async move {
        engine.vacuum_if_due().await?;
        Ok(Then::Sleep(VACUUM_PERIOD))
    });
}

struct Loops<'a> {
    engine: &'a Engine,
    stopping: &'a CancellationToken,
    tracker: &'a TaskTracker,
}

impl Loops<'_> {
    fn start<Stepping, Hurry, Hurrying>(
        &self,
        name: &'static str,
        hurry: Hurry,
        step: impl Fn(Engine) -> Stepping + Send + 'static,
    ) where
        Stepping: Future<Output = sqlx::Result<Then>> + Send + 'static,
        Hurry: Fn() -> Hurrying + Send + 'static,
        Hurrying: Future<Output = ()> + Send + 'static,
    {
        let engine = self.engine.clone();
        let step = move || step(engine.clone());
        self.tracker.spawn(every(name, self.stopping.clone(), hurry, step));
    }
}

async fn never() {
    std::future::pending::<()>().await;
}

/// The only loop there is: step after step until `stopping`. A failed or panicked step is counted
/// and slept over. `hurry` cuts a sleep short.
async fn every<Step, Stepping, Hurry, Hurrying>(
    name: &'static str,
    stopping: CancellationToken,
    hurry: Hurry,
    step: Step,
) where
    Step: Fn() -> Stepping,
    Stepping: Future<Output = sqlx::Result<Then>> + Send + 'static,
    Hurry: Fn() -> Hurrying,
    Hurrying: Future<Output = ()>,
{
    while !stopping.is_cancelled() {
        let started = Instant::now();
        let stepped = tokio::spawn(step()).await;
        histogram!(telemetry::LOOP_SECONDS, "loop" => name).record(started.elapsed().as_secs_f64());
        let sleep = match stepped {
            Ok(Ok(Then::GoOn)) => continue,
            Ok(Ok(Then::Sleep(sleep))) => sleep,
            Ok(Err(error)) => {
                counter!(telemetry::LOOP_ERRORS, "loop" => name).increment(1);
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, loop.name = name, "a background step failed");
                FAILURE_PAUSE
            }
            Err(panic) => {
                counter!(telemetry::PANICS).increment(1);
                let error = &panic as &dyn std::error::Error;
                tracing::error!(error, loop.name = name, "a background step panicked");
                FAILURE_PAUSE
            }
        };
        tokio::select! {
            () = stopping.cancelled() => (),
            () = tokio::time::sleep(sleep) => (),
            () = hurry() => (),
        }
    }
}
