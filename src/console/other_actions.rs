//! Actions with a handler of their own, because their answer is more than the next page; and names
//! in queries and forms of all actions.

/// In a page's query: the action that was just done.
pub const DONE: &str = "done";

/// Shown when a submitted form has changed nothing.
pub const NOTHING: &str = "nothing";

/// Shown when the first job of a replay was to be cancelled, and has begun or ended meanwhile.
pub const FIRST_RUNS: &str = "first_runs";
pub const FIRST_ENDED: &str = "first_ended";

/// A login provider was linked to the account.
pub const LINKED: &str = "provider_linked";

/// In a form: its idempotency key, so that two clicks are one.
pub const FIELD_IDEMPOTENCY_KEY: &str = "once";

/// In a form: the tag of the settings that it was made of. If another has changed them since, it
/// changes nothing.
pub const FIELD_IF_MATCH: &str = "if_match";

/// In a form: `*`, it only creates.
pub const FIELD_IF_NONE_MATCH: &str = "if_none_match";

/// In a form: the visitor has confirmed. Scripts ask before they send anything.
pub const SURE: &str = "sure";

/// Each with the operation, the console's route, and the message afterwards.
pub const OTHERS: &[(&str, &str, &str)] = &[
    ("auth_signup", "/console/signup", ""),
    ("auth_login", "/console/login", ""),
    (
        "auth_login_code",
        "/console/login/code",
        "The login has expired, or had too many wrong codes: log in again.",
    ),
    ("auth_login_passkey", "/console/login/passkey", ""),
    ("me_passkey_options", "/console/account/passkeys/new", ""),
    ("me_add_passkey", "/console/account/passkeys", "The passkey is added."),
    ("auth_step_up", "/console/step-up", "Thank you. Do again what you were about to do."),
    (
        "projects_approve_device",
        "/console/device",
        "It is approved. The terminal logs in within seconds: stay logged in until it says so.",
    ),
    ("auth_refuse_device", "/console/device", "The terminal is refused: its code is not valid."),
    ("auth_logout", "/console/logout", ""),
    ("me_confirm_email", "/console/email", ""),
    ("me_add_totp", "/console/account/totp", ""),
    ("me_confirm_totp", "/console/account/totp/confirm", ""),
    ("me_new_recovery_codes", "/console/account/recovery-codes", ""),
    ("auth_password_reset", "/console/reset", ""),
    (
        "auth_password_reset_confirm",
        "/console/reset/confirm",
        "The password is changed: log in with it.",
    ),
    ("auth_verify", "/console/verify", ""),
    ("jobs_replay", "/console/p/{project}/jobs/{job_id}/replay", "This is the new job."),
    ("queues_put_push", "/console/p/{project}/queues/{queue}/push", ""),
    ("queues_rotate_push_secret", "/console/p/{project}/queues/{queue}/push/rotate", ""),
    ("webhooks_create", "/console/p/{project}/webhooks", ""),
    ("webhooks_rotate_secret", "/console/p/{project}/webhooks/{endpoint_id}/rotate", ""),
    ("keys_create", "/console/p/{project}/keys", ""),
    ("keys_rotate", "/console/p/{project}/keys/{key_id}/rotate", ""),
    ("invitations_create", "/console/p/{project}/members", ""),
    ("recurring_create", "/console/p/{project}/recurring/new", "The schedule is created."),
    (
        "recurring_upsert",
        "/console/p/{project}/recurring/s/{recurring_id}/edit",
        "The schedule is saved.",
    ),
    ("recurring_preview", "/console/p/{project}/recurring/preview", ""),
];
