//! Every operation of the OpenAPI file, with a request that passes its checks. A new route without
//! a row here fails the tests that walk over all of them.

use fencepost_domain::{
    access::{Role, Scope},
    ids::{
        AccountId, BatchId, DeliveryId, EndpointId, InvitationId, KeyId, OperationId, SessionId,
        WorkflowId,
    },
};
use fencepost_http::openapi;

use crate::harness::{Reply, TestProject};
use reqwest::Method;
use serde_json::{Value, json};

/// A request of one operation.
#[derive(Debug, Clone)]
pub struct Operation {
    pub id: String,
    pub method: Method,
    /// With every parameter but `{project}` filled in.
    pub path: String,
    pub body: Option<Value>,
    /// A key with only one of these may; none: no key may. Empty: it takes several scopes.
    pub scopes: Option<Vec<Scope>>,
    /// A member with this role may; none: no session may, or it is not about a project.
    pub role: Option<Role>,
    /// Whether anybody may.
    pub is_public: bool,
    /// Whether it is about the account, not about a project.
    pub is_about_account: bool,
}

impl Operation {
    /// Whether the path names its project.
    pub fn is_scoped(&self) -> bool {
        self.path.starts_with("/v1/projects/{project}")
    }

    /// Under a project's own path.
    pub fn under(&self, project: &str) -> Self {
        let path = if self.is_scoped() {
            self.path.replace("{project}", project)
        } else {
            self.path.replacen("/v1/", &format!("/v1/projects/{project}/"), 1)
        };
        Self { path, ..self.clone() }
    }

    /// Calls it. `address` is where it seems to come from.
    pub async fn call(&self, t: &TestProject, credential: Option<&str>, address: &str) -> Reply {
        let url = format!("{}{}", t.url, self.path);
        let mut request =
            t.client.request(self.method.clone(), url).header("x-forwarded-for", address);
        if let Some(credential) = credential {
            request = request.bearer_auth(credential);
        }
        if let Some(body) = &self.body {
            request = request.json(body);
        }
        Reply::of(request.send().await.expect("an answer")).await
    }
}

/// What paths and bodies name.
#[derive(Debug, Clone)]
pub struct Named {
    pub job: String,
    pub workflow: String,
    pub batch: String,
    pub operation: String,
    pub key: String,
    pub account: String,
    pub invitation: String,
    pub session: String,
    pub recurring: String,
    pub worker: String,
    pub endpoint: String,
    pub delivery: String,
}

impl Named {
    /// This job, and otherwise things that are not there.
    pub fn job(id: &str) -> Self {
        Self {
            job: id.to_owned(),
            workflow: WorkflowId::generate().to_string(),
            batch: BatchId::generate().to_string(),
            operation: OperationId::generate().to_string(),
            key: KeyId::generate().to_string(),
            account: AccountId::generate().to_string(),
            invitation: InvitationId::generate().to_string(),
            session: SessionId::generate().to_string(),
            recurring: "r".to_owned(),
            worker: "w".to_owned(),
            endpoint: EndpointId::generate().to_string(),
            delivery: DeliveryId::generate().to_string(),
        }
    }
}

impl Named {
    /// What a path is answered with that names one of these, when it is not there.
    pub fn missing_in(&self, path: &str) -> Option<&'static str> {
        let codes = [
            (&self.workflow, "workflow_not_found"),
            (&self.batch, "batch_not_found"),
            (&self.operation, "operation_not_found"),
            (&self.key, "key_not_found"),
            (&self.endpoint, "endpoint_not_found"),
        ];
        let by_id = codes.iter().find(|it| path.contains(it.0.as_str())).map(|it| it.1);
        let by_name = [
            (format!("/recurring/{}", self.recurring), "recurring_job_not_found"),
            (format!("/workers/{}/", self.worker), "worker_not_found"),
        ];
        by_id.or(by_name.iter().find(|it| path.contains(&it.0)).map(|it| it.1))
    }
}

/// Every operation, with the job `job_id` in those that name a job.
pub fn operations(job_id: &str) -> Vec<Operation> {
    operations_on(&Named::job(job_id))
}

