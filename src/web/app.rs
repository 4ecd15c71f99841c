//! What requests share: the engine, accounts, credentials, and the secrets of this instance.

use std::{ops::Deref, sync::Arc};

use fencepost_domain::{
    limits::MAX_STREAMS,
    plan::{Newcomers, ProjectPlans},
    zones::Release,
};
use fencepost_engine::Engine;
use fencepost_net::outbound::Outbound;
use fencepost_signals::{redis_bus::Bus, wakeups::BackgroundTask};
use fencepost_store as store;
use tokio::sync::Semaphore;

use fencepost_identity::{
    accounts::Accounts,
    credentials::{Credentials, LocalPermits, UsedKeys, bodies::Bodies},
};

/// The handles of one node. Cheap to clone.
#[derive(Clone)]
pub struct App(Arc<Handles>);

pub struct Handles {
    pub engine: Engine,
    pub accounts: Accounts,
    pub plans: Arc<ProjectPlans>,
    pub bus: Bus,
    pub cursor_key: Vec<u8>,
    pub streams: Arc<Semaphore>,
    pub credentials: Arc<Credentials>,
    pub used_keys: UsedKeys,
    pub local_permits: LocalPermits,
    pub bodies: Bodies,
    pub outbound: Outbound,
}

impl Deref for App {
    type Target = Handles;

    fn deref(&self) -> &Handles {
        &self.0
    }
}

impl App {
    /// Puts the handles together.
    #[must_use]
    pub fn new(
        engine: Engine,
        accounts: Accounts,
        (bus, outbound): (Bus, Outbound),
        cursor_key: Vec<u8>,
    ) -> Self {
        let pool = engine.pools.keys.clone();
        let newcomers = Newcomers {
            plan: accounts.default_plan.clone(),
            must_verify: accounts.mailer.reaches_others(),
        };
        let plans = Arc::new(ProjectPlans { plans: accounts.plans.clone(), newcomers });
        Self(Arc::new(Handles {
            credentials: Arc::new(Credentials::new(pool, Arc::clone(&plans), bus.clone())),
            engine,
            accounts,
            plans,
            bus,
            cursor_key,
            streams: Arc::new(Semaphore::new(MAX_STREAMS)),
            used_keys: UsedKeys::default(),
            local_permits: LocalPermits::default(),
            bodies: Bodies::default(),
            outbound,
        }))
    }

    /// Records that this node is running, counts the running nodes, and agrees with them on the
    /// rules of time zones.
    pub async fn count_nodes(&self) -> sqlx::Result<()> {
        let mut conn = self.engine.pools.background.acquire().await?;
        let zones = &self.engine.zones;
        let (node, newest) = ((self.bus.node(), env!("CARGO_PKG_VERSION")), zones.newest());
        let delivers = self.outbound.delivers;
        let nodes = store::connection::nodes::beat(&mut conn, node, &newest, delivers).await?;
        drop(conn);
        self.bus.record_nodes(u32::try_from(nodes.count).unwrap_or(1));
        if Release::parse(&nodes.zone_rules).is_some_and(|it| zones.agree(it)) {
            self.engine.notifier.wake.ask(BackgroundTask::Plan);
        }
        Ok(())
    }
}
