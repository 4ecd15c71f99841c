//! Rate limits: GCRA in Redis, in one round trip for all limits of a call, so that all nodes count
//! together. Without Redis each node counts alone, at its share of the limit. Never decides what
//! the limits are.

use std::{
    net::IpAddr,
    num::NonZeroU32,
    sync::{Arc, LazyLock},
    time::Duration,
};

use governor::{
    Quota, RateLimiter,
    clock::{Clock, DefaultClock},
    middleware::StateInformationMiddleware,
    state::{InMemoryState, NotKeyed},
};
use metrics::counter;
use moka::sync::Cache;
use redis::{RedisResult, Script};

use crate::{
    redis_bus::{BREAK, Bus},
    telemetry,
};

/// Local limits that one node keeps while Redis is down.
const MAX_LOCAL_LIMITS: u64 = 100_000;
/// Attempts to release a permit; after that it expires by itself.
const MAX_LEAVE_TRIES: u32 = 5;
/// Idle time after which a local limiter is dropped: by then it is full again.
const LOCAL_KEEP: Duration = Duration::from_secs(86_400);

/// A number of calls in a window; all of them may come at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rate {
    pub count: u32,
    /// Length of the window, in seconds.
    pub window_seconds: u32,
}

impl Rate {
    /// This many calls per minute.
    #[must_use]
    pub const fn per_minute(count: u32) -> Self {
        Self { count, window_seconds: 60 }
    }

    /// The time in which one call comes back.
    fn interval(self) -> Duration {
        Duration::from_secs(self.window_seconds.into()) / self.count.max(1)
    }
}

/// A limit that applies to a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Charge {
    /// The limit's unique name.
    pub name: String,
    pub rate: Rate,
    /// Windows by which this call may overdraw the limit: later calls pay for it.
    pub overdraft_windows: u32,
}

/// Permits that a call needs while it lasts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedPermit {
    /// The unique name of the permits.
    pub name: String,
    pub max: u32,
    pub token: String,
    /// A permit that was not released expires after this many seconds.
    pub life_seconds: u32,
}

/// The state of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    pub rate: Rate,
    /// Calls that may come at once.
    pub remaining: u32,
    /// Seconds until the limit is fully available again.
    pub reset_seconds: u32,
}

/// The result of checking a call's limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Refused: how long until it may be repeated.
    pub wait: Option<Duration>,
    /// Which kind of permit was exhausted.
    pub full: Option<usize>,
    /// Each limit, after the call.
    pub standings: Vec<Standing>,
    pub is_local: bool,
}

impl Verdict {
    /// Refused: seconds until it may be repeated, at least 1.
    #[must_use]
    pub fn retry_after_seconds(&self) -> Option<u32> {
        self.wait.map(whole_seconds)
    }

    /// The limit with the fewest calls left.
    #[must_use]
    pub fn tightest(&self) -> Option<Standing> {
        self.standings.iter().copied().min_by_key(|it| it.remaining)
    }
}

/// Checks all limits and permits, and uses them only if all allow it. KEYS: first `n` limits, then
/// sets of permits. ARGV: n, cost, then for each limit interval (µs), burst and overdraft (µs),
/// then for each set its size, token and lifetime (s). Returns: allowed, wait (µs), the full set
/// (1…, or 0), then for each limit the remaining calls, and the time until it is fully available
/// (µs).
static SCRIPT: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        r"
        local time = redis.call('TIME')
        local now = time[1] * 1000000 + time[2]
        local n, cost = tonumber(ARGV[1]), tonumber(ARGV[2])
        local allowed, wait, full, ends, at = 1, 0, 0, {}, 3
        for i = 1, n do
            local interval, burst = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
            local overdraft = tonumber(ARGV[at + 2])
            at = at + 3
            local ending = tonumber(redis.call('GET', KEYS[i]) or now)
            if ending < now then ending = now end
            local excess = ending + interval * cost - now - interval * burst - overdraft
            ends[i] = {ending, interval, burst}
            if excess > 0 then
                allowed = 0
                if excess > wait then wait = excess end
            end
        end
        local permits = {}
        for i = n + 1, #KEYS do
            local max, token, life = tonumber(ARGV[at]), ARGV[at + 1], tonumber(ARGV[at + 2])
            at = at + 3
            redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', now)
            if redis.call('ZCARD', KEYS[i]) >= max then
                if full == 0 then full = i - n end
            end
            permits[i] = {token, life}
        end
        if full > 0 then allowed = 0 end
        if allowed == 1 then
            for i = 1, n do
                ends[i][1] = ends[i][1] + ends[i][2] * cost
                if cost > 0 then
                    local life = math.ceil((ends[i][1] - now) / 1000) + 1
                    redis.call('SET', KEYS[i], string.format('%.0f', ends[i][1]), 'PX', life)
                end
            end
            for i = n + 1, #KEYS do
                local life = permits[i][2]
                redis.call('ZADD', KEYS[i], now + life * 1000000, permits[i][1])
                redis.call('EXPIRE', KEYS[i], life + 1)
            end
        end
        local answer = {allowed, wait, full}
        for i = 1, n do
            local used = ends[i][1] - now
            local left = math.floor((ends[i][2] * ends[i][3] - used) / ends[i][2])
            if left < 0 then left = 0 end
            answer[#answer + 1] = left
            answer[#answer + 1] = used
        end
        return answer
        ",
    )
});
/// Releases permits, or counts them. KEYS: sets. ARGV: the token.
static LEAVE: LazyLock<Script> = LazyLock::new(|| {
    Script::new("for i = 1, #KEYS do redis.call('ZREM', KEYS[i], ARGV[1]) end return 0")
});
/// Resets a limit. KEYS: the limit.
static FORGIVE: LazyLock<Script> =
    LazyLock::new(|| Script::new("return redis.call('DEL', KEYS[1])"));