/// Every operation, on these things.
pub fn operations_on(named: &Named) -> Vec<Operation> {
    let job_id = named.job.as_str();
    let mut operations = Vec::new();
    let paths = openapi::document()["paths"].as_object().expect("paths");
    for (path, methods) in paths {
        for (method, document) in methods.as_object().expect("methods") {
            let id = document["operationId"].as_str().expect("an id").to_owned();
            let body = body(&id, job_id);
            let has_body = document.get("requestBody").is_some();
            assert!(has_body || body.is_none(), "{id} takes no body");
            let security =
                document["security"].as_array().unwrap_or_else(|| panic!("{id}: who may call it?"));
            let is_public =
                security.iter().any(|it| it.as_object().is_some_and(serde_json::Map::is_empty));
            let scopes = alternatives(security, "api_key").map(|alternatives| {
                let alone = alternatives.iter().flat_map(|names| match names.as_slice() {
                    [] => Scope::ALL.to_vec(),
                    [name] => vec![Scope::of_name(name).expect("a scope")],
                    _ => Vec::new(),
                });
                alone.collect()
            });
            // The roles of a project's routes are where sessions work.
            let below = path.replacen("/v1", "/v1/projects/{project}", 1);
            let of_project = &openapi::project_document()["paths"][below][method]["security"];
            let of_project = of_project.as_array().unwrap_or(security);
            let roles = alternatives(of_project, "session").unwrap_or_default();
            let role = roles.iter().flatten().next();
            let role = role.map(|it| Role::of_name(it).expect("a role"));
            operations.push(Operation {
                method: method.to_uppercase().parse().expect("a method"),
                path: fill(path, &id, named),
                body,
                scopes,
                role,
                is_public,
                is_about_account: !is_public && role.is_none(),
                id,
            });
        }
    }
    assert!(operations.len() >= 70, "the document lists the operations");
    operations
}

/// The alternatives of a scheme, each with its scopes or roles.
fn alternatives(security: &[Value], scheme: &str) -> Option<Vec<Vec<String>>> {
    let mut found = security.iter().filter_map(|it| it.get(scheme)).peekable();
    found.peek()?;
    let names = |it: &Value| {
        let names = it.as_array().expect("names").iter();
        names.map(|it| it.as_str().expect("a name").to_owned()).collect()
    };
    Some(found.map(names).collect())
}

fn fill(path: &str, id: &str, named: &Named) -> String {
    let path = path
        .replace("{job_id}", &named.job)
        .replace("{workflow_id}", &named.workflow)
        .replace("{batch_id}", &named.batch)
        .replace("{operation_id}", &named.operation)
        .replace("{key_id}", &named.key)
        .replace("{account_id}", &named.account)
        .replace("{invitation_id}", &named.invitation)
        .replace("{session_id}", &named.session)
        .replace("{worker_id}", &named.worker)
        .replace("{endpoint_id}", &named.endpoint)
        .replace("{delivery_id}", &named.delivery)
        .replace("{recurring_id}", &named.recurring)
        .replace("{queue}", "default")
        .replace("{group}", "acme");
    if id == "projects_delete" { format!("{path}?confirm=no") } else { path }
}

/// A body that passes its operation's checks, and changes nothing that the tests need.
fn body(id: &str, job_id: &str) -> Option<Value> {
    if let Some(body) = account_body(id).or_else(|| webhook_body(id)) {
        return Some(body);
    }
    Some(match id {
        "jobs_create" => json!({"job_type": "t"}),
        "jobs_create_batch" => json!({"jobs": [{"job_type": "t"}]}),
        "jobs_update" => json!({"priority": 1}),
        "batches_create" | "batches_cancel" => json!({}),
        "workflows_create" => json!({"jobs": [{"key": "a", "job_type": "t"}]}),
        "queues_update" => json!({"max_concurrency": 5}),
        "job_types_put" => json!({"schema": {"type": "object"}}),
        "queues_purge" => json!({"confirm": "default"}),
        id if id.contains("_bulk_") => json!({"filter": {}}),
        "jobs_replay" => json!({}),
        "dead_letters_purge" => json!({"filter": {}, "confirm": "purge"}),
        "recurring_upsert" | "recurring_create" => {
            json!({"job_type": "t", "cron_expression": "@daily"})
        }
        "recurring_preview" => json!({"cron_expression": "@daily"}),
        "workers_register" => json!({"worker_id": "w", "queues": [], "job_types": []}),
        "workers_poll" => json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 0}),
        "workers_heartbeat" => json!({"job_id": job_id, "worker_id": "w"}),
        "workers_ack" => json!({"job_id": job_id, "worker_id": "w", "status": "succeeded"}),
        "workers_ack_batch" => {
            json!({"acks": [{"job_id": job_id, "worker_id": "w", "status": "succeeded"}]})
        }
        "workers_deregister" => json!({"worker_id": "w"}),
        "workers_events" => json!({
            "worker_id": "w", "events": [{"job_id": job_id, "attempt": 1, "type": "t"}],
        }),
        "workers_logs" => json!({"worker_id": "w", "chunks": [
            {"job_id": job_id, "attempt": 1, "sequence": 0, "data": "x", "timestamp_ms": 0},
        ]}),
        "keys_create" => json!({"name": "k", "scopes": ["read"]}),
        "keys_rename" => json!({"name": "k"}),
        "keys_rotate" => json!({}),
        "keys_scanner_report" => json!([{"token": "fp_live_junk"}]),
        "keys_exchange" => {
            json!({"project": "main", "key_id": "key_01m7w3ha3aextt8pkwwdmxsmqw", "token": "x"})
        }
        "keys_report" => json!({"key": "fp_live_junk"}),
        "auth_logout"
        | "auth_verify_send"
        | "me_add_totp"
        | "me_new_recovery_codes"
        | "dead_letters_retry"
        | "jobs_cancel"
        | "jobs_pause"
        | "jobs_resume"
        | "jobs_retry"
        | "operations_abort"
        | "queues_pause"
        | "queues_resume"
        | "recurring_pause"
        | "recurring_resume"
        | "recurring_run"
        | "workers_quiet"
        | "workers_resume"
        | "workers_terminate"
        | "workflows_cancel"
        | "batches_seal" => {
            return None;
        }
        id => {
            assert!(needs_no_body(id), "{id}: say here what its body is, or that it has none");
            return None;
        }
    })
}

