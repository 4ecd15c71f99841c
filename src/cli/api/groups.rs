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
    /// Jobs wait for their group
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

impl From<Groups> for Call {
    fn from(command: Groups) -> Self {
        let path = |queue: &str, group: &str, action: &str| {
            format!("/v1/queues/{}/groups/{}{action}", encoded(queue), encoded(group))
        };
        match command {
            Groups::List { queue, state, page } => {
                let state = match state {
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
