//! The codes of errors in the document: all of them as an enum that stays open, and those of each
//! operation, by status, as `x-error-codes`.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::error::CODES;

/// Codes that an operation has whenever it has their status.
const OF_STATUS: [&str; 11] = [
    "invalid_request",
    "unauthorized",
    "forbidden",
    "suspended",
    "payload_too_large",
    "precondition_failed",
    "unsupported_media_type",
    "rate_limit_exceeded",
    "request_timeout",
    "overloaded",
    "unavailable",
];
/// Codes of operations whose path has this parameter.
const OF_PARAMETER: [(&str, &str); 15] = [
    ("{project}", "project_not_found"),
    ("{job_id}", "job_not_found"),
    ("{queue}", "queue_not_found"),
    ("{batch_id}", "batch_not_found"),
    ("{workflow_id}", "workflow_not_found"),
    ("{worker_id}", "worker_not_found"),
    ("{operation_id}", "operation_not_found"),
    ("{recurring_id}", "recurring_job_not_found"),
    ("{endpoint_id}", "endpoint_not_found"),
    ("{delivery_id}", "delivery_not_found"),
    ("{alarm}", "alarm_not_found"),
    ("{incident_id}", "alarm_not_found"),
    ("{key_id}", "key_not_found"),
    ("{account_id}", "account_not_found"),
    ("{invitation_id}", "invitation_not_found"),
];
/// Codes of operations that take a key, and so are about its project.
const OF_KEYS: [&str; 2] = ["project_not_found", "quota_exceeded"];
/// Codes of operations that can be repeated with an `Idempotency-Key`.
const OF_REPEATABLE: [&str; 2] = ["idempotency_key_reuse", "idempotency_in_progress"];
/// Codes of storing jobs.
const OF_ENQUEUES: &[&str] =
    &["batch_completed", "parent_terminal", "queue_full", "unique_conflict"];
/// Codes of what a worker says of its attempt.
const OF_ATTEMPTS: &[&str] =
    &["fence_required", "invalid_state", "job_not_found", "stale_lease", "worker_mismatch"];
/// Codes of heartbeats; that of a worker may deregister it.
const OF_BEATS: &[&str] = &[
    "fence_required",
    "invalid_state",
    "job_not_found",
    "stale_lease",
    "worker_mismatch",
    "worker_not_found",
];
/// Codes of schedules.
const OF_SCHEDULES: &[&str] =
    &["invalid_cron_expression", "invalid_timezone", "recurring_job_type_conflict"];
/// Further codes of single operations.
const OF_OPERATION: &[(&str, &[&str])] = &[
    ("auth_collect_device_key", &["project_not_found", "quota_exceeded", "suspended"]),
    ("auth_login", &["code_required", "invalid_credentials"]),
    ("auth_login_code", &["invalid_code", "invalid_credentials"]),
    ("auth_login_passkey", &["invalid_credentials", "passkey_refused", "suspended"]),
    ("auth_passkey_options", &["passkey_refused"]),
    ("auth_password", &["invalid_credentials", "step_up_required"]),
    ("auth_password_reset_confirm", &["email_taken", "invalid_token"]),
    ("auth_refresh", &["invalid_credentials"]),
    ("auth_signup", &["invalid_token", "quota_exceeded", "signup_closed"]),
    ("auth_step_up", &["invalid_code", "invalid_credentials", "passkey_refused"]),
    ("auth_verify", &["email_taken", "invalid_token"]),
    ("dead_letters_delete", &["invalid_state"]),
    ("dead_letters_retry", &["invalid_state", "parent_terminal", "unique_conflict"]),
    ("invitations_accept", &["invalid_token", "quota_exceeded"]),
    ("invitations_preview", &["invalid_token"]),
    ("jobs_cancel", &["invalid_state"]),
    ("jobs_create", OF_ENQUEUES),
    ("jobs_create_batch", OF_ENQUEUES),
    ("jobs_pause", &["invalid_state"]),
    ("jobs_resume", &["invalid_state"]),
    ("jobs_retry", &["invalid_state", "parent_terminal", "unique_conflict"]),
    ("jobs_update", &["group_ordered", "invalid_state"]),
    ("keys_exchange", &["quota_exceeded", "suspended", "token_refused"]),
    ("keys_create", &["role_exceeds_caller", "step_up_required"]),
    ("keys_rename", &["role_exceeds_caller"]),
    ("keys_revoke", &["keys_remain", "role_exceeds_caller"]),
    ("keys_rotate", &["role_exceeds_caller", "step_up_required"]),
    ("me_add_passkey", &["passkey_refused", "quota_exceeded", "step_up_required"]),
    ("me_add_totp", &["step_up_required"]),
    ("me_change_email", &["step_up_required"]),
    ("me_confirm_email", &["email_taken", "invalid_token"]),
    ("me_confirm_totp", &["invalid_code", "step_up_required"]),
    (
        "me_delete",
        &["cannot_remove_owner", "invalid_credentials", "keys_remain", "step_up_required"],
    ),
    ("me_end_session", &["session_not_found"]),
    ("me_unlink_identity", &["identity_not_found", "step_up_required"]),
    ("me_new_recovery_codes", &["step_up_required"]),
    ("me_passkey_options", &["passkey_refused", "step_up_required"]),
    ("me_remove_passkey", &["passkey_not_found", "step_up_required"]),
    ("me_remove_totp", &["step_up_required"]),
    (
        "members_remove",
        &["cannot_remove_owner", "keys_remain", "role_exceeds_caller", "step_up_required"],
    ),
    ("members_update", &["cannot_remove_owner", "role_exceeds_caller", "step_up_required"]),
    (
        "invitations_create",
        &["email_not_verified", "quota_exceeded", "role_exceeds_caller", "step_up_required"],
    ),
    ("projects_approve_device", &["step_up_required"]),
    ("projects_create", &["quota_exceeded", "slug_taken"]),
    ("projects_delete", &["step_up_required"]),
    ("queues_delete", &["queue_in_use"]),
    ("queues_delete_push", &["push_not_found"]),
    ("queues_get_group", &["group_not_found"]),
    ("queues_get_push", &["push_not_found"]),
    ("queues_pause_group", &["quota_exceeded"]),
    ("queues_put_group", &["quota_exceeded"]),
    ("queues_put_push", &["email_not_verified", "step_up_required"]),
    ("queues_reset_group", &["group_not_found"]),
    ("queues_resume_group", &["group_not_found"]),
    ("queues_rotate_push_secret", &["push_not_found", "step_up_required"]),
    (
        "queues_unblock_group",
        &["group_not_blocked", "group_not_found", "parent_terminal", "unique_conflict"],
    ),
    ("shared_limits_delete", &["shared_limit_in_use", "shared_limit_not_found"]),
    ("shared_limits_get", &["shared_limit_not_found"]),
    ("shared_limits_get_group", &["shared_limit_not_found"]),
    ("shared_limits_list_groups", &["shared_limit_not_found"]),
    ("shared_limits_put", &["quota_exceeded"]),
    ("shared_limits_put_group", &["quota_exceeded", "shared_limit_not_found"]),
    ("shared_limits_reset", &["shared_limit_not_found"]),
    ("shared_limits_reset_group", &["shared_limit_not_found"]),
    ("recurring_create", OF_SCHEDULES),
    ("recurring_preview", &["invalid_cron_expression", "invalid_timezone"]),
    ("recurring_run", &["recurring_job_type_conflict"]),
    ("recurring_upsert", OF_SCHEDULES),
    ("webhooks_create", &["email_not_verified", "step_up_required"]),
    ("webhooks_retry", &["invalid_state"]),
    ("webhooks_rotate_secret", &["step_up_required"]),
    ("webhooks_update", &["email_not_verified", "step_up_required"]),
    ("workers_ack", OF_ATTEMPTS),
    ("workers_deregister", &["worker_not_found"]),
    ("workers_events", OF_ATTEMPTS),
    ("workers_heartbeat", OF_BEATS),
    ("workers_logs", OF_ATTEMPTS),
    ("workflows_create", &["batch_completed", "queue_full"]),
];

