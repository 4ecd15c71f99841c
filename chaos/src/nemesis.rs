//! Faults, as a seed says: one after the other, and now and then two at a time.

use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use tokio::time::sleep;

use crate::{
    foreign::Foreign,
    history::{Event, History},
    stage::{NODES, Stage},
};

/// The pause between two faults, in milliseconds.
const PAUSE_MS: std::ops::Range<u64> = 300..2_500;
/// How long a fault lasts, in milliseconds.
const LASTS_MS: std::ops::Range<u64> = 200..3_500;
/// How long a node is frozen: leases last for two seconds.
const FROZEN_MS: std::ops::Range<u64> = 200..8_000;
/// How long a node is frozen that others count as gone.
const GONE_MS: std::ops::Range<u64> = 16_000..20_000;
/// Of a hundred frozen nodes, those that others count as gone.
const GONE_PERCENT: u32 = 10;
/// How long a node's clock is wrong.
const CLOCK_WRONG_MS: std::ops::Range<u64> = 4_000..10_000;
/// Of a hundred faults, those that meet a second one.
const DOUBLE_PERCENT: u32 = 15;
/// How much later answers of a slow database come, in milliseconds.
const SLOW_MS: std::ops::Range<u64> = 20..200;
/// Seconds by which a clock is wrong, at most.
const CLOCK_OFF_SECONDS: i64 = 3_600;
/// Answers of PostgreSQL that are lost while a connection is bad, of ten thousand.
const LOST_ANSWERS: u32 = 200;
/// Connections that are tried to take; PostgreSQL has three hundred.
const MAX_CONNECTIONS: usize = 400;

/// What can be done to the servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// A node is killed, and started again.
    NodeKilled,
    /// A node is stopped in order, as a deploy does.
    NodeStopped,
    /// A node is frozen: often for longer than leases last, and now and then until others count it
    /// as gone.
    NodeFrozen,
    /// A node is started again with a clock that is up to an hour wrong, and then with its own.
    ClockWrong,
    /// PostgreSQL is killed, and recovers.
    PostgresKilled,
    /// All processes of PostgreSQL are frozen: connections stay open and silent.
    PostgresSilent,
    /// PostgreSQL refuses to write, as a standby does.
    PostgresReadOnly,
    /// All other connections of PostgreSQL are taken.
    ConnectionsTaken,
    /// Half of the sessions are ended.
    SessionsEnded,
    /// Answers of PostgreSQL are lost with their connections: commits, too.
    AnswersLost,
    /// Each answer of PostgreSQL comes late.
    PostgresSlow,
    /// The primary freezes, its synchronous standby takes over, and the old primary wakes up.
    Promotion,
    /// Redis is gone for a while, and comes back empty.
    RedisKilled,
    /// Redis is frozen.
    RedisFrozen,
    /// A worker in another language is killed, and started again.
    WorkerKilled,
}

