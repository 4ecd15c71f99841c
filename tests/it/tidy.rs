//! The house rules that the compiler does not hold: see ARCHITECTURE.md, "Layers".

mod modules;
mod prose;
mod schemas;

use std::{
    fs,
    path::{Path, PathBuf},
};

const MAX_FILE_LINES: usize = 500;
const MAX_FUNCTION_LINES: usize = 70;
const MAX_STATEMENT_LINES: usize = 120;

/// Every Rust file below `dir`, with its text.
fn files(dir: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut found, mut dirs) = (Vec::new(), vec![root.join(dir)]);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).expect("a folder") {
            let path: PathBuf = entry.expect("an entry").path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|it| it == "rs") {
                let name = path.strip_prefix(root).expect("below the root").display().to_string();
                found.push((name, fs::read_to_string(&path).expect("a text")));
            }
        }
    }
    assert!(!found.is_empty());
    found.sort();
    found
}

fn module_of(file: &str) -> &str {
    file.trim_start_matches("src/").split(['/', '.']).next().unwrap_or_default()
}

/// The code of all crates, but for the libraries.
fn code_of_all() -> Vec<(String, String)> {
    ["src", "bench", "chaos", "interleavings", "proof", "tests"]
        .into_iter()
        .flat_map(files)
        .collect()
}

#[test]
fn every_file_says_what_it_is_for_and_is_not_too_long() {
    for (file, text) in code_of_all() {
        assert!(text.starts_with("//! "), "{file} does not begin with a module comment");
        let lines = text.lines().count();
        assert!(lines <= MAX_FILE_LINES, "{file} has {lines} lines");
    }
}

#[test]
fn no_function_is_too_long() {
    for (file, text) in code_of_all() {
        let lines: Vec<_> = text.lines().collect();
        for (start, line) in lines.iter().enumerate() {
            let code = line.trim_start();
            let is_function = [
                "fn ",
                "pub fn ",
                "async fn ",
                "pub async fn ",
                "pub(super) async fn ",
                "pub(super) fn ",
            ]
            .iter()
            .any(|it| code.starts_with(it));
            // A declaration without a body.
            if !is_function || code.ends_with(';') {
                continue;
            }
            let indent = &line[..line.len() - code.len()];
            let end = lines[start..].iter().position(|it| *it == format!("{indent}}}"));
            let length = end.map_or(0, |it| it + 1);
            // What a statement says is not what a function does.
            let body = &lines[start..start + length];
            let in_sql = body
                .iter()
                .skip_while(|it| !it.contains("r#\""))
                .take_while(|it| !it.contains("\"#"))
                .count();
            assert!(
                length - in_sql <= MAX_FUNCTION_LINES,
                "{file}:{} has {length} lines",
                start + 1
            );
            let has_short_statement = in_sql <= MAX_STATEMENT_LINES;
            assert!(has_short_statement, "{file}:{} has {in_sql} lines of SQL", start + 1);
        }
    }
}

#[test]
fn a_closure_of_several_lines_names_its_argument() {
    for (file, text) in code_of_all() {
        for (number, line) in (1..).zip(text.lines()) {
            let is_unnamed = line.contains("|it| {") && !line.contains('"');
            assert!(!is_unnamed, "{file}:{number}: `it` is for closures of one expression");
        }
    }
}

#[test]
fn statements_are_in_the_store_and_transactions_in_engine_and_identity() {
    for (file, text) in files("src") {
        let module = module_of(&file);
        let has_statement = ["sqlx::query", "query_as!(", "query_scalar!(", "QueryBuilder"]
            .iter()
            .any(|it| text.contains(it));
        assert!(!has_statement || module == "store", "{file} has a statement");
        let may_change_much = ["store", "engine", "identity"].contains(&module);
        assert!(
            !text.contains(".begin()") || may_change_much,
            "{file} begins a transaction: that is for the engine, or for identity"
        );
        // Adapters and the console do not depend on it at all.
        assert!(
            !file.starts_with("src/http/routes/workers") || !text.contains("fencepost_store"),
            "{file} names the store: the engine is between them"
        );
    }
}

/// Statements that look across projects on purpose: the loops' sweeps, a key before its project is
/// known, and what belongs to the whole instance.
const ACROSS_PROJECTS: &[&str] = &["src/store/connection/pools.rs", "src/store/people/projects.rs"];

