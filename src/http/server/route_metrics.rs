//! Requests by route. Each thread keeps the handles of its metrics: looking them up costs more than
//! counting.

use std::{cell::RefCell, collections::HashMap, time::Duration};

use axum::http::StatusCode;
use fencepost_signals::telemetry;
use metrics::{Counter, Histogram, counter, histogram};

use crate::server::route_group;

/// The handles of one route.
struct Route {
    seconds: Vec<(&'static str, Histogram)>,
    requests: Vec<(&'static str, StatusCode, Counter)>,
}

thread_local! {
    /// Bounded: by the routes of the server, seven methods, and the statuses that it answers.
    static ROUTES: RefCell<HashMap<String, Route>> = RefCell::default();
}

/// Counts and measures one request.
pub fn record(route: &str, method: &'static str, status: StatusCode, took: Duration) {
    ROUTES.with_borrow_mut(|routes| {
        if let Some(known) = routes.get_mut(route) {
            return known.record(route, method, status, took);
        }
        let new = Route { seconds: Vec::new(), requests: Vec::new() };
        routes.entry(route.to_owned()).or_insert(new).record(route, method, status, took);
    });
}

impl Route {
    fn record(&mut self, route: &str, method: &'static str, status: StatusCode, took: Duration) {
        let at = self.requests.iter().position(|it| (it.0, it.1) == (method, status));
        let at = at.unwrap_or_else(|| {
            let label = route_group::label(route).to_owned();
            let code = status.as_str().to_owned();
            let requests = counter!(
                telemetry::HTTP_REQUESTS, "route" => label, "method" => method, "status" => code
            );
            self.requests.push((method, status, requests));
            self.requests.len() - 1
        });
        self.requests[at].2.increment(1);
        let at = self.seconds.iter().position(|it| it.0 == method);
        let at = at.unwrap_or_else(|| {
            let group = route_group::of(route, method);
            self.seconds.push((method, histogram!(telemetry::HTTP_SECONDS, "group" => group)));
            self.seconds.len() - 1
        });
        self.seconds[at].1.record(took.as_secs_f64());
    }
}
