//! Faults, as a seed says: one after the other, and now and then two at a time.

use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use tokio::time::{sleep, sleep_until};

use crate::{
    database::Database,
    foreign::Foreign,
    history::{Event, History},
    stage::{Clock, NODES, Stage},
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
/// How long the member that leads is away, in milliseconds: it may lead for 30 s.
const LEADER_AWAY_MS: std::ops::Range<u64> = 1_000..45_000;
/// How long etcd is away, in milliseconds: after 10 s, the leader steps down.
const ETCD_KILLED_MS: std::ops::Range<u64> = 1_000..15_000;
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
    /// A node is started again with a clock that stands still, and then with its own.
    ClockFrozen,
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
    /// PostgreSQL may write no file beyond its first 64 KiB, its log neither: what a full disk
    /// does, without the right to fill one.
    DiskFull,
    /// Half of the sessions are ended, and new ones get too little memory for their work.
    MemoryShort,
    /// All nodes are stopped in order and started again, one after the other.
    RolledOut,
    /// Redis is gone for a while, and comes back empty.
    RedisKilled,
    /// Redis is frozen.
    RedisFrozen,
    /// A worker in another language is killed, and started again.
    WorkerKilled,
    /// The member that leads is killed, Patroni and PostgreSQL, and started again.
    LeaderKilled,
    /// All processes of the member that leads are frozen, often for longer than it may lead.
    LeaderFrozen,
    /// Patroni is asked to let another member lead.
    SwitchedOver,
    /// etcd is killed: no member can stay or become leader.
    EtcdKilled,
}

