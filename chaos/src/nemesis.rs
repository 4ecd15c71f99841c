//! Faults, one after the other, as a seed says.

use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use sqlx::Connection;
use tokio::time::sleep;

use crate::{
    history::{Event, History},
    stage::{NODES, Stage},
};

/// The pause between two faults, in milliseconds.
const PAUSE_MS: std::ops::Range<u64> = 300..2_500;

/// What can be done to the servers. The number is that of the fault plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// A node is killed, and started again.
    KillNode,
    /// A node is stopped in order, as a deploy does.
    StopNode,
    /// A node is frozen for longer than leases last.
    FreezeNode,
    /// PostgreSQL is killed, and recovers.
    CrashPostgres,
    /// Connections of the nodes are cut.
    CutConnections,
    /// Redis is gone for a while, and comes back empty.
    KillRedis,
}

impl Fault {
    const fn name(self) -> &'static str {
        match self {
            Self::KillNode => "node killed",
            Self::StopNode => "node stopped",
            Self::FreezeNode => "node frozen",
            Self::CrashPostgres => "PostgreSQL killed",
            Self::CutConnections => "connections cut",
            Self::KillRedis => "Redis killed",
        }
    }

    fn next(rng: &mut StdRng) -> Self {
        match rng.random_range(0..100) {
            0..25 => Self::KillNode,
            25..40 => Self::StopNode,
            40..55 => Self::FreezeNode,
            55..65 => Self::CrashPostgres,
            65..85 => Self::CutConnections,
            _ => Self::KillRedis,
        }
    }
}

/// Does harm for this long, and heals everything. To be called from the main thread.
///
/// # Errors
/// When something does not start again.
pub async fn harm(
    stage: &mut Stage,
    history: &History,
    seed: u64,
    during: Duration,
) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    let begun = Instant::now();
    while begun.elapsed() < during {
        sleep(Duration::from_millis(rng.random_range(PAUSE_MS))).await;
        let (fault, node) = (Fault::next(&mut rng), rng.random_range(0..NODES));
        history.note(Event::Fault { kind: fault.name().to_owned() });
        let lasts = Duration::from_millis(rng.random_range(200..3_500));
        match fault {
            Fault::KillNode => {
                if !stage.kill_node(node) {
                    strange(history, "a node ended by itself");
                }
                sleep(lasts).await;
                stage.start_node(node)?;
            }
            Fault::StopNode => {
                if !stage.stop_node(node) {
                    strange(history, "a node did not stop");
                }
                sleep(lasts).await;
                stage.start_node(node)?;
            }
            Fault::FreezeNode => {
                stage.freeze_node(node, true);
                sleep(lasts).await;
                stage.freeze_node(node, false);
            }
            Fault::CrashPostgres => stage.crash_postgres()?,
            Fault::CutConnections => cut_connections(stage).await,
            Fault::KillRedis => {
                stage.set_redis(false)?;
                sleep(lasts).await;
                stage.set_redis(true)?;
            }
        }
    }
    stage.until_ready().await
}

fn strange(history: &History, text: &str) {
    let (call, text) = ("node".to_owned(), text.to_owned());
    history.note(Event::Strange { call, status: 0, text });
}

/// Each second one of them.
async fn cut_connections(stage: &Stage) {
    let sql = "select pg_terminate_backend(pid) from pg_stat_activity
               where pid <> pg_backend_pid() and backend_type = 'client backend' and pid % 2 = 0";
    let Ok(mut conn) = stage.connect().await else { return };
    let _ = sqlx::query(sql).execute(&mut conn).await;
    let _ = conn.close().await;
}
