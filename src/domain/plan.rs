//! Plans: how much of everything a project may have. They are data, in `ops/plans.toml`; limits
//! that a plan does not set are bounded by [`super::limits`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::limits;
use crate::ids::ProjectId;

/// The mode of test projects; that of the others is `live`.
pub const TEST_MODE: &str = "test";

/// The plans that this binary was built with.
pub const BUILT_IN: &str = include_str!("../../ops/plans.toml");
/// A plan's rates and bytes are divided by this until an owner has verified an e-mail address.
pub const UNVERIFIED_DIVISOR: u32 = 10;
/// The plan without limits.
pub const UNLIMITED: &str = "unlimited";

/// Declares the limits: name and type. Some have a getter, which returns the plan's value or the
/// code's own maximum, whichever is less.
macro_rules! limits_table {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident: $number:ty $(, $bounded:ident: at most $bound:path)?;
    )*) => {
        /// The names of all limits.
        pub const ALL_NAMES: &[&str] = &[$(stringify!($name)),*];

        /// The limits of a plan, or overrides of them. Absent: not limited here.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Limits {
            $(
                $(#[doc = $doc])+
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $name: Option<$number>,
            )*
        }

        impl Limits {
            /// These limits, with missing ones taken from `fallback`.
            #[must_use]
            pub fn or(self, fallback: Self) -> Self {
                Self { $($name: self.$name.or(fallback.$name)),* }
            }

            $($(
                #[doc = concat!("`", stringify!($name), "`, at most the code's own maximum.")]
                #[must_use]
                pub fn $bounded(&self) -> $number {
                    bounded(self.$name, $bound)
                }
            )?)*
        }
    };
}

limits_table! {
    /// Jobs per minute that may be enqueued.
    produce_per_minute: u32;
    /// Polls, heartbeats, acks and events per minute.
    work_per_minute: u32;
    /// All other calls per minute.
    manage_per_minute: u32;
    /// Bytes of request bodies above 4 KiB per minute.
    bytes_per_minute: u64;
    /// Parked polls.
    parked_polls: u32;
    /// Parked polls of one key.
    parked_polls_per_key: u32;
    /// Event streams that one node serves at a time.
    streams: u32, max_streams: at most limits::MAX_PROJECT_STREAMS;
    /// Jobs that wait or run.
    waiting_jobs: i64;
    /// Bytes of jobs and of deliveries of webhooks, with all that belongs to them; each counts as
    /// at least 1 KiB.
    stored_bytes: i64;
    /// Queues.
    queues: i64, max_queues: at most limits::MAX_PROJECT_QUEUES;
    /// Workers that are known. Those that have been silent for longest make room for others.
    workers: i64;
    /// Recurring schedules.
    schedules: i64, max_schedules: at most limits::MAX_SCHEDULES;
    /// Shortest period of a recurring schedule, in seconds.
    min_schedule_period_seconds: u32;
    /// Batches that have not completed.
    open_batches: i64, max_open_batches: at most limits::MAX_OPEN_BATCHES;
    /// Endpoints of webhooks.
    endpoints: i64, max_endpoints: at most limits::MAX_ENDPOINTS;
    /// Queues that are pushed.
    pushed_queues: i64, max_pushed_queues: at most limits::MAX_PROJECT_PUSHED_QUEUES;
    /// Requests of pushes that one node sends at a time.
    push_in_flight: u32, max_push_in_flight: at most limits::MAX_PROJECT_PUSH_IN_FLIGHT;
    /// Deliveries of webhooks per minute. Further events are not sent, and counted.
    deliveries_per_minute: u32;
    /// Bytes of a job's payload.
    payload_bytes: usize, max_payload_bytes: at most limits::MAX_PAYLOAD_BYTES;
    /// Days for which a queue may keep its finished jobs.
    retention_days: i32, max_retention_days: at most limits::MAX_RETENTION_DAYS;
    /// Days after which dead letters are deleted.
    dead_letter_days: i32;
    /// Keys that are neither revoked nor expired.
    keys: i64, max_keys: at most limits::MAX_LIVE_KEYS;
    /// Members and open invitations.
    members: i64, max_members: at most limits::MAX_MEMBERS;
    /// Projects that one account may own, if this is the plan of new projects.
    projects: i64, max_projects: at most limits::MAX_OWNED_PROJECTS;
}

/// A project, and the limits of its plan.
#[derive(Debug, Clone, Copy)]
pub struct Tenant {
    /// The project.
    pub project_id: ProjectId,
    /// Limits of the project.
    pub limits: Limits,
}