impl Fault {
    /// All, each with its part of a hundred: while the run leads PostgreSQL, and under Patroni.
    pub const ALL: [(Self, u32, u32); 23] = [
        (Self::NodeKilled, 13, 13),
        (Self::NodeStopped, 7, 8),
        (Self::NodeFrozen, 9, 10),
        (Self::RolledOut, 2, 2),
        (Self::ClockWrong, 5, 5),
        (Self::ClockFrozen, 2, 2),
        (Self::PostgresKilled, 6, 0),
        (Self::DiskFull, 2, 0),
        (Self::MemoryShort, 2, 0),
        (Self::PostgresSilent, 5, 0),
        (Self::PostgresReadOnly, 5, 0),
        (Self::ConnectionsTaken, 5, 0),
        (Self::SessionsEnded, 7, 0),
        (Self::AnswersLost, 6, 0),
        (Self::PostgresSlow, 5, 0),
        (Self::Promotion, 4, 0),
        (Self::RedisKilled, 5, 5),
        (Self::RedisFrozen, 5, 5),
        (Self::WorkerKilled, 5, 5),
        (Self::LeaderKilled, 0, 18),
        (Self::LeaderFrozen, 0, 9),
        (Self::SwitchedOver, 0, 9),
        (Self::EtcdKilled, 0, 9),
    ];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NodeKilled => "node killed",
            Self::NodeStopped => "node stopped",
            Self::NodeFrozen => "node frozen",
            Self::ClockWrong => "node's clock wrong",
            Self::ClockFrozen => "node's clock frozen",
            Self::PostgresKilled => "PostgreSQL killed",
            Self::PostgresSilent => "PostgreSQL silent",
            Self::PostgresReadOnly => "PostgreSQL read-only",
            Self::ConnectionsTaken => "connections taken",
            Self::SessionsEnded => "sessions ended",
            Self::AnswersLost => "answers lost",
            Self::PostgresSlow => "PostgreSQL slow",
            Self::Promotion => "standby promoted",
            Self::DiskFull => "disk full (no file may grow)",
            Self::MemoryShort => "memory short (limit of sessions)",
            Self::RolledOut => "all nodes restarted in turn",
            Self::RedisKilled => "Redis killed",
            Self::RedisFrozen => "Redis frozen",
            Self::WorkerKilled => "worker killed",
            Self::LeaderKilled => "leader killed (Patroni)",
            Self::LeaderFrozen => "leader frozen (Patroni)",
            Self::SwitchedOver => "switched over (Patroni)",
            Self::EtcdKilled => "etcd killed (Patroni)",
        }
    }

    /// The longest pause without an accepted call that it may cause, in seconds. While a fault
    /// [stops all](Self::stops_all), no call is expected to be accepted.
    #[must_use]
    pub const fn bound_seconds(self) -> u64 {
        match self {
            Self::NodeKilled
            | Self::NodeStopped
            | Self::NodeFrozen
            | Self::ClockWrong
            | Self::ClockFrozen
            | Self::RolledOut => 2,
            Self::RedisKilled | Self::RedisFrozen | Self::WorkerKilled => 1,
            Self::Promotion => 15,
            Self::LeaderKilled | Self::LeaderFrozen | Self::SwitchedOver | Self::EtcdKilled => 40,
            _ => 10,
        }
    }

    /// Whether no call can be expected to succeed while it lasts.
    #[must_use]
    pub const fn stops_all(self) -> bool {
        matches!(
            self,
            Self::PostgresKilled
                | Self::DiskFull
                | Self::PostgresSilent
                | Self::PostgresReadOnly
                | Self::ConnectionsTaken
                | Self::Promotion
        )
    }

    /// Whether it is done once it has begun.
    const fn is_instant(self) -> bool {
        matches!(
            self,
            Self::SessionsEnded
                | Self::Promotion
                | Self::WorkerKilled
                | Self::SwitchedOver
                | Self::RolledOut
        )
    }

    /// What it is done to: two faults of one target would heal each other.
    const fn target(self, node: usize) -> Target {
        match self {
            Self::NodeKilled
            | Self::NodeStopped
            | Self::NodeFrozen
            | Self::ClockWrong
            | Self::ClockFrozen => Target::Node(node),
            Self::RolledOut => Target::All,
            Self::RedisKilled | Self::RedisFrozen => Target::Redis,
            Self::WorkerKilled => Target::Worker,
            _ => Target::Postgres,
        }
    }

    /// Whether it can come at the same time as another one.
    fn can_meet(self, node: usize, (other, its_node): (Self, usize)) -> bool {
        let (one, other) = (self.target(node), other.target(its_node));
        one != other && one != Target::All && other != Target::All
    }

    fn lasts(self, rng: &mut StdRng) -> Duration {
        let range = match self {
            Self::NodeFrozen if rng.random_range(0..100) < GONE_PERCENT => GONE_MS,
            Self::NodeFrozen => FROZEN_MS,
            Self::ClockWrong | Self::ClockFrozen => CLOCK_WRONG_MS,
            Self::LeaderKilled | Self::LeaderFrozen => LEADER_AWAY_MS,
            Self::EtcdKilled => ETCD_KILLED_MS,
            _ => LASTS_MS,
        };
        Duration::from_millis(rng.random_range(range))
    }

    /// Its part of a hundred.
    fn weight(self, under_patroni: bool) -> u32 {
        let weights = Self::ALL.into_iter().find(|it| it.0 == self);
        weights.map_or(0, |it| if under_patroni { it.2 } else { it.1 })
    }

    /// Whether it can come, while Patroni leads PostgreSQL or not.
    #[must_use]
    pub fn is_possible(self, under_patroni: bool) -> bool {
        self.weight(under_patroni) > 0 && (!self.needs_faketime() || Stage::faketime().is_some())
    }

    const fn needs_faketime(self) -> bool {
        matches!(self, Self::ClockWrong | Self::ClockFrozen)
    }

    /// Whether nodes start with the other release after it, if there are two.
    #[must_use]
    pub const fn changes_release(self) -> bool {
        matches!(self, Self::NodeStopped | Self::RolledOut)
    }

    /// The kind of this name, as results have it.
    ///
    /// # Errors
    /// When there is none.
    pub fn of_name(name: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_value(name.into())
    }
}

/// What a fault is done to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    All,
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
    /// The member that led.
    leader: usize,
}

