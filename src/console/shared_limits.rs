//! Limits that several queues keep together.

use askama::Template;
use axum::{extract::Path, response::Response};
use fencepost_domain::{
    error::Error,
    limits,
    shared_limit::{MAX_LIMITS_OF_QUEUE, SharedBy},
};
use fencepost_http::routes::shared_limits::{
    SharedLimit, SharedLimitPage,
    groups::{SharedLimitGroup, SharedLimitGroupPage},
};

use super::{
    form::encode,
    format,
    location::segment,
    page::{Frame, Here, render},
};

/// Limits and groups of a page.
const SHOWN: u32 = 50;

#[derive(Template)]
#[template(path = "shared_limits.html")]
struct SharedLimits {
    frame: Frame,
    limits: Vec<SharedLimit>,
    next_page: Option<String>,
}

/// The limits of the project.
pub async fn list(here: Here) -> Result<Response, Error> {
    let query = page_query(here.asked.text("cursor"));
    let found: SharedLimitPage = here.get(&format!("/shared-limits?{query}")).await?;
    let next_page = found.next_cursor.map(|cursor| {
        here.frame.with_query("/shared-limits", &encode(&[("cursor", cursor.as_str())]))
    });
    render(&SharedLimits { limits: found.shared_limits, next_page, frame: here.frame })
}

#[derive(Template)]
#[template(path = "shared_limit.html")]
struct OneLimit {
    frame: Frame,
    limit: SharedLimit,
    groups: Vec<SharedLimitGroup>,
    next_page: Option<String>,
}

/// One limit, and the groups that it has numbers of.
pub async fn detail(
    Path((_, name)): Path<(String, String)>,
    here: Here,
) -> Result<Response, Error> {
    let at = format!("/shared-limits/{}", segment(&name));
    let limit: SharedLimit = here.get(&at).await?;
    let (groups, cursor) = match limit.by {
        SharedBy::All => (Vec::new(), None),
        SharedBy::Group => {
            let query = page_query(here.asked.text("cursor"));
            let page: SharedLimitGroupPage = here.get(&format!("{at}/groups?{query}")).await?;
            (page.groups, page.next_cursor)
        }
    };
    let next_page =
        cursor.map(|cursor| here.frame.with_query(&at, &encode(&[("cursor", cursor.as_str())])));
    render(&OneLimit { limit, groups, next_page, frame: here.frame })
}

fn page_query(cursor: &str) -> String {
    let after = if cursor.is_empty() { String::new() } else { encode(&[("cursor", cursor)]) };
    format!("limit={SHOWN}&{after}")
}

/// Adds to [`SharedLimit`] what pages show of it.
trait SharedLimitExt {
    fn is_by_group(&self) -> bool;

    /// Its rates, as an API takes them; empty: none.
    fn rates_json(&self) -> String;

    /// What has started in each window: `4 of 100 in 60 s`.
    fn used(&self) -> Vec<String>;
}

impl SharedLimitExt for SharedLimit {
    fn is_by_group(&self) -> bool {
        self.by == SharedBy::Group
    }

    fn rates_json(&self) -> String {
        match self.rates.as_slice() {
            [] => String::new(),
            rates => serde_json::to_string(rates).unwrap_or_default(),
        }
    }

    fn used(&self) -> Vec<String> {
        let windows = self.rates.iter().enumerate().map(|(at, rate)| {
            let of = format!("{} in {} s", rate.count, rate.per_seconds);
            match self.started.get(at) {
                Some(started) => format!("{started} of {of}"),
                None => of,
            }
        });
        windows.collect()
    }
}

/// Adds to [`SharedLimitGroup`] what pages show of it.
trait SharedLimitGroupExt {
    /// Each empty: as the limit says; for the end: until it is reset.
    fn own_max_running(&self) -> String;

    fn own_rates_json(&self) -> String;

    fn own_end(&self) -> String;
}

impl SharedLimitGroupExt for SharedLimitGroup {
    fn own_max_running(&self) -> String {
        format::or_empty(&self.rules.as_ref().and_then(|it| it.max_running))
    }

    fn own_rates_json(&self) -> String {
        let rates = self.rules.as_ref().and_then(|it| it.rates.as_ref());
        rates.map_or_else(String::new, |it| serde_json::to_string(it).unwrap_or_default())
    }

    fn own_end(&self) -> String {
        let end = self.rules.as_ref().and_then(|it| it.expires_at);
        end.map_or_else(String::new, |it| it.to_rfc3339())
    }
}

impl OneLimit {
    /// How many jobs of a group may run at the same time; empty: all.
    fn max_running_of(&self, group: &SharedLimitGroup) -> String {
        let own = group.rules.as_ref().and_then(|it| it.max_running);
        format::or_empty(&own.or(self.limit.max_running))
    }

    fn max_of_queue(&self) -> usize {
        MAX_LIMITS_OF_QUEUE
    }
}
