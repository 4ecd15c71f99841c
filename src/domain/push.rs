//! Push: what the answer of a URL means that a job was sent to, and how many jobs it is sent at a
//! time.

use super::{
    limits::{MAX_PUSH_HEADER_NAME_CHARS, MAX_PUSH_HEADER_VALUE_CHARS},
    webhook::RetryAfter,
};

/// The pause after the first answer that asks for less work without saying how long. It doubles
/// with each further one.
const FIRST_PAUSE_SECONDS: u32 = 5;
/// The longest such pause.
const MAX_PAUSE_SECONDS: u32 = 60;
/// How often a pause doubles: it is the longest by then.
const MAX_DOUBLINGS: u32 = 6;

/// Headers that only the server sets: those of the connection, and of the body that it sends. No
/// receiver may take a push for the request of a browser, or of another client behind a proxy.
const OWN_HEADERS: [&str; 19] = [
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "forwarded",
    "host",
    "http2-settings",
    "keep-alive",
    "te",
    "traceparent",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "via",
    "x-real-ip",
];
/// And those that begin so.
const OWN_BEGINNINGS: [&str; 4] = ["fencepost-", "proxy-", "webhook-", "x-forwarded-"];

/// The mistake in a header that a user adds to requests; none: it is right.
///
/// ```
/// # use fencepost_domain::push::header_problem;
/// assert_eq!(header_problem("Authorization", "Bearer abc"), None);
/// assert!(header_problem("Host", "a").is_some() && header_problem("Webhook-Id", "1").is_some());
/// assert!(header_problem("two words", "a").is_some() && header_problem("", "a").is_some());
/// assert!(header_problem("X", "a\r\nHost: b").is_some());
/// ```
#[must_use]
pub fn header_problem(name: &str, value: &str) -> Option<String> {
    let lower = name.to_ascii_lowercase();
    let is_token = |it: char| it.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(it);
    if name.is_empty() || name.len() > MAX_PUSH_HEADER_NAME_CHARS || !name.chars().all(is_token) {
        let max = MAX_PUSH_HEADER_NAME_CHARS;
        return Some(format!(
            "must have a name of 1 to {max} characters that names of headers may have"
        ));
    }
    let is_own = OWN_HEADERS.contains(&lower.as_str());
    if is_own || OWN_BEGINNINGS.iter().any(|it| lower.starts_with(it)) {
        return Some("is set by the server".to_owned());
    }
    if value.chars().count() > MAX_PUSH_HEADER_VALUE_CHARS {
        let max = MAX_PUSH_HEADER_VALUE_CHARS;
        return Some(format!("must have a value of at most {max} characters"));
    }
    let is_visible = |it: char| (' '..='~').contains(&it) || it == '\t';
    (!value.chars().all(is_visible)).then(|| "must have a value in visible ASCII".to_owned())
}

/// The next step of an acknowledged job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobVerdict {
    /// It has succeeded.
    Succeeded,
    /// The receiver works on, and will send heartbeats and the ack.
    Taken,
    /// It goes back to its queue, without counting a failure, and the queue slows down. The answer
    /// may have named the pause, in seconds.
    Released(Option<u32>),
    /// It has failed, and is tried again if that may help.
    Failed {
        /// Whether another attempt may help.
        retryable: bool,
    },
}

/// The meaning of a status. `is_final`: the answer has the header `Fencepost-Retryable: false`.
///
/// ```
/// # use fencepost_domain::{
/// #     push::{JobVerdict, verdict}, webhook::RetryAfter::{Absent, Seconds, Unreadable},
/// # };
/// assert_eq!(verdict(200, Absent, false), JobVerdict::Succeeded);
/// assert_eq!(verdict(202, Absent, false), JobVerdict::Taken);
/// assert_eq!(verdict(429, Seconds(7), false), JobVerdict::Released(Some(7)));
/// assert_eq!(verdict(503, Seconds(9_999), false), JobVerdict::Released(Some(3_600)));
/// assert_eq!(verdict(503, Unreadable, false), JobVerdict::Released(None));
/// assert_eq!(verdict(503, Absent, false), JobVerdict::Failed { retryable: true });
/// assert_eq!(verdict(422, Absent, false), JobVerdict::Failed { retryable: false });
/// assert_eq!(verdict(500, Absent, true), JobVerdict::Failed { retryable: false });
/// assert_eq!(verdict(302, Absent, false), JobVerdict::Failed { retryable: true });
/// ```
#[must_use]
pub fn verdict(status: u16, retry_after: RetryAfter, is_final: bool) -> JobVerdict {
    let asked = retry_after.asked_seconds();
    match status {
        202 => JobVerdict::Taken,
        200..=299 => JobVerdict::Succeeded,
        _ if is_final => JobVerdict::Failed { retryable: false },
        429 => JobVerdict::Released(asked),
        503 if retry_after != RetryAfter::Absent => JobVerdict::Released(asked),
        // What was sent is wrong: it will be the same the next time.
        400 | 413 | 415 | 422 => JobVerdict::Failed { retryable: false },
        _ => JobVerdict::Failed { retryable: true },
    }
}

/// How many jobs a URL is sent at a time: one more with each window of successes, half as many when
/// it asks for less, and one when it does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    max: u32,
    size: u32,
    /// Successes since it last grew.
    successes: u32,
    /// Answers in a row that asked for less work.
    slowed: u32,
}

impl Window {
    /// Begins with as many as are allowed.
    #[must_use]
    pub fn new(max: u32) -> Self {
        Self { max: max.max(1), size: max.max(1), successes: 0, slowed: 0 }
    }

    /// How many jobs may be sent at a time.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// A job was done.
    ///
    /// ```
    /// # use fencepost_domain::push::Window;
    /// let mut window = Window::new(8);
    /// assert_eq!(window.slow(None), 5);
    /// assert_eq!(window.slow(None), 10);
    /// assert_eq!((window.size(), window.slow(Some(30))), (2, 30));
    /// assert_eq!(window.slow(Some(0)), 8);
    /// (0..3).for_each(|_| window.grow());
    /// assert_eq!((window.size(), window.slow(Some(0))), (3, 1));
    /// assert_eq!(window.slow(Some(100)), 100);
    /// ```
    pub fn grow(&mut self) {
        self.slowed = 0;
        if self.size == self.max {
            return;
        }
        self.successes += 1;
        if self.successes >= self.size {
            self.size += 1;
            self.successes = 0;
        }
    }

    /// There was no answer: one at a time is sent until there are some.
    ///
    /// ```
    /// # use fencepost_domain::push::Window;
    /// let mut window = Window::new(8);
    /// window.narrow();
    /// assert_eq!(window.size(), 1);
    /// window.grow();
    /// assert_eq!(window.size(), 2);
    /// ```
    pub fn narrow(&mut self) {
        (self.size, self.successes) = (1, 0);
    }

    /// It asked for less work, or a request took too long. Returns the pause, in seconds.
    pub fn slow(&mut self, asked_seconds: Option<u32>) -> u32 {
        self.size = (self.size / 2).max(1);
        self.successes = 0;
        let doubling = 1 << self.slowed.min(MAX_DOUBLINGS);
        self.slowed = self.slowed.saturating_add(1);
        // Who asks for a second again and again would use up the leases of its jobs.
        let pause = asked_seconds.map_or(FIRST_PAUSE_SECONDS * doubling, |it| it.max(doubling));
        pause.min(MAX_PAUSE_SECONDS.max(asked_seconds.unwrap_or(0)))
    }
}
