//! What runs in the background on every node. A step is one bounded idempotent batch that any
//! number of nodes may run at once, so there is no leader to elect.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use metrics::{counter, histogram};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    engine::{Engine, promote, reap},
    telemetry,
};

/// How often expired leases are looked for: with the time of a pass, they are reaped within 2 s.
const REAP_PERIOD: Duration = Duration::from_millis(1_500);
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
    let reaper = engine.clone();
    tracker.spawn(every("reap", stopping.clone(), never, move || {
        let engine = reaper.clone();
        async move {
            let is_full = reap::pass(&engine).await?;
            Ok(if is_full { Then::GoOn } else { Then::Sleep(REAP_PERIOD) })
        }
    }));
    let (promoter, due) = (engine.clone(), engine.clone());
    let due_time_changed = move || {
        let engine = due.clone();
        async move { engine.wake.due_time_change().await }
    };
    tracker.spawn(every("promote", stopping.clone(), due_time_changed, move || {
        let engine = promoter.clone();
        async move {
            let sleep = promote::pass(&engine).await?;
            Ok(if sleep.is_zero() { Then::GoOn } else { Then::Sleep(sleep) })
        }
    }));
    let vacuumed = engine.clone();
    tracker.spawn(every("vacuum", stopping.clone(), never, move || {
        let engine = vacuumed.clone();
        async move {
            engine.vacuum_if_due().await?;
            Ok(Then::Sleep(VACUUM_PERIOD))
        }
    }));
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
