//! The rules of time zones that this node uses: the newest that all nodes of its deployment know,
//! so that a tick is at the same time whichever node plans it.

use std::sync::{Arc, PoisonError, RwLock};

use fencepost_domain::{
    cron::InvalidSchedule,
    schedule::Schedule,
    zones::{Release, Rules, pick},
};
use fencepost_signals::telemetry;
use metrics::gauge;

/// The copies of the rules that this node has, and the ones that its deployment agreed on.
#[derive(Debug)]
pub struct Zones {
    copies: Vec<Arc<Rules>>,
    agreed: RwLock<Agreed>,
}

/// The rules that this node uses, and the release that the nodes agreed on. They differ while an
/// older node runs whose release this node does not know.
#[derive(Debug, Clone)]
pub struct Agreed {
    pub release: Release,
    rules: Arc<Rules>,
    newest: Arc<Rules>,
}

impl Agreed {
    /// Parses a schedule. A zone that the agreed rules do not have yet follows the newest ones, so
    /// that its schedule does not stop.
    ///
    /// # Errors
    /// [`InvalidSchedule`].
    pub fn schedule(&self, expression: &str, timezone: &str) -> Result<Schedule, InvalidSchedule> {
        match Schedule::parse(expression, timezone, &self.rules) {
            Err(InvalidSchedule::Zone(_)) => Schedule::parse(expression, timezone, &self.newest),
            parsed => parsed,
        }
    }

    /// The rules that this node uses.
    #[must_use]
    pub fn rules(&self) -> &Rules {
        &self.rules
    }
}

impl Zones {
    /// The rules that are compiled in, and those of the host, if it has any.
    #[must_use]
    pub fn new(host: Option<Rules>) -> Self {
        let embedded = Arc::new(Rules::embedded());
        let host = host.map(Arc::new);
        let is_newer = |it: &&Arc<Rules>| it.release() > embedded.release();
        let newest = Arc::clone(host.as_ref().filter(is_newer).unwrap_or(&embedded));
        let copies = host.into_iter().chain([embedded]).collect();
        show(&newest, true);
        let (release, rules) = (newest.release().clone(), Arc::clone(&newest));
        Self { copies, agreed: RwLock::new(Agreed { release, rules, newest }) }
    }

    /// The newest release that this node knows.
    #[must_use]
    pub fn newest(&self) -> Release {
        self.agreed().newest.release().clone()
    }

    /// The rules to use.
    #[must_use]
    pub fn agreed(&self) -> Agreed {
        self.agreed.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Uses the rules that the nodes have agreed on. Returns whether they agree on others than
    /// before.
    pub fn agree(&self, release: Release) -> bool {
        let mut agreed = self.agreed.write().unwrap_or_else(PoisonError::into_inner);
        if agreed.release == release {
            return false;
        }
        let rules = Arc::clone(pick(&self.copies, &release).unwrap_or(&agreed.newest));
        tracing::info!(%release, used = %rules.release(), "the nodes agree on other zone rules");
        show(&agreed.rules, false);
        show(&rules, true);
        (agreed.release, agreed.rules) = (release, rules);
        true
    }
}

/// Shows in the metrics whether rules are used.
fn show(rules: &Rules, is_used: bool) {
    let release = rules.release().to_string();
    gauge!(telemetry::ZONE_RULES, "release" => release).set(if is_used { 1.0 } else { 0.0 });
    if let Some(published) = rules.published().filter(|_| is_used) {
        let published = published.and_time(chrono::NaiveTime::MIN).and_utc().timestamp();
        gauge!(telemetry::ZONE_RULES_PUBLISHED).set(published as f64);
    }
}
