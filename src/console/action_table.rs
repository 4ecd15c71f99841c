//! The actions of buttons. Each is one operation of the API, so this table is everything that the
//! console can change; a test compares it with the OpenAPI document.

pub use super::other_actions::{
    DONE, FIELD_IDEMPOTENCY_KEY, FIELD_IF_MATCH, FIELD_IF_NONE_MATCH, FIRST_ENDED, FIRST_RUNS,
    LINKED, NOTHING, OTHERS, SURE,
};
use super::{
    action_fields::{
        ALARM, ENDPOINT, GROUP, GROUP_OF_LIMIT, HEAD, JOBS, NEW_JOB, PAUSE, PURGE, QUEUE, REASON,
        REDRIVE, REPLAY, SCHEMA, SHARED_LIMIT, TYPE,
    },
    form::{Field, Fields, encode},
    location::segment,
};

/// The API path that an operation is below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plane {
    /// `/v1/projects/{project}`.
    Project,
    /// `/v1`.
    People,
}

/// The page after an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// The page of the button.
    Back,
    /// The operation that was started.
    Operation,
    /// The job that was created.
    Job,
    /// The project that was created.
    Project,
    Login,
}

/// An action.
#[derive(Debug, Clone, Copy)]
pub struct Action {
    /// The operation's id in the OpenAPI document.
    pub operation: &'static str,
    pub plane: Plane,
    pub method: &'static str,
    /// Its path; names in braces are fields of the form.
    pub path: &'static str,
    /// The fields of its body; empty: no body.
    pub fields: &'static [Field],
    /// The page after the action.
    pub then: Destination,
    /// The question before it is done, if it cannot be undone.
    pub asks: Option<&'static str>,
    done: &'static str,
}

const fn on(
    operation: &'static str,
    method: &'static str,
    path: &'static str,
    fields: &'static [Field],
    done: &'static str,
) -> Action {
    Action {
        operation,
        plane: Plane::Project,
        method,
        path,
        fields,
        then: Destination::Back,
        asks: None,
        done,
    }
}

impl Action {
    const fn then(self, then: Destination) -> Self {
        Self { then, ..self }
    }

    const fn asking(self, question: &'static str) -> Self {
        Self { asks: Some(question), ..self }
    }

    const fn of_people(self) -> Self {
        Self { plane: Plane::People, ..self }
    }

    /// Its path, filled in from the form.
    #[must_use]
    pub fn fill(&self, form: &Fields) -> String {
        let mut parts = self.path.split(['{', '}']);
        let mut path = parts.next().unwrap_or_default().to_owned();
        while let Some(name) = parts.next() {
            path.push_str(&segment(form.text(name)));
            path.push_str(parts.next().unwrap_or_default());
        }
        path
    }
}

const SHARED: &str = "/shared-limits/{shared_limit}";
const GROUP_OF_SHARED: &str = "/shared-limits/{shared_limit}/groups/{group}";
const RESET_GROUP_OF_SHARED: &str = "/shared-limits/{shared_limit}/groups/{group}/reset";

/// An operation on jobs of the list.
const fn many(operation: &'static str, path: &'static str, done: &'static str) -> Action {
    on(operation, "POST", path, JOBS, done).then(Destination::Operation)
}