/// Which faults come.
pub struct Faults {
    pub seed: u64,
    pub during: Duration,
    /// Whether Patroni leads PostgreSQL.
    pub under_patroni: bool,
    /// The only ones that come; none: all.
    pub only: Vec<Fault>,
    /// The first one, whatever the seed says.
    pub first: Option<Fault>,
}

impl Faults {
    /// The part of a kind, of a hundred if all come.
    fn weight(&self, fault: Fault) -> u32 {
        match self.only.is_empty() || self.only.contains(&fault) {
            true => fault.weight(self.under_patroni),
            false => 0,
        }
    }

    fn next(&self, rng: &mut StdRng) -> Fault {
        let drawn = Fault::ALL.choose_weighted(rng, |it| self.weight(it.0));
        let drawn = drawn.map_or(Fault::NodeKilled, |it| it.0);
        if drawn.needs_faketime() && Stage::faketime().is_none() {
            return Fault::NodeKilled;
        }
        drawn
    }
}

/// Injects faults, and heals everything. To be called from the main thread.
///
/// # Errors
/// When something does not start again.
pub async fn inject(
    (stage, foreign): (&mut Stage, &mut Foreign),
    history: &History,
    plan: &Faults,
) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(plan.seed);
    let mut first = plan.first;
    let begun = Instant::now();
    while begun.elapsed() < plan.during {
        sleep(Duration::from_millis(rng.random_range(PAUSE_MS))).await;
        let next = |rng: &mut StdRng| (plan.next(rng), rng.random_range(0..NODES));
        let (drawn, node) = next(&mut rng);
        let mut faults = vec![(first.take().unwrap_or(drawn), node)];
        if rng.random_range(0..100) < DOUBLE_PERCENT {
            let (second, node) = next(&mut rng);
            if second.can_meet(node, faults[0]) {
                faults.push((second, node));
            }
        }
        // What takes time to begin comes first: the other one would last for that time, too.
        faults.sort_by_key(|it| !(it.0.is_instant() || it.0 == Fault::NodeStopped));
        let how = How {
            clock_off: rng.random_range(-CLOCK_OFF_SECONDS..=CLOCK_OFF_SECONDS),
            slow: Duration::from_millis(rng.random_range(SLOW_MS)),
            worker: rng.random_range(0..usize::MAX),
        };
        let mut open = Vec::new();
        for (fault, node) in faults {
            let lasts = fault.lasts(&mut rng);
            history.note(Event::Fault { fault });
            let begun = begin(stage, foreign, history, (fault, node), how).await?;
            if fault.is_instant() {
                history.note(Event::Healed { fault });
            }
            open.push((Instant::now() + lasts, begun));
        }
        open.sort_by_key(|it| it.0);
        for (until, it) in open {
            sleep_until(until.into()).await;
            let fault = it.fault;
            end(stage, history, it).await?;
            if !fault.is_instant() {
                history.note(Event::Healed { fault });
            }
        }
        stage.database.until_whole().await?;
    }
    note_dead_nodes(stage, history);
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
    let leader = leader(stage).await;
    match fault {
        Fault::NodeKilled => kill_node(stage, history, node),
        Fault::ClockWrong => {
            kill_node(stage, history, node);
            stage.start_node(node, Some(Clock::Off(how.clock_off)))?;
        }
        Fault::ClockFrozen => {
            kill_node(stage, history, node);
            stage.start_node(node, Some(Clock::Frozen))?;
        }
        Fault::NodeStopped => stop_node(stage, history, node).await,
        Fault::NodeFrozen => stage.freeze_node(node, true),
        Fault::PostgresKilled => stage.database.pair()?.kill().await?,
        Fault::PostgresSilent => stage.database.pair()?.freeze(true)?,
        Fault::PostgresReadOnly => stage.database.pair()?.set_read_only(true).await?,
        Fault::ConnectionsTaken => {
            connections = stage.database.pair()?.take_connections(MAX_CONNECTIONS).await;
        }
        Fault::SessionsEnded => stage.database.pair()?.end_sessions().await,
        Fault::AnswersLost => stage.database.pair()?.proxy.lose_answers(LOST_ANSWERS),
        Fault::PostgresSlow => stage.database.pair()?.proxy.delay(how.slow),
        Fault::Promotion => stage.database.pair()?.promote().await?,
        Fault::DiskFull => stage.database.pair()?.fill_disk()?,
        Fault::MemoryShort => stage.database.pair()?.limit_memory(true).await?,
        Fault::RolledOut => roll_out(stage, history).await?,
        Fault::RedisKilled => stage.set_redis(false)?,
        Fault::RedisFrozen => stage.freeze_redis(true),
        Fault::WorkerKilled => foreign.kill_one(how.worker).await?,
        Fault::LeaderKilled => stage.database.patroni()?.kill_member(leader),
        Fault::LeaderFrozen => stage.database.patroni()?.freeze_member(leader, true)?,
        Fault::SwitchedOver => stage.database.patroni()?.switch_over().await?,
        Fault::EtcdKilled => stage.database.patroni()?.kill_etcd(),
    }
    Ok(Begun { fault, node, connections, leader })
}

