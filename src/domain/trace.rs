//! W3C Trace Context, propagated from producer to worker.

use std::fmt::Write;

use uuid::Uuid;

/// A span in a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace; not 0.
    pub trace_id: u128,
    /// The span; not 0.
    pub span_id: u64,
    /// Whether it is sampled.
    pub is_sampled: bool,
}

impl TraceContext {
    /// Parses a `traceparent`. A malformed one is ignored, as the recommendation asks.
    ///
    /// ```
    /// # use fencepost_domain::trace::TraceContext;
    /// let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    /// let context = TraceContext::parse(text).unwrap();
    /// assert!(context.is_sampled);
    /// assert_eq!(context.to_string(), text);
    /// assert_eq!(TraceContext::parse("00-0-0-01"), None);
    /// ```
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        const PARTS: [usize; 4] = [2, 32, 16, 2];
        let is_hex =
            |it: &str| it.bytes().all(|it| it.is_ascii_digit() || (b'a'..=b'f').contains(&it));
        let parts: Vec<_> = text.split('-').collect();
        let [version, trace_id, span_id, flags, ..] = parts[..] else { return None };
        // A later version may have more fields.
        let is_long = version == "00" && parts.len() > PARTS.len();
        let is_sound =
            parts.iter().zip(PARTS).all(|(part, length)| part.len() == length && is_hex(part));
        if !is_sound || is_long || version == "ff" {
            return None;
        }
        let context = Self {
            trace_id: u128::from_str_radix(trace_id, 16).ok()?,
            span_id: u64::from_str_radix(span_id, 16).ok()?,
            is_sampled: u8::from_str_radix(flags, 16).ok()? & 1 == 1,
        };
        (context.trace_id != 0 && context.span_id != 0).then_some(context)
    }

    /// A new span below this one.
    #[must_use]
    pub fn child(self, span_id: u64) -> Self {
        Self { span_id, ..self }
    }
}

impl std::fmt::Display for TraceContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let flags = u8::from(self.is_sampled);
        write!(f, "00-{:032x}-{:016x}-{flags:02x}", self.trace_id, self.span_id)
    }
}

/// The spans of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttemptTrace {
    /// Its own span, which its worker continues.
    pub own: TraceContext,
    /// The parent span.
    pub parent: Option<TraceContext>,
    /// A linked span in another trace.
    pub link: Option<TraceContext>,
}

/// The span of a job's attempt. The first attempt belongs to the trace of the enqueue. A later one,
/// possibly days after, starts a linked trace of its own. None: the job has no trace.
///
/// The ids are derived from the lease's id, so every node that reports this attempt uses the same
/// ones.
///
/// Source: OpenTelemetry's conventions for messaging spans; a retry as a child would keep its trace
/// open for days.
#[must_use]
pub fn of_attempt(job: &str, attempt: i32, lease_id: Uuid) -> Option<AttemptTrace> {
    let enqueued = TraceContext::parse(job)?;
    let (high, low) = lease_id.as_u64_pair();
    // Version and variant bits make neither half 0; this makes sure.
    let span_id = (high ^ low).max(1);
    if attempt == 1 {
        let own = enqueued.child(span_id);
        return Some(AttemptTrace { own, parent: Some(enqueued), link: None });
    }
    let trace_id = lease_id.as_u128();
    let own = TraceContext { trace_id, span_id, is_sampled: enqueued.is_sampled };
    Some(AttemptTrace { own, parent: None, link: Some(enqueued) })
}

/// A trace's id, as logs show it.
#[must_use]
pub fn trace_id_text(context: TraceContext) -> String {
    let mut text = String::with_capacity(32);
    let _ = write!(text, "{:032x}", context.trace_id);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn the_first_attempt_is_a_child_and_a_retry_is_linked() {
        let lease_id = Uuid::from_u128(0x0123_4567_89ab_4def_8123_4567_89ab_cdef);
        let first = of_attempt(JOB, 1, lease_id).expect("a trace");
        let enqueued = TraceContext::parse(JOB).expect("a context");
        assert_eq!((first.own.trace_id, first.parent), (enqueued.trace_id, Some(enqueued)));
        assert_ne!(first.own.span_id, enqueued.span_id);
        let second = of_attempt(JOB, 2, lease_id).expect("a trace");
        assert_eq!((second.parent, second.link), (None, Some(enqueued)));
        assert_ne!(second.own.trace_id, enqueued.trace_id);
        assert!(second.own.is_sampled);
        assert_eq!(of_attempt(JOB, 1, lease_id), Some(first), "every node says the same");
    }

    #[test]
    fn what_is_malformed_is_no_trace() {
        for text in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e47360-0f067aa0ba902b7-01",
        ] {
            assert_eq!(TraceContext::parse(text), None, "{text}");
        }
        let later = JOB.replacen("00-", "01-", 1) + "-more";
        assert_eq!(TraceContext::parse(&later), TraceContext::parse(JOB), "of a later version");
        assert_eq!(TraceContext::parse(&format!("{JOB}-more")), None);
        let unsampled = JOB.replace("-01", "-00");
        assert!(!TraceContext::parse(&unsampled).expect("a context").is_sampled);
    }
}