/// All actions.
pub const ACTIONS: &[Action] = &[
    on("jobs_create", "POST", "/jobs", NEW_JOB, "The job is enqueued.").then(Destination::Job),
    on(
        "jobs_cancel",
        "POST",
        "/jobs/{job_id}/cancel",
        REASON,
        "The job is cancelled; if it runs, its worker is asked to stop.",
    ),
    on("jobs_retry", "POST", "/jobs/{job_id}/retry", REASON, "The job will be retried."),
    on(
        "jobs_pause",
        "POST",
        "/jobs/{job_id}/pause",
        REASON,
        "The job is paused: it starts when you resume it.",
    ),
    on("jobs_resume", "POST", "/jobs/{job_id}/resume", REASON, "The job is resumed."),
    on(
        "jobs_update",
        "PATCH",
        "/jobs/{job_id}",
        &[Field::Number("delay_seconds"), Field::Number("priority")],
        "The job is due: it runs as soon as its other conditions are met.",
    ),
    many("jobs_bulk_cancel", "/jobs/cancel", "The operation has started: it cancels the jobs."),
    many("jobs_bulk_retry", "/jobs/retry", "The operation has started: it retries the jobs."),
    many("jobs_bulk_pause", "/jobs/pause", "The operation has started: it pauses the jobs."),
    many("jobs_bulk_resume", "/jobs/resume", "The operation has started: it resumes the jobs."),
    many("jobs_bulk_replay", "/jobs/replay", "The operation has started: it replays the jobs."),
    on(
        "queues_pause",
        "POST",
        "/queues/{queue}/pause",
        TYPE,
        "Paused: it accepts jobs, but none is claimed.",
    ),
    on(
        "queues_delete_push",
        "DELETE",
        "/queues/{queue}/push",
        &[],
        "The push has ended: the jobs wait for workers.",
    )
    .asking("End the push? The jobs wait for workers."),
    on("queues_resume", "POST", "/queues/{queue}/resume", TYPE, "Resumed: jobs are claimed again."),
    on(
        "queues_pause_group",
        "POST",
        "/queues/{queue}/groups/{group}/pause",
        PAUSE,
        "Paused: its jobs wait.",
    ),
    on("queues_put_group", "PUT", "/queues/{queue}/groups/{group}", GROUP, "Its rules are saved."),
    on("queues_reset_group", "POST", "/queues/{queue}/groups/{group}/reset", &[], "It is reset."),
    on("queues_resume_group", "POST", "/queues/{queue}/groups/{group}/resume", &[], "Resumed."),
    on(
        "queues_unblock_group",
        "POST",
        "/queues/{queue}/groups/{group}/unblock",
        HEAD,
        "Unblocked.",
    ),
    on("queues_delete", "DELETE", "/queues/{queue}", &[], "The queue is deleted.")
        .asking("Delete this queue, with its settings?"),
    on("shared_limits_put", "PUT", SHARED, SHARED_LIMIT, "The limit is saved."),
    on("shared_limits_reset", "POST", "/shared-limits/{shared_limit}/reset", &[], "Reset."),
    on("shared_limits_delete", "DELETE", SHARED, &[], "Deleted.").asking("Delete this limit?"),
    on("shared_limits_put_group", "PUT", GROUP_OF_SHARED, GROUP_OF_LIMIT, "It is saved."),
    on("shared_limits_reset_group", "POST", RESET_GROUP_OF_SHARED, &[], "It is reset."),
    on("job_types_put", "PUT", "/job-types/{job_type}", SCHEMA, "The schema is saved."),
    on("queues_update", "PATCH", "/queues/{queue}", QUEUE, "The queue's settings are saved."),
    on(
        "queues_purge",
        "POST",
        "/queues/{queue}/purge",
        &[Field::Text("confirm")],
        "The operation has started: it purges the queue.",
    )
    .then(Destination::Operation),
    on(
        "dead_letters_retry",
        "POST",
        "/dead-letters/{job_id}/retry",
        REASON,
        "The job will be retried.",
    ),
    on("dead_letters_delete", "DELETE", "/dead-letters/{job_id}", &[], "It is deleted.")
        .asking("Delete this dead letter? This cannot be undone."),
    on(
        "dead_letters_bulk_retry",
        "POST",
        "/dead-letters/retry",
        REDRIVE,
        "The operation has started: it retries the dead letters.",
    )
    .then(Destination::Operation),
    on(
        "dead_letters_purge",
        "POST",
        "/dead-letters/purge",
        PURGE,
        "The operation has started: it deletes the dead letters.",
    )
    .then(Destination::Operation),
    on(
        "operations_abort",
        "POST",
        "/operations/{operation_id}/abort",
        &[],
        "The operation is aborted; jobs that were already handled are not undone.",
    ),
    on("recurring_delete", "DELETE", "/recurring/{recurring_id}", &[], "The schedule is deleted.")
        .asking("Delete this schedule?"),
    on(
        "recurring_pause",
        "POST",
        "/recurring/{recurring_id}/pause",
        &[],
        "The schedule is paused.",
    ),
    on(
        "recurring_resume",
        "POST",
        "/recurring/{recurring_id}/resume",
        &[],
        "The schedule fires again.",
    ),
    on("recurring_run", "POST", "/recurring/{recurring_id}/run", &[], "The job is enqueued.")
        .then(Destination::Job),
    on(
        "workers_quiet",
        "POST",
        "/workers/{worker_id}/quiet",
        &[],
        "The worker gets the directive with its next heartbeat, and takes no more jobs.",
    ),
    on(
        "workers_terminate",
        "POST",
        "/workers/{worker_id}/terminate",
        &[],
        "The worker gets the directive with its next heartbeat, and stops.",
    )
    .asking("Terminate this worker?"),
    on("workers_resume", "POST", "/workers/{worker_id}/resume", &[], "The worker resumes."),
    on(
        "workers_take_back",
        "POST",
        "/workers/{worker_id}/take-back",
        REASON,
        "The jobs that the worker held wait again.",
    )
    .asking("Take back all jobs of this worker? If it still works on them, they run twice."),
    on(
        "queues_take_back",
        "POST",
        "/queues/{queue}/take-back",
        REASON,
        "The jobs that silent workers held wait again.",
    )
    .asking("Take back the jobs of silent workers? If one still works, they run twice."),
    on(
        "workflows_cancel",
        "POST",
        "/workflows/{workflow_id}/cancel",
        REASON,
        "The workflow is being cancelled: workers of its running jobs are asked to stop.",
    )
    .asking("Cancel all jobs of this workflow that have not ended?"),
    on(
        "batches_seal",
        "POST",
        "/batches/{batch_id}/seal",
        &[],
        "The batch is sealed: it completes when all of its jobs have ended.",
    ),
    on("webhooks_update", "PATCH", "/webhooks/{endpoint_id}", ENDPOINT, "The endpoint is changed."),
    on(
        "webhooks_delete",
        "DELETE",
        "/webhooks/{endpoint_id}",
        &[],
        "The endpoint is deleted, and what waited for it is cancelled.",
    )
    .asking("Delete this endpoint? Deliveries that wait are cancelled."),
    on(
        "webhooks_test",
        "POST",
        "/webhooks/{endpoint_id}/test",
        &[],
        "A test is sent: the newest delivery shows the answer.",
    ),
    on(
        "webhooks_replay",
        "POST",
        "/webhooks/{endpoint_id}/replay",
        REPLAY,
        "The deliveries are being sent again.",
    ),
    on(
        "webhooks_retry",
        "POST",
        "/webhooks/{endpoint_id}/deliveries/{delivery_id}/retry",
        &[],
        "The delivery is sent again.",
    ),
    on("alarms_put", "PUT", "/alarms/{alarm}", ALARM, "The alarm is changed."),
    on("alarms_delete", "DELETE", "/alarms/{alarm}", &[], "What was set of it is deleted."),
    on(
        "incidents_mute",
        "POST",
        "/incidents/{incident_id}/mute",
        &[Field::Number("seconds")],
        "It is muted.",
    ),
    on(
        "keys_revoke",
        "DELETE",
        "/keys/{key_id}?revoke_keys={revoke_keys}",
        &[],
        "The key is revoked, on every node within five seconds.",
    )
    .asking("Revoke this key? Clients that use it are refused within five seconds."),
    on("keys_rename", "PATCH", "/keys/{key_id}", &[Field::Text("name")], "The key is renamed."),
    on(
        "members_update",
        "PATCH",
        "/members/{account_id}",
        &[Field::Text("role")],
        "The member's role is changed.",
    ),
    on(
        "members_remove",
        "DELETE",
        "/members/{account_id}?revoke_keys={revoke_keys}",
        &[],
        "The member was removed.",
    )
    .asking("Remove this member? Access to the project ends immediately."),
    on(
        "invitations_revoke",
        "DELETE",
        "/invitations/{invitation_id}",
        &[],
        "The invitation is revoked.",
    )
    .asking("Revoke this invitation?"),
    on(
        "projects_update",
        "PATCH",
        "",
        &[
            Field::Text("name"),
            Field::Text("require_fence"),
            Field::NumberOrNull("default_lease_seconds"),
            Field::Flag("losses_count_as_failures"),
        ],
        "The project is changed.",
    )
    .then(Destination::Project),
    on("projects_delete", "DELETE", "?confirm={confirm}", &[], "The project is deleted."),
    on(
        "projects_create",
        "POST",
        "/projects",
        &[Field::Text("name"), Field::Text("mode")],
        "The project is created.",
    )
    .of_people()
    .then(Destination::Project),
    on("me_end_session", "DELETE", "/me/sessions/{session_id}", &[], "The session was revoked.")
        .of_people(),
    on(
        "me_remove_totp",
        "DELETE",
        "/me/second-factors/totp",
        &[],
        "The authenticator app is removed.",
    )
    .of_people(),
    on(
        "me_unlink_identity",
        "DELETE",
        "/me/identities/{identity_id}",
        &[],
        "It cannot log in to your account any more.",
    )
    .of_people(),
    on(
        "me_remove_passkey",
        "DELETE",
        "/me/passkeys/{passkey_id}",
        &[],
        "The passkey cannot log in any more. Remove it on your device, too.",
    )
    .of_people(),
    on(
        "me_change_email",
        "POST",
        "/me/email",
        &[Field::Text("email")],
        "The mails were sent. Open their links within two days.",
    )
    .of_people(),
    on("auth_verify_send", "POST", "/auth/verify/send", &[], "The mail was sent.").of_people(),
    on(
        "auth_password",
        "POST",
        "/auth/password",
        &[
            Field::Text("current_password"),
            Field::Text("new_password"),
            Field::Flag("remove_passkeys"),
            Field::Flag("remove_identities"),
        ],
        "The password is changed; all other sessions were revoked.",
    )
    .of_people(),
    on("invitations_accept", "POST", "/invitations/accept", &[Field::Text("token")], "Accepted.")
        .of_people()
        .then(Destination::Project),
    on(
        "me_delete",
        "POST",
        "/me/delete",
        &[Field::Text("password"), Field::Flag("revoke_keys")],
        "The account is deleted.",
    )
    .of_people()
    .then(Destination::Login),
];

