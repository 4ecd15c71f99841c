//! Every button of the table, pressed once: where it leads, and what the API says afterwards.

use std::collections::BTreeSet;

use fencepost_console::action_table::ACTIONS;
use fencepost_domain::access::Role;

use super::Browser;
use crate::{
    harness::{LoneProject, Sink, TestProject, eventually, run_alone, until},
    people::{PASSWORD, Person},
};
use serde_json::{Value, json};

/// Presses buttons of one visitor, and notes which.
struct Presser<'a> {
    t: &'a LoneProject,
    browser: Browser,
    pressed: BTreeSet<&'static str>,
}

impl Presser<'_> {
    fn note(&mut self, operation: &str) {
        let action = ACTIONS.iter().find(|it| it.operation == operation).expect("a button");
        self.pressed.insert(action.operation);
    }

    /// Presses one of the project, for sure, and answers with where it leads.
    async fn press(&mut self, operation: &str, form: &[(&str, &str)]) -> String {
        self.note(operation);
        let form: Vec<_> = form.iter().copied().chain([("sure", "true")]).collect();
        led_by(operation, &self.browser.act(self.t, operation, &form).await)
    }

    /// Presses one that is about the visitor.
    async fn press_own(&mut self, operation: &str, form: &[(&str, &str)]) -> String {
        self.note(operation);
        led_by(operation, &self.browser.post(&format!("/console/do/{operation}"), form).await)
    }

    /// Presses one that begins an operation, and waits for its end.
    async fn press_many(&mut self, operation: &str, form: &[(&str, &str)]) -> Value {
        let place = self.press(operation, form).await;
        let id = place.split(['/', '?']).find(|it| it.starts_with("op_")).expect("an operation");
        eventually(format!("the end of operation {id}"), async || {
            let seen = self.t.get(&format!("/v1/operations/{id}")).await.is(200);
            (seen["state"] != "running").then_some(seen)
        })
        .await
    }

    /// The project's, of the API, to the visitor.
    async fn get(&self, path: &str) -> Value {
        self.t.get(path).await.is(200)
    }
}

fn led_by(operation: &str, reply: &crate::harness::Reply) -> String {
    assert_eq!(reply.status, 303, "{operation}: {}", reply.text);
    let place = reply.headers["location"].to_str().expect("text").to_owned();
    assert!(place.ends_with(&format!("done={operation}")), "{operation} leads to {place}");
    place
}

fn text(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}

/// A dead letter in this queue.
async fn dead_letter(t: &TestProject, queue: &str) -> String {
    let id = t.enqueue(json!({"queue": queue, "max_attempts": 1})).await;
    let poll = json!({"worker_id": "w", "queues": [queue], "wait_seconds": 0, "capacity": 1});
    let leased = t.polled(poll).await.remove(0);
    t.ack(&leased, "w", "failed").await.is(200);
    id
}

