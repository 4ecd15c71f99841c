//! `fencepost groups`: what groups of jobs wait for, pausing and unblocking them.

use clap::{Subcommand, ValueEnum};
use fencepost_domain::limits;
use serde_json::json;

use super::Call;
use crate::cli::{table::Page, words::encoded};

/// `fencepost groups`.
#[derive(Debug, Subcommand)]
pub enum Groups {
    /// List groups of a queue
    List {
        /// Queue
        queue: String,
        /// Only groups in this state
        #[arg(long, value_enum)]
        state: Option<ListedState>,
        /// Those whose first job has waited longest, in queues with rules of groups
        #[arg(long, conflicts_with_all = ["state", "cursor"])]
        longest_wait: bool,
        #[command(flatten)]
        page: Page<{ limits::MAX_PAGE_GROUPS }>,
    },
    /// Show a group
    #[command(visible_alias = "get")]
    Show {
        /// Queue
        queue: String,
        /// Group
        group: String,
    },
    /// Pause a group: its jobs wait, and running ones continue
    Pause {
        /// Queue
        queue: String,
        /// Group
        group: String,
        /// Seconds until it ends by itself [default: until it is resumed]
        #[arg(long, value_name = "N")]
        seconds: Option<u32>,
    },
    /// Resume a group
    Resume {
        /// Queue
        queue: String,
        /// Group
        group: String,
    },
    /// Give a group rules of its own, in place of those of its queue, where groups take turns
    Set {
        /// Queue
        queue: String,
        /// Group
        group: String,
        /// Its share beside other groups [default: 1]
        #[arg(long, value_name = "N")]
        weight: Option<i16>,
        /// Jobs of it that run at the same time at most
        #[arg(long, value_name = "N")]
        max_running: Option<i32>,
        /// Jobs of it that start in any window of this many seconds at most: `100/60`, up to four
        #[arg(long = "rate", value_name = "COUNT/SECONDS", value_parser = parse_rate)]
        rates: Vec<(i32, i32)>,
        /// Time at which these rules end by themselves
        #[arg(long, value_name = "TIME")]
        expires_at: Option<String>,
        /// Pauses the group as well, until this time
        #[arg(long, value_name = "TIME")]
        paused_until: Option<String>,
    },
    /// Delete the rules of a group and the starts that its rates have counted
    Reset {
        /// Queue
        queue: String,
        /// Group
        group: String,
    },
    /// Decide about the dead letter that blocks a group
    Unblock {
        /// Queue
        queue: String,
        /// Group
        group: String,
        /// What becomes of the dead letter
        #[arg(long, value_enum)]
        head: HeadAction,
        /// Id of the dead letter that is meant; any other is left alone
        #[arg(long)]
        job: Option<String>,
    },
}

/// Which groups to list.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum ListedState {
    /// A dead letter holds them
    Blocked,
    /// They are paused
    Paused,
    /// Jobs wait for their group, or its turn
    Waiting,
}

/// What becomes of a dead letter that blocks its group.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum HeadAction {
    /// It is retried, before all others
    Retry,
    /// It stays a dead letter, and the next job runs
    Skip,
    /// It is deleted
    Delete,
}

/// Reads `100/60`.
pub(super) fn parse_rate(text: &str) -> Result<(i32, i32), String> {
    let parts = text.split_once('/').and_then(|(count, seconds)| {
        Some((count.trim().parse().ok()?, seconds.trim().parse().ok()?))
    });
    parts.ok_or_else(|| "must be like 100/60: a number of jobs, and seconds".to_owned())
}

impl From<Groups> for Call {
    fn from(command: Groups) -> Self {
        let path = |queue: &str, group: &str, action: &str| {
            format!("/v1/queues/{}/groups/{}{action}", encoded(queue), encoded(group))
        };
        match command {
            Groups::List { queue, state, longest_wait, page } => {
                let state = match state {
                    None if longest_wait => "&order=longest_wait",
                    None => "",
                    Some(ListedState::Blocked) => "&state=blocked",
                    Some(ListedState::Paused) => "&state=paused",
                    Some(ListedState::Waiting) => "&state=waiting",
                };
                Self::list(
                    format!("/v1/queues/{}/groups?{}{state}", encoded(&queue), page.query()),
                    "groups",
                    &[
                        ("GROUP", "/group"),
                        ("STATE", "/state"),
                        ("WAITING", "/waiting"),
                        ("RUNNING", "/running"),
                        ("HEAD", "/head/job_id"),
                        ("HEAD STORED", "/head/created_at"),
                        ("WAITS SINCE", "/waiting_since"),
                        ("NEXT CHANGE", "/next_change_at"),
                    ],
                )
            }
            Groups::Show { queue, group } => Self::get(path(&queue, &group, "")),
            Groups::Pause { queue, group, seconds } => {
                let body = seconds.map_or_else(|| json!({}), |it| json!({"seconds": it}));
                Self::post(path(&queue, &group, "/pause"), body)
            }
            Groups::Resume { queue, group } => {
                Self::post(path(&queue, &group, "/resume"), json!({}))
            }
            Groups::Set { queue, group, weight, max_running, rates, expires_at, paused_until } => {
                let rates: Vec<_> = rates
                    .iter()
                    .map(|(count, seconds)| json!({"count": count, "per_seconds": seconds}))
                    .collect();
                let rates = Some(rates).filter(|it| !it.is_empty());
                let fields = [
                    ("weight", json!(weight)),
                    ("max_running", json!(max_running)),
                    ("rates", json!(rates)),
                    ("expires_at", json!(expires_at)),
                    ("paused_until", json!(paused_until)),
                ];
                let sent = fields.into_iter().filter(|it| !it.1.is_null());
                let body = sent.map(|(name, value)| (name.to_owned(), value)).collect();
                Self::put(path(&queue, &group, ""), serde_json::Value::Object(body))
            }
            Groups::Reset { queue, group } => Self::post(path(&queue, &group, "/reset"), json!({})),
            Groups::Unblock { queue, group, head, job } => {
                let head = match head {
                    HeadAction::Retry => "retry",
                    HeadAction::Skip => "skip",
                    HeadAction::Delete => "delete",
                };
                let body = match job {
                    Some(job) => json!({"head": head, "job_id": job}),
                    None => json!({"head": head}),
                };
                Self::post(path(&queue, &group, "/unblock"), body)
            }
        }
    }
}