impl Fault {
    /// All, each with its part of a hundred.
    pub const ALL: [(Self, u32); 15] = [
        (Self::NodeKilled, 15),
        (Self::NodeStopped, 9),
        (Self::NodeFrozen, 9),
        (Self::ClockWrong, 5),
        (Self::PostgresKilled, 8),
        (Self::PostgresSilent, 5),
        (Self::PostgresReadOnly, 5),
        (Self::ConnectionsTaken, 5),
        (Self::SessionsEnded, 9),
        (Self::AnswersLost, 6),
        (Self::PostgresSlow, 5),
        (Self::Promotion, 4),
        (Self::RedisKilled, 5),
        (Self::RedisFrozen, 5),
        (Self::WorkerKilled, 5),
    ];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NodeKilled => "node killed",
            Self::NodeStopped => "node stopped",
            Self::NodeFrozen => "node frozen",
            Self::ClockWrong => "node's clock wrong",
            Self::PostgresKilled => "PostgreSQL killed",
            Self::PostgresSilent => "PostgreSQL silent",
            Self::PostgresReadOnly => "PostgreSQL read-only",
            Self::ConnectionsTaken => "connections taken",
            Self::SessionsEnded => "sessions ended",
            Self::AnswersLost => "answers lost",
            Self::PostgresSlow => "PostgreSQL slow",
            Self::Promotion => "standby promoted",
            Self::RedisKilled => "Redis killed",
            Self::RedisFrozen => "Redis frozen",
            Self::WorkerKilled => "worker killed",
        }
    }

    /// The longest pause without an accepted call that it may cause, in seconds. While a fault
    /// [stops all](Self::stops_all), no call is expected to be accepted.
    #[must_use]
    pub const fn bound_seconds(self) -> u64 {
        match self {
            Self::NodeKilled | Self::NodeStopped | Self::NodeFrozen | Self::ClockWrong => 2,
            Self::RedisKilled | Self::RedisFrozen | Self::WorkerKilled => 1,
            Self::Promotion => 15,
            _ => 10,
        }
    }

    /// Whether no call can be expected to succeed while it lasts.
    #[must_use]
    pub const fn stops_all(self) -> bool {
        matches!(
            self,
            Self::PostgresKilled
                | Self::PostgresSilent
                | Self::PostgresReadOnly
                | Self::ConnectionsTaken
                | Self::Promotion
        )
    }

    /// Whether it is done once it has begun.
    const fn is_instant(self) -> bool {
        matches!(self, Self::SessionsEnded | Self::Promotion | Self::WorkerKilled)
    }

    /// What it is done to: two faults of one target would heal each other.
    const fn target(self, node: usize) -> Target {
        match self {
            Self::NodeKilled | Self::NodeStopped | Self::NodeFrozen | Self::ClockWrong => {
                Target::Node(node)
            }
            Self::RedisKilled | Self::RedisFrozen => Target::Redis,
            Self::WorkerKilled => Target::Worker,
            _ => Target::Postgres,
        }
    }

    fn lasts(self, rng: &mut StdRng) -> Duration {
        let range = match self {
            Self::NodeFrozen if rng.random_range(0..100) < GONE_PERCENT => GONE_MS,
            Self::NodeFrozen => FROZEN_MS,
            Self::ClockWrong => CLOCK_WRONG_MS,
            _ => LASTS_MS,
        };
        Duration::from_millis(rng.random_range(range))
    }

    fn next(rng: &mut StdRng) -> Self {
        let drawn = Self::ALL.choose_weighted(rng, |it| it.1).map_or(Self::NodeKilled, |it| it.0);
        if drawn == Self::ClockWrong && Stage::faketime().is_none() {
            return Self::NodeKilled;
        }
        drawn
    }
}

/// What a fault is done to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Node(usize),
    Postgres,
    Redis,
    Worker,
}

/// A fault that has begun.
struct Begun {
    fault: Fault,
    node: usize,
    connections: Vec<PgConnection>,
}

/// Injects faults for this long, and heals everything. To be called from the main thread.
///
/// # Errors
/// When something does not start again.
pub async fn inject(
    (stage, foreign): (&mut Stage, &mut Foreign),
    history: &History,
    seed: u64,
    during: Duration,
) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    let begun = Instant::now();
    while begun.elapsed() < during {
        sleep(Duration::from_millis(rng.random_range(PAUSE_MS))).await;
        let mut faults = vec![(Fault::next(&mut rng), rng.random_range(0..NODES))];
        if rng.random_range(0..100) < DOUBLE_PERCENT {
            let (second, node) = (Fault::next(&mut rng), rng.random_range(0..NODES));
            if second.target(node) != faults[0].0.target(faults[0].1) {
                faults.push((second, node));
            }
        }
        let lasts = faults.iter().map(|it| it.0.lasts(&mut rng)).max().unwrap_or_default();
        let how = How {
            clock_off: rng.random_range(-CLOCK_OFF_SECONDS..=CLOCK_OFF_SECONDS),
            slow: Duration::from_millis(rng.random_range(SLOW_MS)),
            worker: rng.random_range(0..usize::MAX),
        };
        let mut open = Vec::new();
        for (fault, node) in faults {
            history.note(Event::Fault { fault });
            open.push(begin(stage, foreign, history, (fault, node), how).await?);
            if fault.is_instant() {
                history.note(Event::Healed { fault });
            }
        }
        sleep(lasts).await;
        while let Some(it) = open.pop() {
            let fault = it.fault;
            end(stage, history, it).await?;
            if !fault.is_instant() {
                history.note(Event::Healed { fault });
            }
        }
        stage.database.restore_standby().await?;
    }
    for node in stage.dead_nodes() {
        strange(history, &format!("node {node} ended by itself"));
    }
    stage.until_ready().await
}