impl Limits {
    /// These limits while no owner of the project has verified an address: a tenth of all rates and
    /// bytes.
    #[must_use]
    pub fn unverified(self) -> Self {
        let tenth = |it: Option<u32>| it.map(|it| (it / UNVERIFIED_DIVISOR).max(1));
        Self {
            produce_per_minute: tenth(self.produce_per_minute),
            work_per_minute: tenth(self.work_per_minute),
            manage_per_minute: tenth(self.manage_per_minute),
            deliveries_per_minute: tenth(self.deliveries_per_minute),
            bytes_per_minute: self
                .bytes_per_minute
                .map(|it| (it / u64::from(UNVERIFIED_DIVISOR)).max(1)),
            stored_bytes: self.stored_bytes.map(|it| (it / i64::from(UNVERIFIED_DIVISOR)).max(1)),
            ..self
        }
    }

    /// Known workers, bounded.
    #[must_use]
    pub fn max_workers(&self) -> i64 {
        bounded(self.workers, limits::MAX_PROJECT_WORKERS).max(limits::MIN_PROJECT_WORKERS)
    }

    /// Shortest period of a recurring schedule, in seconds.
    #[must_use]
    pub fn min_schedule_period(&self) -> chrono::TimeDelta {
        let seconds =
            self.min_schedule_period_seconds.unwrap_or(limits::MIN_SCHEDULE_PERIOD_SECONDS);
        chrono::TimeDelta::seconds(seconds.max(limits::MIN_SCHEDULE_PERIOD_SECONDS).into())
    }
}

fn bounded<T: Ord>(limit: Option<T>, bound: T) -> T {
    match limit {
        Some(limit) => limit.min(bound),
        None => bound,
    }
}

/// All plans by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plans(BTreeMap<String, Limits>);

/// The plans file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InvalidPlans {
    /// It is not TOML of this shape.
    #[error("the plans cannot be read: {0}")]
    Unreadable(#[from] toml::de::Error),
    /// A limit of 0 refuses everything.
    #[error("plan `{0}`: every limit must be at least 1")]
    Zero(String),
}

impl Plans {
    /// Reads a plans file like `ops/plans.toml`. The plan `unlimited` always exists.
    ///
    /// # Errors
    /// [`InvalidPlans`] says what is wrong.
    pub fn parse(text: &str) -> Result<Self, InvalidPlans> {
        let mut plans: BTreeMap<String, Limits> = toml::from_str(text)?;
        plans.insert(UNLIMITED.to_owned(), Limits::default());
        match plans.iter().find(|(_, limits)| has_zero(limits)) {
            Some((name, _)) => Err(InvalidPlans::Zero(name.clone())),
            None => Ok(Self(plans)),
        }
    }

    /// The plans that this binary was built with.
    ///
    /// # Panics
    /// When they cannot be read, which a test would have found.
    #[must_use]
    pub fn built_in() -> Self {
        Self::parse(BUILT_IN).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The limits of a plan. An unknown plan counts as the strictest known one: a spelling mistake
    /// must not remove limits.
    #[must_use]
    pub fn limits(&self, plan: &str) -> Limits {
        let strictest =
            || self.0.values().min_by_key(|it| it.produce_per_minute.unwrap_or(u32::MAX));
        self.0.get(plan).or_else(strictest).copied().unwrap_or_default()
    }

    /// The limits of a project on this plan, with overrides. An unknown limit is ignored: a newer
    /// node may have written it.
    #[must_use]
    pub fn of(&self, plan: &str, overrides: Option<&serde_json::Value>) -> Limits {
        let single = overrides.and_then(serde_json::Value::as_object).map(|limits| {
            let known = limits.iter().filter(|(name, _)| ALL_NAMES.contains(&name.as_str()));
            known.map(|(name, value)| (name.clone(), value.clone())).collect()
        });
        let single =
            single.map(serde_json::Value::Object).and_then(|it| serde_json::from_value(it).ok());
        let single: Limits = single.unwrap_or_default();
        single.or(self.limits(plan))
    }

    /// Whether the plan exists.
    #[must_use]
    pub fn has(&self, plan: &str) -> bool {
        self.0.contains_key(plan)
    }

    /// The plans' names.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }
}

/// The plan of new projects, and whether its projects have less until an owner has verified an
/// address.
#[derive(Debug, Clone)]
pub struct Newcomers {
    /// The plan of new projects.
    pub plan: String,
    /// Where no mail reaches others, no address can be verified.
    pub must_verify: bool,
}

/// The plans, and the rule for new projects.
#[derive(Debug, Clone)]
pub struct ProjectPlans {
    /// All plans.
    pub plans: Plans,
    /// The rule for new projects.
    pub newcomers: Newcomers,
}

impl ProjectPlans {
    /// The limits of a project on this plan, with overrides. `is_verified`: an owner has verified
    /// an address.
    #[must_use]
    pub fn limits(
        &self,
        plan: &str,
        overrides: Option<&serde_json::Value>,
        is_verified: bool,
    ) -> Limits {
        let limits = self.plans.of(plan, overrides);
        match self.needs_verification(plan) && !is_verified {
            true => limits.unverified(),
            false => limits,
        }
    }