async fn end(stage: &mut Stage, history: &History, begun: Begun) -> anyhow::Result<()> {
    let Begun { fault, node, connections, leader } = begun;
    match fault {
        Fault::NodeKilled | Fault::NodeStopped => stage.start_node(node, None)?,
        Fault::ClockWrong | Fault::ClockFrozen => {
            kill_node(stage, history, node);
            stage.start_node(node, None)?;
        }
        Fault::NodeFrozen => stage.freeze_node(node, false),
        Fault::PostgresKilled => stage.database.pair()?.start_again()?,
        Fault::DiskFull => stage.database.pair()?.free_disk().await?,
        Fault::MemoryShort => stage.database.pair()?.limit_memory(false).await?,
        Fault::PostgresSilent => stage.database.pair()?.freeze(false)?,
        Fault::PostgresReadOnly => stage.database.pair()?.set_read_only(false).await?,
        Fault::ConnectionsTaken => drop(connections),
        Fault::AnswersLost => stage.database.pair()?.proxy.lose_answers(0),
        Fault::PostgresSlow => stage.database.pair()?.proxy.delay(Duration::ZERO),
        Fault::SessionsEnded
        | Fault::Promotion
        | Fault::WorkerKilled
        | Fault::SwitchedOver
        | Fault::RolledOut => (),
        Fault::LeaderKilled => stage.database.patroni()?.start_member(leader)?,
        Fault::LeaderFrozen => stage.database.patroni()?.freeze_member(leader, false)?,
        Fault::EtcdKilled => stage.database.patroni()?.start_etcd()?,
        Fault::RedisKilled => stage.set_redis(true)?,
        Fault::RedisFrozen => stage.freeze_redis(false),
    }
    Ok(())
}

/// The member that leads under Patroni.
async fn leader(stage: &Stage) -> usize {
    match &stage.database {
        Database::Pair(_) => 0,
        Database::Patroni(it) => it.leader().await.unwrap_or_default(),
    }
}

/// As a deploy does: the next node is stopped once the one before it can serve.
async fn roll_out(stage: &mut Stage, history: &History) -> anyhow::Result<()> {
    for node in 0..NODES {
        stop_node(stage, history, node).await;
        stage.start_node(node, None)?;
        stage.until_ready().await?;
    }
    Ok(())
}

async fn stop_node(stage: &mut Stage, history: &History, node: usize) {
    if !stage.stop_node(node).await {
        strange(history, "a node did not stop well");
    }
}

fn kill_node(stage: &mut Stage, history: &History, node: usize) {
    if !stage.kill_node(node) {
        strange(history, "a node ended by itself");
    }
}

/// Notes the nodes that have ended by themselves.
pub fn note_dead_nodes(stage: &mut Stage, history: &History) {
    for node in stage.dead_nodes() {
        strange(history, &format!("node {node} ended by itself"));
    }
}

fn strange(history: &History, text: &str) {
    let (call, text) = ("node".to_owned(), text.to_owned());
    history.note(Event::Strange { call, status: 0, text });
}
