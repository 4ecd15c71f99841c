//! What keeps the jobs of a schedule that fires from running.

/// Ticks that are skipped in a row before it is worth a word: one may be chance.
const MIN_SKIPPED: i64 = 2;

/// Skipped ticks are counted up to this number. The statement carries it as a literal.
pub const MAX_SKIPPED: i64 = 100;

/// Facts about a schedule and about what its jobs need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outlook {
    /// It does not fire.
    pub is_paused: bool,
    /// Ticks that were skipped since the last one that fired, up to [`MAX_SKIPPED`].
    pub skipped: i64,
    /// The queue of its jobs is paused.
    pub is_queue_paused: bool,
    /// Their type is paused in the queue.
    pub is_type_paused: bool,
    /// A live worker polls the queue for the type, or the queue is pushed.
    pub is_served: bool,
}

impl Outlook {
    /// A sentence about what keeps jobs of this type in this queue from running; none: nothing that
    /// is known.
    #[must_use]
    pub fn warning(&self, queue: &str, job_type: &str) -> Option<String> {
        if self.is_paused {
            return None;
        }
        let skipped = (self.skipped >= MIN_SKIPPED).then(|| {
            let more = if self.skipped >= MAX_SKIPPED { " or more" } else { "" };
            format!(
                "its last {}{more} ticks were skipped: the job of an earlier one has not ended",
                self.skipped
            )
        });
        let unserved = if self.is_queue_paused {
            Some(format!("queue {queue} is paused"))
        } else if self.is_type_paused {
            Some(format!("job type {job_type} is paused in queue {queue}"))
        } else if self.is_served {
            None
        } else {
            Some(format!("no live worker polls queue {queue} for jobs of type {job_type}"))
        };
        match (skipped, unserved) {
            (Some(skipped), Some(unserved)) => Some(format!("{skipped}; {unserved}")),
            (one, other) => one.or(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FINE: Outlook = Outlook {
        is_paused: false,
        skipped: 0,
        is_queue_paused: false,
        is_type_paused: false,
        is_served: true,
    };

    #[test]
    fn a_warning_says_what_keeps_jobs_from_running() {
        let warning = |it: Outlook| it.warning("q", "t");
        assert_eq!(warning(FINE), None);
        assert_eq!(warning(Outlook { skipped: 1, ..FINE }), None);
        let starts = |it: Outlook, text: &str| {
            let warning = warning(it).expect("a warning");
            assert!(warning.starts_with(text), "{warning}");
        };
        starts(Outlook { skipped: 2, ..FINE }, "its last 2 ticks were skipped");
        starts(Outlook { skipped: 100, ..FINE }, "its last 100 or more ticks");
        starts(Outlook { is_queue_paused: true, is_served: false, ..FINE }, "queue q is paused");
        starts(Outlook { is_type_paused: true, ..FINE }, "job type t is paused in queue q");
        starts(Outlook { is_served: false, ..FINE }, "no live worker polls queue q");
        let both = Outlook { skipped: 3, is_queue_paused: true, ..FINE };
        assert!(warning(both.clone()).is_some_and(|it| it.ends_with("; queue q is paused")));
        assert_eq!(warning(Outlook { is_paused: true, ..both }), None);
    }
}