/// What a seed says of a fault beside its kind.
#[derive(Clone, Copy)]
struct How {
    clock_off: i64,
    slow: Duration,
    worker: usize,
}

async fn begin(
    stage: &mut Stage,
    foreign: &mut Foreign,
    history: &History,
    (fault, node): (Fault, usize),
    how: How,
) -> anyhow::Result<Begun> {
    let mut connections = Vec::new();
    match fault {
        Fault::NodeKilled => kill_node(stage, history, node),
        Fault::ClockWrong => {
            kill_node(stage, history, node);
            stage.start_node(node, Some(how.clock_off))?;
        }
        Fault::NodeStopped => {
            if !stage.stop_node(node).await {
                strange(history, "a node did not stop well");
            }
        }
        Fault::NodeFrozen => stage.freeze_node(node, true),
        Fault::PostgresKilled => stage.database.kill().await?,
        Fault::PostgresSilent => stage.database.freeze(true)?,
        Fault::PostgresReadOnly => stage.database.set_read_only(true).await?,
        Fault::ConnectionsTaken => {
            connections = stage.database.take_connections(MAX_CONNECTIONS).await;
        }
        Fault::SessionsEnded => stage.database.end_sessions().await,
        Fault::AnswersLost => stage.database.proxy.lose_answers(LOST_ANSWERS),
        Fault::PostgresSlow => stage.database.proxy.delay(how.slow),
        Fault::Promotion => stage.database.promote().await?,
        Fault::RedisKilled => stage.set_redis(false)?,
        Fault::RedisFrozen => stage.freeze_redis(true),
        Fault::WorkerKilled => foreign.kill_one(how.worker).await?,
    }
    Ok(Begun { fault, node, connections })
}

async fn end(stage: &mut Stage, history: &History, begun: Begun) -> anyhow::Result<()> {
    let Begun { fault, node, connections } = begun;
    match fault {
        Fault::NodeKilled | Fault::NodeStopped => stage.start_node(node, None)?,
        Fault::ClockWrong => {
            kill_node(stage, history, node);
            stage.start_node(node, None)?;
        }
        Fault::NodeFrozen => stage.freeze_node(node, false),
        Fault::PostgresKilled => stage.database.start_again()?,
        Fault::PostgresSilent => stage.database.freeze(false)?,
        Fault::PostgresReadOnly => stage.database.set_read_only(false).await?,
        Fault::ConnectionsTaken => drop(connections),
        Fault::AnswersLost => stage.database.proxy.lose_answers(0),
        Fault::PostgresSlow => stage.database.proxy.delay(Duration::ZERO),
        Fault::SessionsEnded | Fault::Promotion | Fault::WorkerKilled => (),
        Fault::RedisKilled => stage.set_redis(true)?,
        Fault::RedisFrozen => stage.freeze_redis(false),
    }
    Ok(())
}

fn kill_node(stage: &mut Stage, history: &History, node: usize) {
    if !stage.kill_node(node) {
        strange(history, "a node ended by itself");
    }
}

fn strange(history: &History, text: &str) {
    let (call, text) = ("node".to_owned(), text.to_owned());
    history.note(Event::Strange { call, status: 0, text });
}