async fn work_with_jobs(p: &mut Presser<'_>) {
    let t = p.t;
    let fields = [
        ("job_type", "made"),
        ("queue", "by-hand"),
        ("payload", r#"{"n": 1.0}"#),
        ("unique.key", "u"),
        ("tags", "a=1 b=2"),
    ];
    let page = p.press("jobs_create", &fields).await;
    let id = page.split("/jobs/").nth(1).and_then(|it| it.split('?').next()).expect("a job");
    let made = t.job(id).await;
    assert_eq!((&made["queue"], &made["unique_key"]), (&json!("by-hand"), &json!("u")));
    assert_eq!((&made["payload"], &made["tags"]["b"]), (&json!({"n": 1.0}), &json!("2")));
    t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
    let schema = r#"{"required": ["n"], "properties": {"n": {"type": "number"}}}"#;
    p.press("job_types_put", &[("job_type", "checked"), ("schema", schema)]).await;
    let fields = [
        ("job_type", "checked"),
        ("queue", "by-hand"),
        ("check_payload", "yes"),
        ("payload.number.n", "1.50"),
    ];
    let page = p.press("jobs_create", &fields).await;
    let id = page.split("/jobs/").nth(1).and_then(|it| it.split('?').next()).expect("a job");
    assert_eq!(t.job(id).await["payload"], json!({"n": 1.5}));
    t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
    let job = t.enqueue(json!({"delay_seconds": 600})).await;
    let named = [("job_id", job.as_str())];
    p.press("jobs_update", &[named[0], ("delay_seconds", "0")]).await;
    assert_eq!(t.job(&job).await["state"], "pending");
    p.press("jobs_pause", &named).await;
    assert_eq!(t.job(&job).await["waiting_for"], "job_paused");
    p.press("jobs_resume", &named).await;
    assert_eq!(t.job(&job).await["state"], "pending");
    p.press("jobs_cancel", &named).await;
    assert_eq!(t.job(&job).await["state"], "cancelled");
    p.press("jobs_retry", &named).await;
    assert_eq!(t.job(&job).await["state"], "pending");
    let of_default = [("filter.queue", "default")];
    assert_eq!(p.press_many("jobs_bulk_cancel", &of_default).await["done"], 1);
    assert_eq!(t.job(&job).await["state"], "cancelled");
    assert_eq!(p.press_many("jobs_bulk_retry", &of_default).await["done"], 1);
    assert_eq!(t.job(&job).await["state"], "pending");
    assert_eq!(p.press_many("jobs_bulk_pause", &of_default).await["done"], 1);
    assert_eq!(p.press_many("jobs_bulk_resume", &of_default).await["done"], 1);
    assert_eq!(t.job(&job).await["state"], "pending");
    p.press("jobs_cancel", &named).await;
    assert_eq!(p.press_many("jobs_bulk_replay", &of_default).await["done"], 1);
    p.press("jobs_retry", &named).await;
    let graph = json!({"jobs": [{"key": "a", "job_type": "x", "queue": "flow"}]});
    let workflow = text(&t.post("/v1/workflows", graph).await.is(201)["id"]);
    let batch = text(&t.post("/v1/batches", json!({"name": "import"})).await.is(201)["id"]);
    p.press("batches_seal", &[("batch_id", &batch)]).await;
    assert!(p.get(&format!("/v1/batches/{batch}")).await["sealed_at"].is_string());
    p.press("workflows_cancel", &[("workflow_id", &workflow)]).await;
    assert!(p.get(&format!("/v1/workflows/{workflow}")).await["cancelled_at"].is_string());
}

async fn work_with_queues(p: &mut Presser<'_>) {
    let (t, queue) = (p.t, [("queue", "q")]);
    let job = t.enqueue(json!({"queue": "q"})).await;
    p.press("queues_pause", &queue).await;
    assert!(p.get("/v1/queues/q").await["paused_at"].is_string());
    p.press("queues_resume", &queue).await;
    assert!(p.get("/v1/queues/q").await["paused_at"].is_null());
    t.polled(json!({"worker_id": "w", "queues": ["q"]})).await;
    p.press("queues_take_back", &queue).await;
    assert_eq!(t.job(&job).await["state"], "processing", "its worker is not silent");
    p.press("workers_take_back", &[("worker_id", "w")]).await;
    assert_eq!(t.job(&job).await["state"], "pending");
    p.press("queues_update", &[queue[0], ("brake_after", "7")]).await;
    assert_eq!(p.get("/v1/queues/q").await["brake_after"], 7);
    assert_eq!(p.press_many("queues_purge", &[queue[0], ("confirm", "q")]).await["done"], 1);
    assert_eq!(t.job(&job).await["state"], "cancelled");
    t.patch("/v1/queues/mistyped", json!({"max_concurrency": 1})).await.is(200);
    p.press("queues_delete", &[("queue", "mistyped")]).await;
    t.get("/v1/queues/mistyped").await.is_error(404, "queue_not_found");
}

async fn work_with_groups(p: &mut Presser<'_>) {
    let (t, group) = (p.t, [("queue", "g"), ("group", "a/b")]);
    let of_group = "/v1/queues/g/groups/a%2Fb";
    t.patch("/v1/queues/g", json!({"groups": {"order": "strict"}})).await.is(200);
    let id = t.enqueue(json!({"queue": "g", "group": "a/b", "max_attempts": 1})).await;
    p.press("queues_pause_group", &group).await;
    assert_eq!(p.get(of_group).await["state"], "paused");
    p.press("queues_resume_group", &group).await;
    assert_eq!(p.get(of_group).await["state"], "waiting");
    let poll = json!({"worker_id": "w", "queues": ["g"], "wait_seconds": 10, "capacity": 1});
    let leased = t.polled(poll).await.remove(0);
    t.ack(&leased, "w", "failed").await.is(200);
    let named = [group[0], group[1], ("head", "skip"), ("job_id", &*id)];
    p.press("queues_unblock_group", &named).await;
    assert_eq!(t.job(&id).await["state"], "dead_letter");
    t.get(of_group).await.is_error(404, "group_not_found");
    t.patch("/v1/queues/g", json!({"groups": {"order": "none", "fair": true}})).await.is(200);
    let rules = [group[0], group[1], ("weight", "3"), ("max_running", "7")];
    p.press("queues_put_group", &rules).await;
    let own = p.get(of_group).await["rules"].clone();
    assert_eq!((&own["weight"], &own["max_running"]), (&json!(3), &json!(7)));
    p.press("queues_reset_group", &group).await;
    t.get(of_group).await.is_error(404, "group_not_found");
    let named = [("shared_limit", "stripe"), ("group", "acme")];
    let numbers = [named[0], ("by", "all"), ("max_running", "3"), ("rates", "")];
    p.press("shared_limits_put", &numbers).await;
    assert_eq!(p.get("/v1/shared-limits/stripe").await["max_running"], 3);
    p.press("queues_update", &[("queue", "g"), ("shared_limits", "stripe")]).await;
    assert_eq!(p.get("/v1/queues/g").await["shared_limits"], json!(["stripe"]));
    p.press("shared_limits_reset", &named[..1]).await;
    p.press("queues_update", &[("queue", "g"), ("shared_limits", "")]).await;
    p.press("shared_limits_delete", &named[..1]).await;
    t.get("/v1/shared-limits/stripe").await.is_error(404, "shared_limit_not_found");
    let rates = r#"[{"count": 5, "per_seconds": 60}]"#;
    p.press("shared_limits_put", &[named[0], ("by", "group"), ("rates", rates)]).await;
    p.press("shared_limits_put_group", &[named[0], named[1], ("max_running", "4")]).await;
    let groups = p.get("/v1/shared-limits/stripe/groups").await;
    assert_eq!(groups["groups"][0]["rules"]["max_running"], 4);
    p.press("shared_limits_reset_group", &named).await;
    assert_eq!(p.get("/v1/shared-limits/stripe/groups").await["groups"], json!([]));
}

async fn work_with_dead_letters(p: &mut Presser<'_>) {
    let t = p.t;
    let (one, two, three) =
        (dead_letter(t, "d").await, dead_letter(t, "d").await, dead_letter(t, "d").await);
    p.press("dead_letters_retry", &[("job_id", &one)]).await;
    assert_eq!(t.job(&one).await["state"], "pending");
    p.press("dead_letters_delete", &[("job_id", &two)]).await;
    t.get(&format!("/v1/jobs/{two}")).await.is_error(404, "job_not_found");
    let of_queue = [("filter.queue", "d")];
    assert_eq!(p.press_many("dead_letters_bulk_retry", &of_queue).await["done"], 1);
    assert_eq!(t.job(&three).await["state"], "pending");
    let four = dead_letter(t, "e").await;
    let purge = [("filter.queue", "e"), ("confirm", "purge")];
    assert_eq!(p.press_many("dead_letters_purge", &purge).await["done"], 1);
    t.get(&format!("/v1/jobs/{four}")).await.is_error(404, "job_not_found");
    // One that takes long enough to be aborted.
    for _ in 0..10 {
        dead_letter(t, "f").await;
    }
    let slowly = json!({"filter": {"queue": "f"}, "rate_per_second": 1});
    let begun = t.post("/v1/dead-letters/retry", slowly).await.is(202);
    let id = text(&begun["operation"]["id"]);
    p.press("operations_abort", &[("operation_id", &id)]).await;
    assert_eq!(p.get(&format!("/v1/operations/{id}")).await["state"], "aborted");
}

async fn work_with_schedules_and_workers(p: &mut Presser<'_>) {
    let (t, schedule) = (p.t, [("recurring_id", "nightly")]);
    let made = json!({"job_type": "report", "cron_expression": "0 3 * * *"});
    t.put("/v1/recurring/nightly", made).await.is(200);
    p.press("recurring_pause", &schedule).await;
    assert_eq!(p.get("/v1/recurring/nightly").await["enabled"], false);
    p.press("recurring_resume", &schedule).await;
    assert_eq!(p.get("/v1/recurring/nightly").await["enabled"], true);
    let place = p.press("recurring_run", &schedule).await;
    let job = place.split(['/', '?']).find(|it| it.starts_with("job_")).expect("a job");
    assert_eq!(t.job(job).await["job_type"], "report");
    p.press("recurring_delete", &schedule).await;
    t.get("/v1/recurring/nightly").await.is_error(404, "recurring_job_not_found");
    let worker = json!({"worker_id": "w1", "queues": ["q"], "job_types": ["t"]});
    t.post("/v1/workers/register", worker).await.is(200);
    for (operation, directive) in [
        ("workers_quiet", json!("quiet")),
        ("workers_terminate", json!("terminate")),
        ("workers_resume", Value::Null),
    ] {
        p.press(operation, &[("worker_id", "w1")]).await;
        let workers = p.get("/v1/workers").await["workers"].clone();
        let own = workers.as_array().and_then(|it| it.iter().find(|it| it["worker_id"] == "w1"));
        assert_eq!(own.expect("the worker")["directive"], directive, "{operation}");
    }
}

async fn work_with_alarms(p: &mut Presser<'_>) {
    let settings = [
        ("alarm", "dead_letters"),
        ("rule", "dead_letters"),
        ("threshold", "3"),
        ("queues", "q"),
        ("mail_to", "none"),
        ("enabled", "true"),
    ];
    p.press("alarms_put", &settings).await;
    let now = p.get("/v1/alarms/dead_letters").await;
    assert_eq!((&now["threshold"], &now["mail_to"]), (&json!(3), &json!("none")));
    p.press("alarms_delete", &[("alarm", "dead_letters")]).await;
    assert_eq!(p.get("/v1/alarms/dead_letters").await["threshold"], 10);
    dead_letter(p.t, "alarming").await;
    let id = eventually("an incident", async || {
        let found = p.get("/v1/incidents?state=open").await["incidents"][0]["id"].clone();
        found.is_string().then(|| text(&found))
    })
    .await;
    p.press("incidents_mute", &[("incident_id", &id), ("seconds", "60")]).await;
    assert!(p.get(&format!("/v1/incidents/{id}")).await["muted_until"].is_string());
    let letters =
        p.press_many("dead_letters_purge", &[("filter.queue", "alarming"), ("confirm", "purge")]);
    assert_eq!(letters.await["done"], 1);
}

async fn work_with_webhooks(p: &mut Presser<'_>) {
    let sink = Sink::start().await;
    let body = json!({"url": sink.url, "events": ["*"], "queues": ["q"]});
    let made = p.t.post("/v1/webhooks", body).await.is(201);
    let id = text(&made["endpoint"]["id"]);
    let id = id.as_str();
    sink.answer([(410, "")]);
    p.press("webhooks_test", &[("endpoint_id", id)]).await;
    sink.next().await;
    let path = format!("/v1/webhooks/{id}");
    let becomes = async |p: &mut Presser<'_>, state: &str| {
        until(format!("the endpoint to be {state}"), async || p.get(&path).await["state"] == state)
            .await;
    };
    becomes(p, "disabled").await;
    let kept = [("was.events", ""), ("was.queues", ""), ("was.job_types", "")];
    let enable = [&kept[..], &[("endpoint_id", id), ("enabled", "true")]].concat();
    p.press("webhooks_update", &enable).await;
    let now = p.get(&path).await;
    assert_eq!((&now["state"], &now["queues"]), (&json!("enabled"), &json!(["q"])));
    let settings = [
        ("endpoint_id", id),
        ("url", sink.url.as_str()),
        ("events", "job.cancelled"),
        ("queues", ""),
        ("timeout_seconds", "7"),
    ];
    p.press("webhooks_update", &settings).await;
    let now = p.get(&path).await;
    assert_eq!((&now["events"], &now["queues"]), (&json!(["job.cancelled"]), &json!([])));
    assert_eq!((&now["timeout_seconds"], &now["state"]), (&json!(7), &json!("enabled")));
    let sent = text(&p.get(&format!("{path}/deliveries")).await["deliveries"][0]["id"]);
    p.press("webhooks_retry", &[("endpoint_id", id), ("delivery_id", &sent)]).await;
    assert_eq!(sink.next().await.header("fencepost-delivery"), sent);
    // Only what has ended is sent again.
    until("the delivery", async || {
        p.get(&format!("{path}/deliveries")).await["deliveries"][0]["state"] == "delivered"
    })
    .await;
    let again = [("endpoint_id", id), ("since", "2020-01-01T00:00"), ("which", "all")];
    p.press("webhooks_replay", &again).await;
    assert!(!sink.next().await.header("webhook-id").is_empty());
    p.press("webhooks_delete", &[("endpoint_id", id)]).await;
    p.t.put("/v1/queues/pushed/push", json!({"url": sink.url})).await.is(201);
    p.press("queues_delete_push", &[("queue", "pushed")]).await;
    p.t.get("/v1/queues/pushed/push").await.is_error(404, "push_not_found");
    p.t.get(&path).await.is_error(404, "endpoint_not_found");
}