/// Undoes one call. KEYS: the limit. ARGV: its interval (µs).
static REFUND: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local ending = tonumber(redis.call('GET', KEYS[1]) or 0)
         if ending == 0 then return 0 end
         redis.call('SET', KEYS[1], string.format('%.0f', ending - ARGV[1]), 'KEEPTTL')
         return 1",
    )
});
/// Counts taken permits. KEYS: a set.
static COUNT: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local time = redis.call('TIME')
         return redis.call('ZCOUNT', KEYS[1], time[1] * 1000000 + time[2], '+inf')",
    )
});

type Local = RateLimiter<NotKeyed, InMemoryState, DefaultClock, StateInformationMiddleware>;

/// Checks limits. Cheap to clone.
#[derive(Clone)]
pub struct Limiter {
    bus: Bus,
    local: Cache<(String, u32, u32, u32), Arc<Local>>,
    clock: DefaultClock,
}

impl Limiter {
    /// A limiter that counts over `bus`.
    #[must_use]
    pub fn new(bus: Bus) -> Self {
        let local = Cache::builder().max_capacity(MAX_LOCAL_LIMITS).time_to_idle(LOCAL_KEEP);
        Self { bus, local: local.build(), clock: DefaultClock::default() }
    }

    /// Checks a call's limits, and uses them if all allow it. Without Redis each is counted
    /// locally, and permits are left to the caller.
    pub async fn charge(&self, charges: &[Charge], permits: &[SharedPermit]) -> Verdict {
        self.ask(charges, permits, 1).await
    }

    /// The same for what `cost` calls use together: wholly, or not at all.
    pub async fn charge_many(&self, charges: &[Charge], cost: NonZeroU32) -> Verdict {
        self.ask(charges, &[], cost.get()).await
    }

    /// The same for a call that has used 1 of its cost, which stays used. Its next try needs all of
    /// the cost, so the wait is longer by 1.
    pub async fn charge_rest(&self, charges: &[Charge], rest: NonZeroU32) -> Verdict {
        let mut verdict = self.charge_many(charges, rest).await;
        let one = verdict.standings.iter().map(|it| it.rate.interval()).max().unwrap_or_default();
        verdict.wait = verdict.wait.map(|it| it + one);
        verdict
    }

    /// The state of limits, without using them; none without Redis.
    pub async fn peek(&self, charges: &[Charge]) -> Vec<Standing> {
        let verdict = self.ask(charges, &[], 0).await;
        if verdict.is_local { Vec::new() } else { verdict.standings }
    }

    async fn ask(&self, charges: &[Charge], permits: &[SharedPermit], cost: u32) -> Verdict {
        if charges.is_empty() && permits.is_empty() {
            return Verdict { wait: None, full: None, standings: Vec::new(), is_local: false };
        }
        let mut script = SCRIPT.prepare_invoke();
        for name in charges.iter().map(|it| &it.name).chain(permits.iter().map(|it| &it.name)) {
            script.key(self.bus.name(name));
        }
        script.arg(charges.len()).arg(cost);
        for charge in charges {
            let window = u64::from(charge.rate.window_seconds) * 1_000_000;
            let interval = window / u64::from(charge.rate.count.max(1));
            let overdraft = window * u64::from(charge.overdraft_windows);
            script.arg(interval).arg(charge.rate.count).arg(overdraft);
        }
        for permit in permits {
            script.arg(permit.max).arg(&permit.token).arg(permit.life_seconds);
        }
        let verdict = match self.bus.invoke::<Vec<i64>>(&script).await {
            Some(answer) => read(charges, &answer),
            None => self.ask_alone(charges, cost),
        };
        if cost > 0 {
            let by = if verdict.is_local { "local" } else { "redis" };
            let is_refused = verdict.wait.is_some() || verdict.full.is_some();
            let outcome = if is_refused { "refused" } else { "allowed" };
            counter!(telemetry::LIMITER_DECISIONS, "by" => by, "outcome" => outcome).increment(1);
        }
        verdict
    }