/// The same for webhooks.
fn webhook_body(id: &str) -> Option<Value> {
    match id {
        "webhooks_create" => Some(json!({"url": "https://example.com/hook", "events": ["job.*"]})),
        "webhooks_update" | "webhooks_rotate_secret" => Some(json!({})),
        "alarms_put" => Some(json!({"rule": "oldest_ready"})),
        "incidents_mute" => Some(json!({"seconds": 60})),
        "queues_put_push" => Some(json!({"url": "https://example.com/jobs"})),
        "queues_rotate_push_secret" => Some(json!({})),
        "queues_put_group" => Some(json!({"weight": 2})),
        "shared_limits_put" => Some(json!({"by": "group", "max_running": 2})),
        "shared_limits_put_group" => Some(json!({"max_running": 2})),
        "queues_unblock_group" => Some(json!({"head": "skip"})),
        "webhooks_replay" => Some(json!({"since": "2026-01-01T00:00:00Z", "dry_run": true})),
        _ => None,
    }
}

/// The same for what is about accounts and projects.
fn account_body(id: &str) -> Option<Value> {
    let password = "quiet otters borrow umbrellas";
    Some(match id {
        "auth_signup" => json!({"email": "new@example.com", "password": password}),
        "auth_login" => json!({"email": "unknown@example.com", "password": "wrong"}),
        "auth_login_code" => json!({"login_token": "fp_login_junk", "code": "123456"}),
        "auth_begin_device" => json!({"name": "cli"}),
        "auth_collect_device_key" => json!({"device_code": "fp_device_junk"}),
        "auth_preview_device" | "auth_refuse_device" => json!({"user_code": "BDWP-HQKS"}),
        "projects_approve_device" => json!({"user_code": "BDWP-HQKS", "preset": "full"}),
        "auth_login_passkey" => json!({"challenge_token": "x", "credential": {}}),
        "me_add_passkey" => json!({"name": "k", "challenge_token": "x", "credential": {}}),
        "auth_step_up" => json!({"password": "wrong"}),
        "me_change_email" => json!({"email": "ada@example.org"}),
        "me_confirm_email" => json!({"token": "fp_mail_junk"}),
        "me_confirm_totp" => json!({"code": "123456"}),
        "auth_refresh" => json!({"refresh_token": "fp_refresh_junk"}),
        "auth_password" => json!({"current_password": "wrong", "new_password": password}),
        "auth_password_reset" => json!({"email": "unknown@example.com"}),
        "auth_password_reset_confirm" => json!({"token": "fp_mail_junk", "new_password": password}),
        "auth_verify" => json!({"token": "fp_mail_junk"}),
        "me_delete" => json!({"password": "wrong"}),
        "invitations_accept" | "invitations_preview" => json!({"token": "fp_mail_junk"}),
        "invitations_create" => json!({"email": "guest@example.com", "role": "viewer"}),
        "members_update" => json!({"role": "viewer"}),
        "projects_create" => json!({"name": "Another"}),
        "projects_update" => json!({"name": "Main", "require_fence": "ambiguous"}),
        _ => return None,
    })
}

/// Operations that only read or delete, or say all by their path.
fn needs_no_body(id: &str) -> bool {
    let endings = ["_get", "_list", "_delete", "_revoke", "_remove", "_groups", "_next"];
    let others = [
        "audit_export",
        "webhooks_deliveries",
        "webhooks_delivery",
        "webhooks_retry",
        "webhooks_test",
        "queues_take_back",
        "workers_take_back",
        "queues_get_group",
        "queues_pause_group",
        "queues_reset_group",
        "queues_resume_group",
        "shared_limits_get_group",
        "shared_limits_reset",
        "shared_limits_reset_group",
        "queues_get_push",
        "queues_delete_push",
        "events_stream",
        "jobs_cancelled",
        "jobs_events",
        "jobs_events_stream",
        "jobs_explain",
        "jobs_logs",
        "jobs_logs_stream",
        "me_end_session",
        "me_export",
        "job_types_list",
        "me_identities",
        "me_remove_totp",
        "me_second_factors",
        "me_security_log",
        "me_sessions",
        "auth_passkey_options",
        "me_passkey_options",
        "me_remove_passkey",
        "me_unlink_identity",
        "metrics_alert_rules",
        "metrics_dashboard",
        "metrics_prometheus",
        "metrics_summary",
        "metrics_throughput",
        "queues_backlog",
        "recurring_fires",
    ];
    endings.iter().any(|it| id.ends_with(it)) || others.contains(&id)
}