async fn work_with_people(p: &mut Presser<'_>, owner: &Person) {
    let t = p.t;
    let made = t.post("/v1/keys", json!({"name": "old"})).await.is(201);
    let (id, secret) = (text(&made["key"]["id"]), text(&made["secret"]));
    p.press("keys_rename", &[("key_id", &id), ("name", "new")]).await;
    let keys = p.get("/v1/keys").await["keys"].clone();
    assert!(keys.as_array().expect("keys").iter().any(|it| it["name"] == "new"), "{keys}");
    p.press("keys_revoke", &[("key_id", &id), ("revoke_keys", "true")]).await;
    let revoked = t.with_key(secret);
    revoked.get("/v1/jobs").await.is_error(401, "unauthorized");
    let vic = Person::sign_up(t, "vic@example.com").await;
    vic.join(t, Role::Viewer).await;
    let role_of = async || {
        let members = owner.get("/v1/projects/main/members").await.is(200)["members"].clone();
        let members = members.as_array().expect("members").clone();
        members.iter().find(|it| it["account_id"] == vic.account_id.as_str()).cloned()
    };
    p.press("members_update", &[("account_id", &vic.account_id), ("role", "member")]).await;
    assert_eq!(role_of().await.expect("a member")["role"], "member");
    let leaving = [("account_id", &*vic.account_id), ("revoke_keys", "true")];
    p.press("members_remove", &leaving).await;
    assert_eq!(role_of().await, None);
    let body = json!({"email": "zed@example.com", "role": "viewer"});
    let invited = owner.post("/v1/projects/main/invitations", body).await.is(201);
    let id = text(&invited["invitation"]["id"]);
    p.press("invitations_revoke", &[("invitation_id", &id)]).await;
    let open = owner.get("/v1/projects/main/invitations").await.is(200);
    assert_eq!(open["invitations"], json!([]));
    p.press("projects_update", &[("name", "Renamed"), ("require_fence", "always")]).await;
    let changed = owner.get("/v1/projects/main").await.is(200);
    assert_eq!(
        (&changed["name"], &changed["require_fence"]),
        (&json!("Renamed"), &json!("always"))
    );
}