#[test]
fn every_statement_on_a_tenants_table_names_the_project() {
    const TABLES: &[&str] = &[
        "jobs",
        "job_bodies",
        "finished_jobs",
        "attempts",
        "workers",
        "api_keys",
        "job_edges",
        "workflows",
        "batches",
        "job_ends",
        "workflow_jobs",
        "job_events",
        "job_logs",
        "job_log_totals",
        "job_checkpoints",
        "queues",
        "recurring_schedules",
        "idempotency_keys",
        "ended_parents",
        "revived_parents",
        "job_expiries",
        "deleted_jobs",
        "queue_counts",
        "queue_deltas",
        "unmerged_deltas",
        "queue_rates",
        "queue_handouts",
        "group_handouts",
        "group_turns",
        "group_overrides",
        "shared_limits",
        "shared_limit_keys",
        "queue_types",
        "dead_letters",
        "dead_letter_groups",
        "operations",
        "schedule_fires",
        "members",
        "invitations",
        "audit_log",
        "usage_days",
        "usage_months",
        "stored_bytes",
        "stored_byte_deltas",
        "alarms",
        "incidents",
        "webhook_endpoints",
        "queue_pushes",
    ];
    let mut statements = 0;
    for (file, text) in files("src/store") {
        if ACROSS_PROJECTS.contains(&file.as_str()) || file.starts_with("src/store/sweep") {
            continue;
        }
        for statement in text.split("sqlx::query").skip(1) {
            let statement = statement.split(".await").next().unwrap_or_default();
            let words: Vec<_> =
                statement.split(|it: char| !it.is_alphanumeric() && it != '_').collect();
            if TABLES.iter().any(|it| words.contains(it)) {
                assert!(words.contains(&"project_id"), "{file}: {statement}");
                statements += 1;
            }
        }
    }
    assert!(statements >= 15, "the statements were found: {statements}");
}

/// Indexes that serve loops across projects, by time; or look-ups by a secret.
const EXCEPTIONS: &[&str] = &[
    "jobs_expiring",
    "jobs_due",
    "deleted_jobs_by_time",
    "job_expiries_by_time",
    "api_keys_by_secret",
    "api_keys_exchanged",
    "idempotency_keys_by_age",
    "workers_beating",
    "workers_changed",
    "workers_by_age",
    "queue_rates_by_age",
    "job_stats_by_age",
    "queues_changed",
    "queue_deltas_by_transaction",
    "group_notes_by_maker",
    "operations_due",
    "operations_by_age",
    "recurring_schedules_due",
    "schedule_fires_by_age",
    "schedule_fires_missed_lately",
    "dead_letter_groups_lately",
    "api_keys_expiring",
    "invitations_by_mail",
    "incidents_by_age",
    "invitations_by_secret",
    "invitations_by_age",
    "members_by_account",
    "audit_log_by_age",
    "set_aside_by_time",
    "queues_with_group_walk",
    "queues_rate_limited",
    "job_groups_by_end",
    "group_handouts_by_look",
    "group_turns_by_rest",
    "group_overrides_by_end",
    "shared_limit_keys_by_end",
    "shared_limit_keys_by_expiry",
    "group_notes_by_transaction",
    "retention_dues_by_time",
    "usage_days_by_day",
    "batches_by_completion",
    "batches_by_joining",
    "accounts_by_verified_email",
    "accounts_by_email",
    "sessions_by_account",
    "sessions_by_age",
    "refresh_tokens_by_session",
    "mail_tokens_by_account",
    "mail_tokens_by_age",
    "projects_deleted",
    "projects_purged",
    "accounts_by_age",
    "accounts_unverified",
    "identities_by_subject",
    "passkeys_by_credential",
    "used_challenges_by_age",
    "totp_by_end",
    "email_changes_by_age",
    "login_challenges_by_account",
    "login_challenges_by_age",
    "device_logins_by_code",
    "device_logins_by_session",
    "device_logins_by_age",
    "account_log_by_age",
    "account_log_by_action",
    "outbound_events_by_age",
    "recurring_schedules_by_zone_rules",
    "webhook_endpoints_to_empty",
    "event_subscriptions_new",
    "mails_due",
    "mails_by_account",
    "mails_by_age",
];

#[test]
fn every_tenants_key_and_index_begins_with_the_project() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
    let migrations = fs::read_dir(dir).expect("a folder").map(|it| it.expect("an entry").path());
    let migrations: String =
        migrations.map(|it| fs::read_to_string(it).expect("a text") + "\n").collect();
    for line in migrations.lines().map(str::trim) {
        if let Some(key) = line.strip_prefix("primary key (") {
            assert!(key.starts_with("project_id") || key.starts_with("account_id"), "{line}");
        }
        if let Some(index) = line.split("index ").nth(1).filter(|_| line.starts_with("create")) {
            let index = index.trim_start_matches("concurrently ");
            let is_exception = EXCEPTIONS.iter().any(|it| index.starts_with(it));
            assert!(is_exception || index.contains("(project_id"), "{line}");
        }
    }
}
