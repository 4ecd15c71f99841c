//! Logs of attempts: what is stored, and what is missing.

use super::limits::{MAX_LOG_BYTES, MAX_LOG_CHUNK_BYTES, MAX_LOG_CHUNKS_KEPT};

/// How much of a chunk of `bytes` is stored beside what is stored already; none: nothing.
///
/// ```
/// # use fencepost_domain::logs::room;
/// assert_eq!(room(0, 0, 100), Some(100));
/// assert_eq!(room(1024 * 1024 - 10, 5, 100), Some(10));
/// assert_eq!(room(1024 * 1024, 5, 100), None);
/// assert_eq!(room(0, 10_000, 1), None);
/// assert_eq!(room(0, 0, 100_000), Some(65_536));
/// ```
#[must_use]
pub fn room(kept_bytes: i64, kept_chunks: i32, bytes: usize) -> Option<usize> {
    let left = usize::try_from(MAX_LOG_BYTES - kept_bytes).unwrap_or(0);
    if left == 0 || kept_chunks >= MAX_LOG_CHUNKS_KEPT {
        return None;
    }
    Some(bytes.min(left).min(MAX_LOG_CHUNK_BYTES))
}

/// A gap in a stream: these sequences, both included, did not arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    /// The first missing sequence.
    pub from: i64,
    /// The last missing sequence.
    pub to: i64,
}

/// The gaps in a stream with sorted sequences, starting after `before`.
///
/// ```
/// # use fencepost_domain::logs::{gaps, Gap};
/// assert_eq!(gaps(-1, &[0, 1, 2]), []);
/// assert_eq!(gaps(-1, &[2, 3, 7]), [Gap { from: 0, to: 1 }, Gap { from: 4, to: 6 }]);
/// assert_eq!(gaps(3, &[4]), []);
/// ```
#[must_use]
pub fn gaps(before: i64, sequences: &[i64]) -> Vec<Gap> {
    let mut last = before;
    let mut gaps = Vec::new();
    for sequence in sequences {
        if *sequence > last.saturating_add(1) {
            gaps.push(Gap { from: last + 1, to: sequence - 1 });
        }
        last = *sequence;
    }
    gaps
}