    /// Counts something on this node alone. Returns the pause in seconds if it is too much.
    #[must_use]
    pub fn count_here(&self, name: String, rate: Rate) -> Option<u32> {
        let charge = Charge { name, rate, overdraft_windows: 0 };
        self.use_local(&charge, rate, NonZeroU32::MIN).1.map(whole_seconds)
    }

    /// Releases permits.
    pub async fn release(&self, permits: &[SharedPermit]) {
        let Some(first) = permits.first() else { return };
        let mut script = LEAVE.prepare_invoke();
        for permit in permits {
            script.key(self.bus.name(&permit.name));
        }
        script.arg(&first.token);
        // Redis may be down for a moment: permits that are not released would be missing.
        for _ in 0..MAX_LEAVE_TRIES {
            let left: Option<i64> = self.bus.invoke(&script).await;
            if left.is_some() || !self.bus.has_redis() {
                return;
            }
            tokio::time::sleep(BREAK).await;
        }
    }

    /// Resets a limit.
    pub async fn forgive(&self, charge: &Charge) {
        let mut script = FORGIVE.prepare_invoke();
        script.key(self.bus.name(&charge.name));
        let _: Option<i64> = self.bus.invoke(&script).await;
        let share = share(charge.rate.count, self.bus.nodes());
        self.local.invalidate(&(charge.name.clone(), share, charge.rate.window_seconds, 0));
    }

    /// Undoes what one call has used of each limit. Without Redis it stays used.
    pub async fn refund(&self, charges: &[Charge]) {
        for charge in charges {
            let mut script = REFUND.prepare_invoke();
            script.key(self.bus.name(&charge.name));
            let interval = u64::try_from(charge.rate.interval().as_micros()).unwrap_or(u64::MAX);
            script.arg(interval);
            let _: Option<i64> = self.bus.invoke(&script).await;
        }
    }

    /// The number of taken permits, as far as Redis knows.
    pub async fn taken(&self, name: &str) -> Option<u32> {
        let mut script = COUNT.prepare_invoke();
        script.key(self.bus.name(name));
        let taken: i64 = self.bus.invoke(&script).await?;
        u32::try_from(taken).ok()
    }

    /// Runs every script once, on names of its own.
    ///
    /// # Errors
    /// The command that Redis refuses.
    pub async fn rehearse(bus: &Bus) -> RedisResult<()> {
        let names =
            ["limit", "permit"].map(|it| bus.name(&format!("check:{{{}}}:{it}", bus.node())));
        let [limit, permit] = &names;
        let (interval_us, burst, cost) = (1_000_000, 1, 1);
        let (max, token, life_seconds) = (1, "check", 1);
        let mut charge = SCRIPT.prepare_invoke();
        charge.key(limit).key(permit).arg(1).arg(cost).arg(interval_us).arg(burst).arg(0);
        charge.arg(max).arg(token).arg(life_seconds);
        bus.invoke_unguarded::<Vec<i64>>(&charge).await?;
        bus.invoke_unguarded::<i64>(COUNT.prepare_invoke().key(permit)).await?;
        bus.invoke_unguarded::<i64>(LEAVE.prepare_invoke().key(permit).arg(token)).await?;
        bus.invoke_unguarded::<i64>(REFUND.prepare_invoke().key(limit).arg(cost)).await?;
        bus.invoke_unguarded::<i64>(FORGIVE.prepare_invoke().key(limit)).await?;
        Ok(())
    }

    /// Counts on this node alone, at its share of each limit.
    fn ask_alone(&self, charges: &[Charge], cost: u32) -> Verdict {
        let mut verdict = Verdict { wait: None, full: None, standings: Vec::new(), is_local: true };
        if self.bus.has_redis() && cost > 0 && !charges.is_empty() {
            counter!(telemetry::LIMITS_LOCAL).increment(1);
        }
        let Some(cost) = NonZeroU32::new(cost) else { return verdict };
        for charge in charges {
            let share = share(charge.rate.count, self.bus.nodes());
            let rate = Rate { count: share, ..charge.rate };
            let (remaining, wait) = self.use_local(charge, rate, cost);
            verdict.wait = verdict.wait.max(wait);
            let used = share.saturating_sub(remaining);
            let reset = u64::from(used) * u64::from(rate.window_seconds) / u64::from(share.max(1));
            let reset_seconds = u32::try_from(reset).unwrap_or(u32::MAX);
            verdict.standings.push(Standing { rate, remaining, reset_seconds });
        }
        verdict
    }