async fn work_with_oneself(p: &mut Presser<'_>, owner: &Person) {
    let t = p.t;
    let place = p.press_own("projects_create", &[("name", "Second one"), ("mode", "test")]).await;
    let slug = t.database.text("select slug from projects where name = 'Second one'").await;
    assert_eq!(place, format!("/console/p/{slug}?done=projects_create"));
    assert_eq!(owner.get(&format!("/v1/projects/{slug}")).await.is(200)["mode"], "test");
    p.press_own("auth_verify_send", &[]).await;
    let form = [("email", "new@example.com"), ("back", "/console/account")];
    p.press_own("me_change_email", &form).await;
    p.press_own("me_remove_totp", &[("back", "/console/account")]).await;
    let sql = "insert into identities (account_id, id, issuer, subject)
               select id, gen_random_uuid(), 'https://id.example', 'me'
               from accounts where email = 'owner@example.com'";
    t.database.execute(sql).await;
    let identity = text(&owner.get("/v1/me/identities").await.is(200)["identities"][0]["id"]);
    let form = [("identity_id", identity.as_str()), ("back", "/console/account")];
    p.press_own("me_unlink_identity", &form).await;
    let sql = "insert into passkeys (account_id, id, name, credential_id, public_key, sign_count)
               select id, gen_random_uuid(), 'laptop', '\\x01', '\\xa0', 0
               from accounts where email = 'owner@example.com'";
    t.database.execute(sql).await;
    let factors = owner.get("/v1/me/second-factors").await.is(200);
    let passkey = text(&factors["passkeys"][0]["id"]);
    let form = [("passkey_id", passkey.as_str()), ("back", "/console/account")];
    p.press_own("me_remove_passkey", &form).await;
    let host = Person::sign_up(t, "host@example.com").await;
    host.join(t, Role::Owner).await;
    let theirs = text(&host.made["project"]["slug"]);
    let invite = json!({"email": "owner@example.com", "role": "viewer"});
    let invited = host.post(&format!("/v1/projects/{theirs}/invitations"), invite).await.is(201);
    let place = p.press_own("invitations_accept", &[("token", &text(&invited["token"]))]).await;
    assert_eq!(place, format!("/console/p/{theirs}?done=invitations_accept"));
    owner.get(&format!("/v1/projects/{theirs}/jobs")).await.is(200);
    let other = Person::log_in(t, "owner@example.com", PASSWORD, json!(null)).await;
    let session = text(&other.get("/v1/me").await.is(200)["session_id"]);
    p.press_own("me_end_session", &[("session_id", &session)]).await;
    other.get("/v1/me").await.is_error(401, "unauthorized");
    let new = "eight purple elephants";
    let form = [("current_password", PASSWORD), ("new_password", new)];
    p.press_own("auth_password", &form).await;
    owner.get("/v1/me").await.is_error(401, "unauthorized");
    p.press("projects_delete", &[("confirm", "main")]).await;
    t.get("/v1/jobs").await.is_error(401, "unauthorized");
    let place = p.press_own("me_delete", &[("password", new)]).await;
    assert_eq!(place, "/console/login?done=me_delete");
    assert!(!p.browser.has_session(), "the session has ended for the browser, too");
    p.browser.get(&place).await.says(200, "The account is deleted.");
}

#[test]
fn every_button_does_what_it_says() {
    run_alone(async |t| {
        let owner = Person::sign_up(t, "owner@example.com").await;
        owner.join(t, Role::Owner).await;
        let mut browser = Browser::new(t, "owner@example.com");
        browser.log_in("owner@example.com").await;
        let mut p = Presser { t, browser, pressed: BTreeSet::new() };
        work_with_jobs(&mut p).await;
        work_with_queues(&mut p).await;
        work_with_groups(&mut p).await;
        work_with_dead_letters(&mut p).await;
        work_with_schedules_and_workers(&mut p).await;
        work_with_alarms(&mut p).await;
        work_with_webhooks(&mut p).await;
        work_with_people(&mut p, &owner).await;
        work_with_oneself(&mut p, &owner).await;
        let all: BTreeSet<_> = ACTIONS.iter().map(|it| it.operation).collect();
        assert_eq!(p.pressed, all, "a button was not pressed");
    });
}
