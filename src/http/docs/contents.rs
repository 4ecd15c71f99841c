//! The order of the documentation: groups of pages, by their paths below `docs/` without `.md`.

/// The start page.
pub const START: &str = "index";

/// Groups in the order of the menu. Pages that no group names are in [`REST`].
pub const GROUPS: [(&str, &[&str]); 6] = [
    ("Start", &[START, "concepts", "worker-guide", "clients", "glossary"]),
    (
        "Guides",
        &[
            "guides/find-a-job",
            "guides/change-waiting-jobs",
            "guides/job-types",
            "guides/send-mail",
            "guides/order-by-customer",
            "guides/limited-api",
            "guides/cron",
            "guides/fan-out",
            "guides/long-jobs",
            "guides/resume-long-work",
            "guides/alarms",
            "guides/webhooks",
            "guides/push",
            "guides/effects-once",
            "guides/priorities",
            "guides/deploy-workers",
            "guides/test-locally",
            "guides/many-tenants",
            "guides/treat-customers-fairly",
            "guides/share-a-limit",
        ],
    ),
    (
        "Migrate",
        &[
            "compare",
            "migrate/sidekiq",
            "migrate/bullmq",
            "migrate/celery",
            "migrate/sqs",
            "migrate/qstash",
            "migrate/oban",
            "migrate/temporal",
            "migrate/hatchet",
            "protocols",
        ],
    ),
    (
        "Reference",
        &[
            "schedules",
            "status-codes",
            "errors",
            "limits",
            "guarantees",
            "proof",
            "versions",
            "not-yet",
        ],
    ),
    ("Accounts", &["accounts", "console"]),
    (
        "Operate",
        &[
            "deploy",
            "high-availability",
            "capacity",
            "operations",
            "configuration",
            "metrics",
            "benchmarks",
        ],
    ),
];

/// Folders whose pages have a group of their own, at the end of the menu.
pub const REST: [(&str, &str); 3] =
    [("API", "reference/"), ("Runbooks", "runbooks/"), ("Decisions", "adr/")];

/// All pages of the groups, in their order.
pub fn in_order() -> impl Iterator<Item = &'static str> {
    GROUPS.iter().flat_map(|(_, pages)| pages.iter().copied())
}