/// A page with the message of what was done.
#[must_use]
pub fn saying(page: &str, done: &str) -> String {
    let separator = if page.contains('?') { '&' } else { '?' };
    format!("{page}{separator}{}", encode(&[(DONE, done)]))
}

/// The action of an operation.
#[must_use]
pub fn find(operation: &str, plane: Plane) -> Option<&'static Action> {
    ACTIONS.iter().find(|it| it.operation == operation && it.plane == plane)
}

/// The message after an operation.
#[must_use]
pub fn said(operation: &str) -> Option<&'static str> {
    let done = ACTIONS.iter().map(|it| (it.operation, it.done));
    let others = OTHERS.iter().map(|(operation, _, said)| (*operation, *said));
    let more = [
        (NOTHING, "Nothing was changed."),
        (LINKED, "You can log in with it from now on."),
        (FIRST_RUNS, "This is the new job. The first one runs: its worker was asked to stop."),
        (FIRST_ENDED, "This is the new job. The first one had ended before it could be cancelled."),
    ];
    let said = done.chain(others).chain(more).find(|it| it.0 == operation).map(|it| it.1);
    said.filter(|it| !it.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_is_added_to_whatever_query_there_is() {
        assert_eq!(saying("/console", "a_b"), "/console?done=a_b");
        assert_eq!(
            saying("/console/p/x/jobs?queue=q", "a_b"),
            "/console/p/x/jobs?queue=q&done=a_b"
        );
    }

    #[test]
    fn what_is_in_braces_comes_from_the_form_and_stays_one_segment() {
        let form = Fields(vec![("queue".to_owned(), "a/b?c".to_owned())]);
        let pause = find("queues_pause", Plane::Project).expect("a button");
        assert_eq!(pause.fill(&form), "/queues/a%2Fb%3Fc/pause");
        assert_eq!(pause.fill(&Fields::default()), "/queues//pause");
    }
}
