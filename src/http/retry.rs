//! Retry policies of jobs, queues and schedules.

use fencepost_domain::{
    backoff::{JitterKind, RetryPolicy, RetryStrategy},
    limits,
};
use serde::Deserialize;
use utoipa::ToSchema;

use fencepost_web::wire::{openapi::range, validate::Check};

/// A retry policy. Omitted fields have their defaults.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RetryRequest {
    /// Growth of the wait with each failure. Default: exponential.
    strategy: Option<RetryStrategy>,
    /// First wait in seconds. Default: 15.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_RETRY_SECONDS)))))]
    initial_seconds: Option<u32>,
    /// Factor of an exponential wait; exponent of a polynomial one. Default: 2.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_RETRY_MULTIPLIER as i64)))))]
    multiplier: Option<f64>,
    /// Maximum wait in seconds, before additive jitter. Default: 21600.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_RETRY_SECONDS)))))]
    max_seconds: Option<u32>,
    /// Spread of waits. Default: additive.
    jitter: Option<JitterKind>,
    /// With additive jitter: its maximum in seconds. Default: 3.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_RETRY_SECONDS)))))]
    jitter_seconds: Option<u32>,
    /// Error types that go straight to the dead letter: exact, or `prefix.*`; at most 50.
    non_retryable_types: Option<Vec<String>>,
}

impl RetryRequest {
    /// The complete policy. Broken rules are added under `field`.
    pub fn accept(self, field: &str, check: &mut Check) -> RetryPolicy {
        let default = RetryPolicy::default();
        let policy = RetryPolicy {
            strategy: self.strategy.unwrap_or(default.strategy),
            initial_seconds: self.initial_seconds.unwrap_or(default.initial_seconds),
            multiplier: self.multiplier.unwrap_or(default.multiplier),
            max_seconds: self.max_seconds.unwrap_or(default.max_seconds),
            jitter: self.jitter.unwrap_or(default.jitter),
            jitter_seconds: self.jitter_seconds.unwrap_or(default.jitter_seconds),
            non_retryable_types: self.non_retryable_types.unwrap_or_default(),
        };
        if policy.jitter != JitterKind::Additive && self.jitter_seconds.is_some() {
            let message = "must be sent with additive jitter only";
            check.refuse(&format!("{field}.jitter_seconds"), message);
        }
        let seconds = [
            ("initial_seconds", policy.initial_seconds),
            ("max_seconds", policy.max_seconds),
            ("jitter_seconds", policy.jitter_seconds),
        ];
        for (name, value) in seconds {
            let max = limits::MAX_RETRY_SECONDS;
            check.range(&format!("{field}.{name}"), i64::from(value), 0, max);
        }
        let multiplier = format!("{field}.multiplier");
        check.range(&multiplier, policy.multiplier, 1.0, limits::MAX_RETRY_MULTIPLIER);
        check.names(
            &format!("{field}.non_retryable_types"),
            &policy.non_retryable_types,
            limits::MAX_NON_RETRYABLE_TYPES,
            limits::MAX_ERROR_TYPE_CHARS,
        );
        policy
    }
}
