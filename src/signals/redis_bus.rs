//! Redis: messages between nodes, and shared counters. Redis may be slow, empty or down at any time
//! without loss. Every call has a short budget, and after a failed call Redis is skipped for a
//! while.

mod connection;

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context;
use fencepost_config::RedisPlace;
use fencepost_domain::ids::NodeId;
use futures_util::StreamExt;
use metrics::{counter, gauge};
use redis::{FromRedisValue, RedisResult, ScriptInvocation};
use tokio::{
    sync::watch,
    time::{sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::connection::{RESPONSE_TIMEOUT, Servers};
use crate::telemetry;

/// Default budget of a call, after which the caller continues without Redis.
pub const DEFAULT_BUDGET: Duration = Duration::from_millis(25);
/// After a failed call, Redis is skipped for this long.
pub const BREAK: Duration = Duration::from_secs(2);
/// Channels of hints that are wanted anew within this time are announced by one [`Heard::Joined`].
const JOIN_PAUSE: Duration = Duration::from_millis(100);
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a node sends itself a message over Redis.
const PING_PERIOD: Duration = Duration::from_secs(3);
/// A subscription that receives no message, not even our own ping, for this long is renewed.
const SILENCE: Duration = Duration::from_secs(8);
/// The pause before the next try to subscribe.
const RESUBSCRIBE_PAUSE: Duration = Duration::from_millis(250);

/// A received message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// Subscribed: earlier messages are lost.
    Joined,
    /// A hint for the polls of this node.
    Wake(String),
    /// A credential to remove from the caches.
    Evict(String),
    /// A node has started or stopped.
    Nodes,
}

/// One node's connection to Redis. Cheap to clone.
#[derive(Clone)]
pub struct Bus(Arc<Inner>);

struct Inner {
    node: NodeId,
    prefix: String,
    redis: Option<Servers>,
    budget: Duration,
    origin: Instant,
    /// Milliseconds after `origin` until which Redis is skipped.
    broken_until: AtomicU64,
    nodes: AtomicU32,
}

impl Bus {
    /// A connection to this Redis; without one, a node on its own. Connects lazily.
    /// `instance` separates its keys from those of others that share the Redis.
    ///
    /// # Errors
    /// When the URL or the certificate cannot be read.
    pub fn new(
        place: Option<&RedisPlace>,
        instance: Uuid,
        budget: Duration,
    ) -> anyhow::Result<Self> {
        let redis = place.map(|it| Servers::open(it, budget)).transpose()?;
        Ok(Self(Arc::new(Inner {
            node: NodeId::generate(),
            prefix: format!("fencepost:{}", instance.simple()),
            redis,
            budget,
            origin: Instant::now(),
            broken_until: AtomicU64::new(0),
            nodes: AtomicU32::new(1),
        })))
    }

    #[must_use]
    pub fn node(&self) -> NodeId {
        self.0.node
    }

    /// Whether Redis is configured.
    #[must_use]
    pub fn has_redis(&self) -> bool {
        self.0.redis.is_some()
    }

    /// Number of running nodes, as far as this one knows; at least 1.
    #[must_use]
    pub fn nodes(&self) -> u32 {
        self.0.nodes.load(Ordering::Relaxed).max(1)
    }

    /// Records the number of running nodes.
    pub fn record_nodes(&self, nodes: u32) {
        self.0.nodes.store(nodes, Ordering::Relaxed);
        gauge!(telemetry::NODES).set(nodes);
    }

    /// A key in Redis that belongs to this instance.
    #[must_use]
    pub fn name(&self, name: &str) -> String {
        format!("{}:{name}", self.0.prefix)
    }

    /// Runs a script. None: Redis is not configured, did not answer within the budget, or is
    /// skipped after such a failure.
    pub async fn invoke<T: FromRedisValue>(&self, script: &ScriptInvocation<'_>) -> Option<T> {
        let redis = self.redis()?;
        let called = async { script.invoke_async(&mut redis.connection().await?).await };
        self.record_result(redis, timeout(self.0.budget, called).await)
    }

    /// Runs a script without a budget, also while Redis is skipped, and returns the error of Redis.
    ///
    /// # Errors
    /// Those of Redis.
    pub async fn invoke_unguarded<T: FromRedisValue>(
        &self,
        script: &ScriptInvocation<'_>,
    ) -> RedisResult<Option<T>> {
        let Some(redis) = &self.0.redis else { return Ok(None) };
        script.invoke_async(&mut redis.connection().await?).await.map(Some)
    }

    /// Publishes a message to all nodes. Returns whether it was sent.
    pub async fn publish(&self, topic: Topic, text: &str) -> bool {
        let Some(redis) = self.redis() else { return false };
        let channel = self.channel(topic);
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(channel).arg(text);
        let publish_timeout = RESPONSE_TIMEOUT.max(self.0.budget);
        let called = async { publish.query_async::<i64>(&mut redis.connection().await?).await };
        self.record_result(redis, timeout(publish_timeout, called).await).is_some()
    }

    /// Redis, unless it is skipped.
    fn redis(&self) -> Option<&Servers> {
        let redis = self.0.redis.as_ref()?;
        let now = self.0.origin.elapsed().as_millis() as u64;
        (now >= self.0.broken_until.load(Ordering::Relaxed)).then_some(redis)
    }

    fn record_result<T, E>(&self, redis: &Servers, called: Result<RedisResult<T>, E>) -> Option<T> {
        let reason = match called {
            Ok(Ok(value)) => {
                gauge!(telemetry::REDIS_BREAKER_OPEN).set(0);
                return Some(value);
            }
            Ok(Err(error)) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "a call to Redis failed");
                "error"
            }
            Err(_) => "slow",
        };
        redis.forget();
        counter!(telemetry::REDIS_FAILURES, "reason" => reason).increment(1);
        gauge!(telemetry::REDIS_BREAKER_OPEN).set(1);
        let until = self.0.origin.elapsed() + BREAK;
        self.0.broken_until.store(until.as_millis() as u64, Ordering::Relaxed);
        None
    }

    fn channel(&self, topic: Topic) -> String {
        match topic {
            Topic::Wake(shard) => self.name(&format!("wake:{shard}")),
            Topic::WakeAll => self.name("wake:all"),
            Topic::Evict => self.name("forget"),
            Topic::Nodes => self.name("nodes"),
            Topic::Ping => self.name(&format!("ping:{}", self.0.node)),
        }
    }

    /// Subscribes until `stop`, to hints in the wanted shards and to all other topics, and calls
    /// `on` with each message. A silent or broken subscription is renewed.
    pub async fn listen(
        &self,
        stop: CancellationToken,
        mut wanted: watch::Receiver<BTreeSet<u32>>,
        on: impl Fn(Heard) + Sync,
    ) {
        let Some(redis) = &self.0.redis else { return };
        while !stop.is_cancelled() {
            let ended = tokio::select! {
                () = stop.cancelled() => return,
                ended = self.subscribe(redis, &mut wanted, &on) => ended,
            };
            gauge!(telemetry::REDIS_SUBSCRIBED).set(0);
            if let Err(error) = ended {
                counter!(telemetry::REDIS_FAILURES, "reason" => "subscription").increment(1);
                tracing::debug!(error = &*error.to_string(), "the subscription to Redis ended");
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(RESUBSCRIBE_PAUSE) => (),
            }
        }
    }

    async fn subscribe(
        &self,
        redis: &Servers,
        wanted: &mut watch::Receiver<BTreeSet<u32>>,
        on: &(impl Fn(Heard) + Sync),
    ) -> anyhow::Result<()> {
        let pubsub = timeout(SUBSCRIBE_TIMEOUT, redis.pubsub()).await??;
        let (mut subscription, mut messages) = pubsub.split();
        let (evict, ping) = (self.channel(Topic::Evict), self.channel(Topic::Ping));
        let (nodes, all) = (self.channel(Topic::Nodes), self.channel(Topic::WakeAll));
        let mut shards = wanted.borrow_and_update().clone();
        let mut channels = self.wake_channels(&shards);
        channels.extend([&evict, &ping, &nodes, &all].map(String::clone));
        timeout(SUBSCRIBE_TIMEOUT, subscription.subscribe(&channels)).await??;
        gauge!(telemetry::REDIS_SUBSCRIBED).set(1);
        on(Heard::Joined);
        let mut joined_at = None;
        let mut heard_at = Instant::now();
        let mut pings = tokio::time::interval(PING_PERIOD);
        loop {
            let is_joining = joined_at.is_some();
            let joined = sleep_until(joined_at.unwrap_or_else(tokio::time::Instant::now));
            tokio::select! {
                changed = wanted.changed() => {
                    changed?;
                    let now = wanted.borrow_and_update().clone();
                    let new = self.wake_channels(now.difference(&shards));
                    let old = self.wake_channels(shards.difference(&now));
                    shards = now;
                    timeout(SUBSCRIBE_TIMEOUT, subscription.subscribe(&new)).await??;
                    if !old.is_empty() {
                        timeout(SUBSCRIBE_TIMEOUT, subscription.unsubscribe(&old)).await??;
                    }
                    joined_at = joined_at.or(Some(tokio::time::Instant::now() + JOIN_PAUSE));
                }
                () = joined, if is_joining => {
                    joined_at = None;
                    on(Heard::Joined);
                }
                message = messages.next() => {
                    let message = message.context("the connection was closed")?;
                    heard_at = Instant::now();
                    let text: String = message.get_payload().unwrap_or_default();
                    match message.get_channel_name() {
                        name if name == ping => (),
                        name if name == evict => on(Heard::Evict(text)),
                        name if name == nodes => on(Heard::Nodes),
                        _ => on(Heard::Wake(text)),
                    }
                }
                _ = pings.tick() => {
                    anyhow::ensure!(heard_at.elapsed() < SILENCE, "no messages arrive any more");
                    self.publish(Topic::Ping, "").await;
                }
            }
        }
    }

    fn wake_channels<'a>(&self, shards: impl IntoIterator<Item = &'a u32>) -> Vec<String> {
        shards.into_iter().map(|it| self.channel(Topic::Wake(*it))).collect()
    }

    /// Sends itself a message over new connections.
    async fn ping_itself(&self, redis: &Servers) -> anyhow::Result<()> {
        let mut pubsub = timeout(SUBSCRIBE_TIMEOUT, redis.pubsub()).await??;
        let channel = self.channel(Topic::Ping);
        timeout(SUBSCRIBE_TIMEOUT, pubsub.subscribe(&channel)).await??;
        let unused = self.channel(Topic::WakeAll);
        timeout(SUBSCRIBE_TIMEOUT, pubsub.subscribe(&unused)).await??;
        timeout(SUBSCRIBE_TIMEOUT, pubsub.unsubscribe(&unused)).await??;
        let mut publish = redis::cmd("PUBLISH");
        let mut connection = redis.connection().await?;
        publish.arg(channel).arg("").query_async::<i64>(&mut connection).await?;
        let heard = timeout(SUBSCRIBE_TIMEOUT, pubsub.on_message().next()).await;
        heard.context("none arrived")?.context("the connection was closed")?;
        Ok(())
    }

    /// Facts about Redis, for `fencepost check`, after a message to itself.
    ///
    /// # Errors
    /// When it does not answer, or refuses messages.
    pub async fn inspect(&self) -> anyhow::Result<Option<Facts>> {
        let Some(redis) = &self.0.redis else { return Ok(None) };
        let info = redis.info().await.context("Redis does not answer")?;
        let value = |name: &str| {
            let line = info.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap_or_default().trim().to_owned()
        };
        self.ping_itself(redis).await.context("messages are refused")?;
        Ok(Some(Facts {
            version: value("redis_version"),
            maxmemory_policy: value("maxmemory_policy"),
        }))
    }
}

