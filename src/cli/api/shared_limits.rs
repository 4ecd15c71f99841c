//! `fencepost limits`: limits that several queues keep together.

use clap::{Subcommand, ValueEnum};
use fencepost_domain::limits;
use serde_json::json;

use super::{Call, groups::parse_rate};
use crate::cli::{table::Page, words::encoded};

/// `fencepost limits`.
#[derive(Debug, Subcommand)]
pub enum SharedLimits {
    /// List shared limits
    List {
        #[command(flatten)]
        page: Page<{ limits::MAX_PAGE_GROUPS }>,
    },
    /// Show a shared limit, or one group under it
    #[command(visible_alias = "get")]
    Show {
        /// Shared limit
        name: String,
        /// Group, of a limit by group
        #[arg(long)]
        group: Option<String>,
    },
    /// Create a shared limit, or replace its numbers; queues name it in their `shared_limits`
    Set {
        /// Shared limit
        name: String,
        /// Whose jobs it counts together; it cannot be changed [default: as it is, or all]
        #[arg(long, value_enum)]
        by: Option<By>,
        #[command(flatten)]
        numbers: Numbers,
    },
    /// Delete a shared limit that no queue names
    Delete {
        /// Shared limit
        name: String,
    },
    /// Forget the counted starts and the pause of a shared limit, or of one group under it
    Reset {
        /// Shared limit
        name: String,
        /// Group, whose own numbers are deleted as well [default: all jobs]
        #[arg(long)]
        group: Option<String>,
    },
    /// List groups under a shared limit by group
    Groups {
        /// Shared limit
        name: String,
        #[command(flatten)]
        page: Page<{ limits::MAX_PAGE_GROUPS }>,
    },
    /// Give a group numbers of its own, in place of those of a shared limit by group
    SetGroup {
        /// Shared limit
        name: String,
        /// Group
        group: String,
        #[command(flatten)]
        numbers: Numbers,
        /// Time at which these numbers end by themselves
        #[arg(long, value_name = "TIME")]
        expires_at: Option<String>,
    },
}

/// Whose jobs a shared limit counts together.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum By {
    /// All jobs of the queues that name it
    All,
    /// The jobs of each group, in all these queues
    Group,
}

/// The numbers of a limit.
#[derive(Debug, clap::Args)]
pub struct Numbers {
    /// Jobs that run at the same time at most
    #[arg(long, value_name = "N")]
    max_running: Option<i32>,
    /// Jobs that start in any window of this many seconds at most: `100/60`, up to four
    #[arg(long = "rate", value_name = "COUNT/SECONDS", value_parser = parse_rate)]
    rates: Vec<(i32, i32)>,
}

impl Numbers {
    fn body(&self, more: &[(&str, serde_json::Value)]) -> serde_json::Value {
        let rate = |it: &(i32, i32)| json!({"count": it.0, "per_seconds": it.1});
        let rates: Vec<_> = self.rates.iter().map(rate).collect();
        let rates = Some(rates).filter(|it| !it.is_empty());
        let numbers = [("max_running", json!(self.max_running)), ("rates", json!(rates))];
        let sent = numbers.iter().chain(more).filter(|it| !it.1.is_null());
        sent.map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    }
}

impl From<SharedLimits> for Call {
    fn from(command: SharedLimits) -> Self {
        let path = |limit: &str| format!("/v1/shared-limits/{}", encoded(limit));
        let of_group =
            |limit: &str, group: &str| format!("{}/groups/{}", path(limit), encoded(group));
        match command {
            SharedLimits::List { page } => Self::list(
                format!("/v1/shared-limits?{}", page.query()),
                "shared_limits",
                &[
                    ("LIMIT", "/name"),
                    ("BY", "/by"),
                    ("RUNNING", "/running"),
                    ("MAX", "/max_running"),
                    ("STARTED", "/started"),
                    ("RATES", "/rates"),
                    ("NEXT START", "/next_at"),
                    ("PAUSED UNTIL", "/paused_until"),
                ],
            ),
            SharedLimits::Show { name, group: None } => Self::get(path(&name)),
            SharedLimits::Show { name, group: Some(group) } => Self::get(of_group(&name, &group)),
            SharedLimits::Set { name, by, numbers } => {
                let by = by.map(|it| match it {
                    By::All => "all",
                    By::Group => "group",
                });
                Self::put(path(&name), numbers.body(&[("by", json!(by))]))
            }
            SharedLimits::Delete { name } => Self::delete(path(&name)),
            SharedLimits::Reset { name, group: None } => {
                Self::post(format!("{}/reset", path(&name)), json!({}))
            }
            SharedLimits::Reset { name, group: Some(group) } => {
                Self::post(format!("{}/reset", of_group(&name, &group)), json!({}))
            }
            SharedLimits::Groups { name, page } => Self::list(
                format!("{}/groups?{}", path(&name), page.query()),
                "groups",
                &[
                    ("GROUP", "/group"),
                    ("RUNNING", "/running"),
                    ("STARTED", "/started"),
                    ("NEXT START", "/next_at"),
                    ("PAUSED UNTIL", "/paused_until"),
                    ("OWN MAX", "/rules/max_running"),
                    ("OWN RATES", "/rules/rates"),
                    ("UNTIL", "/rules/expires_at"),
                ],
            ),
            SharedLimits::SetGroup { name, group, numbers, expires_at } => {
                let body = numbers.body(&[("expires_at", json!(expires_at))]);
                Self::put(of_group(&name, &group), body)
            }
        }
    }
}