/// Adds the codes to the document.
pub fn list(document: &mut Value) {
    let all: Vec<_> = CODES.iter().map(|it| it.0).collect();
    let schemas = &mut document["components"]["schemas"];
    schemas["ErrorCode"] = json!({
        "type": "string",
        "description": "A code of this version. Later versions may add others.",
        "enum": all,
    });
    schemas["ApiError"]["properties"]["code"]["x-extensible-enum"] = json!(all);
    let paths = document.get_mut("paths").and_then(Value::as_object_mut);
    for (path, methods) in paths.into_iter().flatten() {
        for operation in methods.as_object_mut().into_iter().flat_map(Map::values_mut) {
            operation["x-error-codes"] = json!(codes_of(path, operation));
        }
    }
}

/// The codes of an operation, by status.
fn codes_of(path: &str, operation: &Value) -> BTreeMap<String, Vec<&'static str>> {
    let id = operation["operationId"].as_str().unwrap_or_default();
    let of_operation = OF_OPERATION.iter().find(|it| it.0 == id).map_or(&[][..], |it| it.1);
    let parameters = operation["parameters"].as_array().into_iter().flatten();
    let is_repeatable = parameters.into_iter().any(|it| it["name"] == "Idempotency-Key");
    let of_repeatable = OF_REPEATABLE.iter().filter(|_| is_repeatable);
    let security = operation["security"].as_array().into_iter().flatten();
    let takes_key = security.into_iter().any(|it| it.get("api_key").is_some());
    let of_keys = OF_KEYS.iter().filter(|_| takes_key);
    let of_parameter = OF_PARAMETER.iter().filter(|it| path.contains(it.0)).map(|it| it.1);
    let specific: Vec<_> = of_operation
        .iter()
        .chain(of_repeatable)
        .chain(of_keys)
        .copied()
        .chain(of_parameter)
        .collect();
    let mut codes: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for (code, status) in CODES {
        let status = status.as_str();
        let is_general = OF_STATUS.contains(code) && operation["responses"].get(status).is_some();
        if is_general || specific.contains(code) {
            codes.entry(status.to_owned()).or_default().push(*code);
        }
    }
    codes
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    #[test]
    fn each_refusal_has_a_code_and_each_code_a_refusal() {
        let document = super::super::document();
        for methods in document["paths"].as_object().expect("paths").values() {
            for operation in methods.as_object().expect("methods").values() {
                let keys = |name: &str| operation[name].as_object().expect("an object").keys();
                let refusals: BTreeSet<_> =
                    keys("responses").filter(|it| it.starts_with(['4', '5'])).collect();
                let with_codes: BTreeSet<_> = keys("x-error-codes").collect();
                assert_eq!(refusals, with_codes, "{}", operation["operationId"]);
            }
        }
    }
}