/// Facts about Redis.
#[derive(Debug, Clone)]
pub struct Facts {
    pub version: String,
    /// Its policy when memory is full.
    pub maxmemory_policy: String,
}

/// The recipients of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Topic {
    /// Nodes with parked polls in this shard.
    Wake(u32),
    /// Nodes with parked polls.
    WakeAll,
    Evict,
    Nodes,
    Ping,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_node_without_redis_is_on_its_own_and_never_waits() {
        let bus = Bus::new(None, Uuid::nil(), DEFAULT_BUDGET).expect("a bus");
        assert!(!bus.publish(Topic::Evict, "x").await);
        assert_eq!(bus.nodes(), 1);
        let (_, wanted) = watch::channel(BTreeSet::new());
        bus.listen(CancellationToken::new(), wanted, |_| unreachable!("no message is sent")).await;
    }

    #[tokio::test]
    async fn a_redis_that_is_not_there_costs_one_call_and_then_nothing() {
        let place = RedisPlace::from("redis://127.0.0.1:1".to_owned());
        let bus = Bus::new(Some(&place), Uuid::nil(), DEFAULT_BUDGET).expect("a bus");
        assert!(!bus.publish(Topic::Evict, "x").await);
        let broken_until = bus.0.broken_until.load(Ordering::Relaxed);
        assert!(broken_until > 0 && bus.redis().is_none());
        assert!(!bus.publish(Topic::Evict, "x").await);
        assert_eq!(bus.0.broken_until.load(Ordering::Relaxed), broken_until, "no call was made");
    }

    #[tokio::test]
    async fn a_bad_url_is_reported_without_its_password() {
        let urls = [
            "nonsense://user:canary@x",
            "redis+sentinel://user:canary@x",
            "redis+sentinel://user:canary@x/name/many",
            "redis+cluster://user:canary@x:port",
        ];
        for url in urls {
            let place = RedisPlace::from(url.to_owned());
            let error =
                Bus::new(Some(&place), Uuid::nil(), DEFAULT_BUDGET).err().expect("an error");
            assert!(!format!("{error:#}").contains("canary"), "{error:#}");
        }
    }
}