    /// Overdrafts use a separate allowance; the rest is shared by all calls. A call that costs more
    /// than this node's share uses what the share can hold: it must pass at some time.
    fn use_local(&self, charge: &Charge, rate: Rate, cost: NonZeroU32) -> (u32, Option<Duration>) {
        let purse = |windows: u32| {
            let key = (charge.name.clone(), rate.count, rate.window_seconds, windows);
            self.local.get_with(key, || Arc::new(local(rate, windows.max(1))))
        };
        let take = |windows: u32| {
            // The call itself has used 1 of the share.
            let most = NonZeroU32::new(rate.count.saturating_sub(1)).unwrap_or(NonZeroU32::MIN);
            match purse(windows).check_n(cost.min(most)) {
                Ok(Ok(state)) => Ok(state.remaining_burst_capacity().min(rate.count)),
                Ok(Err(refusal)) => Err(refusal.wait_time_from(self.clock.now())),
                Err(_) => Err(Duration::from_secs(rate.window_seconds.into())),
            }
        };
        match (take(0), charge.overdraft_windows) {
            (Ok(left), _) => (left, None),
            (Err(wait), 0) => (0, Some(wait)),
            (Err(_), windows) => match take(windows) {
                Ok(_) => (0, None),
                Err(wait) => (0, Some(wait)),
            },
        }
    }
}

fn local(rate: Rate, windows: u32) -> Local {
    let count = NonZeroU32::new(rate.count).unwrap_or(NonZeroU32::MIN);
    let window = Duration::from_secs(rate.window_seconds.max(1).into());
    let interval = (window / count.get()).max(Duration::from_nanos(1));
    let burst = rate.count.saturating_mul(windows);
    let burst = NonZeroU32::new(burst).unwrap_or(NonZeroU32::MIN);
    let quota = Quota::with_period(interval).unwrap_or(Quota::per_second(count)).allow_burst(burst);
    RateLimiter::direct(quota).with_middleware()
}

/// The share of one of `nodes` in a limit: at least 1, or a small limit would become 0.
#[must_use]
pub fn share(limit: u32, nodes: u32) -> u32 {
    limit.div_ceil(nodes.max(1)).max(1)
}

fn read(charges: &[Charge], answer: &[i64]) -> Verdict {
    let number = |at: usize| answer.get(at).copied().unwrap_or_default();
    let wait = Duration::from_micros(u64::try_from(number(1)).unwrap_or_default());
    let standings = charges.iter().enumerate().map(|(index, charge)| {
        let used = Duration::from_micros(u64::try_from(number(4 + index * 2)).unwrap_or_default());
        Standing {
            rate: charge.rate,
            remaining: u32::try_from(number(3 + index * 2)).unwrap_or_default(),
            reset_seconds: if used.is_zero() { 0 } else { whole_seconds(used) },
        }
    });
    Verdict {
        wait: (number(0) == 0).then_some(wait),
        full: usize::try_from(number(2)).ok().and_then(|it| it.checked_sub(1)),
        standings: standings.collect(),
        is_local: false,
    }
}

/// Rounded up, at least 1.
fn whole_seconds(time: Duration) -> u32 {
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    u32::try_from(seconds).unwrap_or(u32::MAX).max(1)
}

/// An address as limits use it: the first 64 bits of IPv6, which one client usually has.
///
/// ```
/// # use fencepost_signals::limiter::client_of;
/// let of = |text: &str| client_of(text.parse().unwrap());
/// assert_eq!(of("2001:db8::1"), of("2001:db8::2"));
/// assert_ne!(client_of("192.0.2.1".parse().unwrap()), client_of("192.0.2.2".parse().unwrap()));
/// assert_eq!(client_of("::ffff:192.0.2.1".parse().unwrap()), "192.0.2.1");
/// ```
#[must_use]
pub fn client_of(address: IpAddr) -> String {
    match address.to_canonical() {
        IpAddr::V4(it) => it.to_string(),
        IpAddr::V6(it) => {
            let [a, b, c, d, ..] = it.segments();
            format!("{a:x}:{b:x}:{c:x}:{d:x}::/64")
        }
    }
}

#[cfg(test)]
mod tests;