    /// The limits that loops keep to. A plan that this node does not know has none here: it counts
    /// as the strictest for callers, but work that was accepted must not be held up or dropped.
    #[must_use]
    pub fn limits_of_loops(
        &self,
        plan: &str,
        overrides: Option<&serde_json::Value>,
        is_verified: bool,
    ) -> Limits {
        match self.plans.has(plan) {
            true => self.limits(plan, overrides, is_verified),
            false => Limits::default(),
        }
    }

    /// True if the limits of projects on this plan depend on an owner's verified address.
    #[must_use]
    pub fn needs_verification(&self, plan: &str) -> bool {
        self.newcomers.must_verify && plan == self.newcomers.plan
    }
}

/// Whether a limit is 0 or less.
#[must_use]
pub fn has_zero(limits: &Limits) -> bool {
    let value = serde_json::to_value(limits).unwrap_or_default();
    let mut numbers = value.as_object().into_iter().flat_map(serde_json::Map::values);
    numbers.any(|it| it.as_i64().is_none_or(|it| it < 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_plans_grow_from_free_to_business() {
        let plans = Plans::built_in();
        assert_eq!(plans.names(), ["business", "free", "pro", "unlimited"]);
        let (free, pro, business) =
            (plans.limits("free"), plans.limits("pro"), plans.limits("business"));
        assert_eq!(free.produce_per_minute, Some(3_000));
        assert_eq!(free.work_per_minute, Some(15_000));
        assert_eq!(free.manage_per_minute, Some(120));
        assert_eq!(free.waiting_jobs, Some(10_000));
        assert_eq!(free.parked_polls, Some(50));
        assert_eq!(free.retention_days, Some(7));
        assert_eq!(free.unverified().produce_per_minute, Some(300));
        assert_eq!(free.unverified().stored_bytes, free.stored_bytes.map(|it| it / 10));
        assert_eq!(free.unverified().waiting_jobs, free.waiting_jobs);
        for (plan, factor) in [(pro, 20), (business, 200)] {
            assert_eq!(plan.produce_per_minute, Some(3_000 * factor));
            assert_eq!(plan.work_per_minute, Some(15_000 * factor));
            assert_eq!(plan.manage_per_minute, Some(120 * factor));
            assert_eq!(plan.waiting_jobs, Some(10_000 * i64::from(factor)));
        }
        assert_eq!(plans.limits(UNLIMITED), Limits::default());
    }

    #[test]
    fn an_unknown_plan_is_the_strictest() {
        let plans = Plans::built_in();
        assert_eq!(plans.limits("fre"), plans.limits("free"));
    }

    #[test]
    fn single_limits_can_be_replaced() {
        let free = Plans::built_in().limits("free");
        let more = Limits { waiting_jobs: Some(50_000), ..Limits::default() }.or(free);
        assert_eq!(more.waiting_jobs, Some(50_000));
        assert_eq!(more.produce_per_minute, free.produce_per_minute);
    }

    #[test]
    fn plan_overrides_with_unknown_fields_keep_the_known_ones() {
        let overrides = serde_json::json!({"keys": 3, "rockets": 7});
        let plans = Plans::built_in();
        assert_eq!(plans.of("free", Some(&overrides)).keys, Some(3));
        assert_eq!(plans.of("free", None), plans.limits("free"));
        let named = serde_json::to_value(plans.limits("free")).expect("JSON");
        let named: Vec<_> = named.as_object().expect("limits").keys().cloned().collect();
        assert_eq!(named.len(), ALL_NAMES.len());
        assert!(ALL_NAMES.iter().all(|it| named.iter().any(|name| name == it)));
    }

    #[test]
    fn a_file_of_plans_with_a_mistake_is_refused() {
        assert!(matches!(Plans::parse("[free]\nproduce = 1"), Err(InvalidPlans::Unreadable(_))));
        let zero = Plans::parse("[free]\nwork_per_minute = 0");
        assert!(matches!(zero, Err(InvalidPlans::Zero(plan)) if plan == "free"));
        assert!(Plans::parse("").is_ok_and(|it| it.has(UNLIMITED)));
    }

    #[test]
    fn what_a_plan_does_not_limit_is_bounded_all_the_same() {
        let none = Limits::default();
        assert_eq!(none.max_schedules(), limits::MAX_SCHEDULES);
        assert_eq!(none.max_keys(), limits::MAX_LIVE_KEYS);
        let much = Limits { keys: Some(i64::MAX), ..none };
        assert_eq!(much.max_keys(), limits::MAX_LIVE_KEYS);
    }
}
