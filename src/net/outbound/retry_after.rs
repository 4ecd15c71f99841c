//! The header `Retry-After` of answers to calls: seconds, or a date (RFC 9110, section 10.2.3).

use std::time::SystemTime;

use fencepost_domain::webhook::RetryAfter;
use httpdate::parse_http_date;
use hyper::header::{DATE, HeaderMap, RETRY_AFTER};

/// Reads it. A date counts from the answer's own `Date`, whose clock it is of, and else from now.
pub(super) fn read(headers: &HeaderMap) -> RetryAfter {
    let Some(value) = headers.get(RETRY_AFTER) else { return RetryAfter::Absent };
    let date = headers.get(DATE).and_then(|it| it.to_str().ok());
    let date = date.and_then(|it| parse_http_date(it).ok()).unwrap_or_else(now);
    let read = value.to_str().ok().and_then(|it| parse(it.trim(), date));
    read.unwrap_or_else(|| {
        tracing::warn!(?value, "the header Retry-After of an answer cannot be read");
        RetryAfter::Unreadable
    })
}

fn parse(value: &str, now: SystemTime) -> Option<RetryAfter> {
    if !value.is_empty() && value.bytes().all(|it| it.is_ascii_digit()) {
        return Some(RetryAfter::Seconds(value.parse().unwrap_or(u32::MAX)));
    }
    let at = parse_http_date(value).ok()?;
    let wait = at.duration_since(now).unwrap_or_default();
    Some(RetryAfter::Seconds(u32::try_from(wait.as_secs()).unwrap_or(u32::MAX)))
}

#[expect(clippy::disallowed_methods, reason = "the date is of another host's clock anyway")]
fn now() -> SystemTime {
    SystemTime::now()
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn of(value: &str, date: Option<&str>) -> RetryAfter {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_str(value).expect("a value"));
        if let Some(date) = date {
            headers.insert(DATE, HeaderValue::from_str(date).expect("a date"));
        }
        read(&headers)
    }

    #[test]
    fn seconds_and_dates_are_read() {
        let date = Some("Fri, 27 Nov 2026 10:00:00 GMT");
        assert_eq!(read(&HeaderMap::new()), RetryAfter::Absent);
        assert_eq!(of(" 120 ", date), RetryAfter::Seconds(120));
        assert_eq!(of("99999999999", date), RetryAfter::Seconds(u32::MAX));
        assert_eq!(of("Fri, 27 Nov 2026 10:01:30 GMT", date), RetryAfter::Seconds(90));
        assert_eq!(of("Friday, 27-Nov-26 10:01:30 GMT", date), RetryAfter::Seconds(90));
        assert_eq!(of("Fri, 27 Nov 2026 09:00:00 GMT", date), RetryAfter::Seconds(0));
        assert_eq!(of("Fri, 27 Nov 1970 09:00:00 GMT", None), RetryAfter::Seconds(0));
    }

    #[test]
    fn anything_else_is_there_and_cannot_be_read() {
        for value in ["soon", "1.5", "-5", "", "2026-11-27T10:00:00Z"] {
            assert_eq!(of(value, None), RetryAfter::Unreadable, "{value}");
        }
    }
}
