//! What operators do about a project or an account, and the mail to the owner of an account.

use fencepost_domain::access::Role;
use fencepost_store::sweep::purge;
use serde_json::{Value, json};
use std::process::{Command, Output};

use super::{
    PASSWORD, Person,
    accounts::{open_server, secret_in},
    address_of, post_from,
};
use crate::harness::{
    LoneProject, Stage, TestProject, TestServer, fresh_database, limited, run_alone, until,
};

/// Runs a command of the operator.
pub fn operate(t: &LoneProject, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fencepost"))
        .args(args)
        .env_clear()
        .env("FENCEPOST_DATABASE_URL", &t.database.url)
        .output()
        .expect("it runs")
}

pub fn printed(t: &LoneProject, args: &[&str]) -> String {
    let run = operate(t, args);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    assert!(run.status.success(), "{args:?}: {}", text(run.stderr));
    text(run.stdout)
}

/// Nodes learn of it within seconds.
async fn until_status(t: &TestProject, path: &str, status: u16) {
    until(format!("{path} to answer with {status}"), async || {
        t.get(path).await.status.as_u16() == status
    })
    .await;
}

#[test]
fn workers_of_a_suspended_project_can_drain_and_nothing_else_is_answered() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        ada.join_project(t, "main", Role::Owner).await;
        t.enqueue(json!({"job_type": "a"})).await;
        t.enqueue(json!({"job_type": "a"})).await;
        let job = t.lease("w").await;
        let every_second = json!({"job_type": "tick", "cron_expression": "* * * * * *"});
        t.put("/v1/recurring/often", every_second).await;
        let poll = json!({"worker_id": "p", "queues": ["other"], "wait_seconds": 30});
        let suspend = async {
            let seen = "select count(*) from workers where worker_id = 'p'";
            t.database.until_at_least(seen, 1).await;
            printed(t, &["projects", "suspend", "main", "--reason", "it sends spam"])
        };
        let (parked, _) = tokio::join!(t.post("/v1/workers/poll", poll.clone()), suspend);
        let error = parked.is_error(403, "suspended");
        assert_eq!(error["message"], "the operator of this server has suspended the project");
        t.get("/v1/jobs").await.is_error(403, "suspended");
        t.post("/v1/jobs", json!({"job_type": "a"})).await.is_error(403, "suspended");
        t.post("/v1/workers/poll", poll).await.is_error(403, "suspended");
        t.heartbeat(&job, "w").await.is(200);
        t.ack(&job, "w", "succeeded").await.is(200);
        ada.get("/v1/projects/main/jobs").await.is_error(403, "suspended");
        let listed = ada.get("/v1/projects").await.is(200).to_string();
        assert!(listed.contains(r#""suspended_at":"2"#), "{listed}");
        let projects = ada.get("/v1/projects").await.is(200);
        let projects = projects["projects"].as_array().expect("projects").clone();
        let main = projects.into_iter().find(|it| it["slug"] == "main").expect("the project");
        let main_id = main["id"].as_str().expect("an id").to_owned();
        let list = printed(t, &["projects", "list"]);
        let line = list.lines().find(|it| it.contains(" main ")).expect("its line").to_owned();
        assert!(line.contains("suspended"), "{line}");
        // From here on no tick creates a job.
        let missed = "select count(*) from schedule_fires where outcome = 'missed'";
        t.database.until_at_least(missed, 1).await;
        printed(t, &["projects", "resume", "main"]);
        until_status(t, "/v1/jobs", 200).await;
        t.delete("/v1/recurring/often").await.is_empty(204);
        let log = printed(t, &["audit", &main_id]);
        assert!(log.contains("project.suspended") && log.contains("it sends spam"), "{log}");
        assert!(log.contains("project.resumed"), "{log}");
    });
}

#[test]
fn a_suspended_account_has_no_session_and_gets_none() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        let eve = Person::sign_up_unverified(t, "eve@example.com").await;
        let list = printed(t, &["accounts", "list"]);
        let line = |email: &str| list.lines().find(|it| it.ends_with(email)).map(str::to_owned);
        assert!(line("ada@example.com").is_some_and(|it| it.contains(" verified, ")), "{list}");
        assert!(line("eve@example.com").is_some_and(|it| it.contains(" not verified, ")), "{list}");
        let done = printed(t, &["accounts", "suspend", "ada@example.com"]);
        assert!(done.contains("1 sessions ended") || done.contains("2 sessions ended"), "{done}");
        until("the session to end", async || ada.get("/v1/me").await.status == 401).await;
        let login = |password: &str| json!({"email": "ada@example.com", "password": password});
        let address = address_of("ada@example.com");
        let refused = post_from(t, "/v1/auth/login", login(PASSWORD), &address).await;
        refused.is_error(403, "suspended");
        let wrong = post_from(t, "/v1/auth/login", login("wrong"), &address).await;
        wrong.is_error(401, "invalid_credentials");
        eve.get("/v1/me").await.is(200);
        printed(t, &["accounts", "resume", "ada@example.com"]);
        post_from(t, "/v1/auth/login", login(PASSWORD), &address).await.is(200);
        printed(t, &["accounts", "end-sessions", "--all"]);
        until("the session to end", async || eve.get("/v1/me").await.status == 401).await;
        for junk in ["unknown@example.com", "x", "acct_01m7w3ha3aextt8pkwwdmxsmqw"] {
            assert!(!operate(t, &["accounts", "suspend", junk]).status.success(), "{junk}");
        }
    });
}

#[test]
fn an_account_has_a_log_of_logins_and_changes_and_its_owner_gets_mail() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        let ada = Person::sign_up(&t, "ada@example.com").await;
        secret_in(&server.next_mail().await);
        let login = |agent: &'static str, password: &str| {
            let body = json!({"email": "ada@example.com", "password": password});
            let request = t.client.post(format!("{}/v1/auth/login", t.url)).json(&body);
            let from = address_of("ada@example.com");
            request.header("user-agent", agent).header("x-forwarded-for", from).send()
        };
        assert_eq!(login("curl", "wrong wrong wrong").await.expect("one").status(), 401);
        assert_eq!(login("a new one", PASSWORD).await.expect("one").status(), 200);
        let mail = server.next_mail().await;
        assert_eq!(mail.to, "ada@example.com");
        assert_eq!(mail.subject, "A new device logged in to your account");
        let text = mail.text;
        assert!(
            text.contains(&address_of("ada@example.com")) && !text.contains("a new one"),
            "{text}"
        );
        assert_eq!(login("a new one", PASSWORD).await.expect("one").status(), 200);
        let other = "loud herons lend galoshes";
        let change = json!({"current_password": PASSWORD, "new_password": other});
        ada.post("/v1/auth/password", change).await.is_empty(204);
        let mail = server.next_mail().await;
        assert_eq!(mail.subject, "The password of your account was changed");
        let actions = async || {
            let log = ada.get("/v1/me/security-log").await.is(200);
            let entries = log["entries"].as_array().expect("entries").clone();
            let name = |it: &Value| it["action"].as_str().expect("a name").to_owned();
            entries.iter().map(name).collect::<Vec<_>>()
        };
        let expected = [
            "account.created",
            "login.failed",
            "login.new_device",
            "login.succeeded",
            "password.changed",
        ];
        let mut seen = actions().await;
        // A failed login is noted after its answer.
        while !seen.iter().any(|it| it == "login.failed") {
            seen = actions().await;
        }
        for action in expected {
            assert!(seen.iter().any(|it| it == action), "{action}: {seen:?}");
        }
        assert_eq!(seen.first().map(String::as_str), Some("password.changed"), "newest first");
        let export = ada.get("/v1/me/export").await.is(200);
        assert_eq!(export["security_log"][0]["action"], "password.changed");
        // A stranger who claims the address learns nothing of its owner.
        let claim = json!({"email": "ada@example.com", "password": "eight purple elephants"});
        post_from(&t, "/v1/auth/signup", claim, "192.0.2.1").await.is(201);
        let claimant =
            Person::log_in(&t, "ada@example.com", "eight purple elephants", Value::Null).await;
        assert_eq!(login("curl", "wrong again, sorry").await.expect("one").status(), 401);
        let failed = "select count(*) from account_log where action = 'login.failed'";
        t.database.until_at_least(failed, 2).await;
        let seen = claimant.get("/v1/me/security-log").await.is(200).to_string();
        assert!(!seen.contains("login.failed"), "{seen}");
        let eve = Person::sign_up(&t, "eve@example.com").await;
        let of_eve = eve.get("/v1/me/security-log").await.is(200).to_string();
        assert!(!of_eve.contains("password.changed"), "{of_eve}");
        server.stop().await;
    });
}

#[test]
fn the_audit_log_of_a_deleted_project_stays_and_says_who_deleted_it() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        let project = ada.made["project"].clone();
        let text = |name: &str| project[name].as_str().expect("a text");
        let (id, slug) = (text("id"), text("slug"));
        assert!(slug.starts_with("ada-example-com-"), "a name reveals nothing of others: {slug}");
        let invited = json!({"email": "grace@example.com", "role": "member"});
        ada.post(&format!("/v1/projects/{slug}/invitations"), invited).await.is(201);
        let forget = format!("select forget_invitees(id, 10) from projects where slug = '{slug}'");
        let refused = sqlx::raw_sql(sqlx::AssertSqlSafe(forget));
        let refused = refused.execute(&mut t.database.connect().await).await;
        assert!(refused.is_err(), "the log of a project that lives is never changed");
        let path = format!("/v1/projects/{slug}?confirm={slug}");
        ada.send(reqwest::Method::DELETE, &path, None).await.is_empty(204);
        let long_ago = "update projects set deleted_at = deleted_at - interval '1 hour'";
        t.database.execute(long_ago).await;
        let purged = "select count(*) from projects where purged_at is not null";
        t.database.until_at_least(purged, 1).await;
        let left = "select count(*) from api_keys
                    where project_id in (select id from projects where purged_at is not null)";
        assert_eq!(t.database.number(left).await, 0);
        let log = printed(t, &["audit", id]);
        assert!(log.contains("invitation.created") && log.contains("sha256:"), "{log}");
        assert!(!log.contains("grace"), "{log}");
        let names =
            "select count(*) from projects where purged_at is not null and name = 'deleted'";
        assert_eq!(t.database.number(names).await, 0);
        let mut conn = t.database.connect().await;
        purge::forget_names(&mut conn, 90).await.expect("it runs");
        assert_eq!(t.database.number(names).await, 0, "it was purged just now");
        purge::forget_names(&mut conn, 0).await.expect("it runs");
        assert_eq!(t.database.number(names).await, 1);
        let last: Value = serde_json::from_str(log.lines().next().expect("a line")).expect("JSON");
        assert_eq!(last["action"], "project.deleted");
        assert_eq!(last["actor_id"], json!(ada.account_id));
        assert_eq!(last["before"]["slug"], json!(slug));
        assert!(!operate(t, &["audit", "proj_01m7w3ha3aextt8pkwwdmxsmqw"]).status.success());
    });
}

#[test]
fn a_bulk_operation_of_a_suspended_project_waits_until_it_is_resumed() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"job_type": "a"})).await;
        t.database.execute("update projects set suspended_at = now() where slug = 'main'").await;
        let row = "insert into operations (project_id, id, kind, filter, expected)
                   select id, gen_random_uuid(), 'queue_purge', '{\"queue\": \"default\"}', 1
                   from projects where slug = 'main'";
        t.database.execute(row).await;
        let waits = "select count(*) from operations where next_step_at > now() + interval '9 s'";
        t.database.until_at_least(waits, 1).await;
        assert_eq!(t.database.number("select count(*) from jobs").await, 1, "nothing is cancelled");
        t.database.execute("update projects set suspended_at = null").await;
        t.database.execute("update operations set next_step_at = now()").await;
        until_status(t, "/v1/jobs", 200).await;
        t.job_becomes(&id, "cancelled").await;
    });
}

#[test]
fn callbacks_of_a_suspended_project_wait_until_it_is_resumed() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        let other = server.project("other").await;
        let job = json!({"job_type": "a", "on_success": {"job_type": "next", "queue": "next"}});
        for t in [&t, &other] {
            t.enqueue(job.clone()).await;
        }
        let leased = t.lease("w").await;
        t.database.execute("update projects set suspended_at = now() where slug = 'main'").await;
        t.ack(&leased, "w", "succeeded").await.is(200);
        let leased = other.lease("w").await;
        other.ack(&leased, "w", "succeeded").await.is(200);
        let next = async |slug: &str| {
            let next = "select count(*) from jobs where queue = 'next' and project_id =
                        (select id from projects where slug = ";
            t.database.number(&format!("{next}'{slug}')")).await
        };
        until("the next callback of the other project", async || next("other").await != 0).await;
        assert_eq!(next("main").await, 0, "a pass serves both, by the order of their ids");
        t.database.execute("update projects set suspended_at = null").await;
        until("the next callback of the main project", async || next("main").await != 0).await;
        server.stop().await;
    });
}

#[test]
fn limits_say_where_to_ask_for_a_larger_plan() {
    limited(async {
        let contact = Some("mailto:sales@example.com".to_owned());
        let (server, t) = open_server(Stage { plan_contact: contact, ..Stage::default() }).await;
        assert_eq!(t.get("/v1/limits").await.is(200)["plan_contact"], "mailto:sales@example.com");
        server.stop().await;
        let (server, t) = open_server(Stage::default()).await;
        assert!(t.get("/v1/limits").await.is(200)["plan_contact"].is_null());
        server.stop().await;
        let run = operate(&t, &["serve", "--plan-contact", "javascript:alert(1)"]);
        let reported = String::from_utf8(run.stderr).expect("text");
        assert!(reported.contains("must begin with mailto: or https://"), "{reported}");
    });
}

#[test]
fn the_operators_security_contact_is_where_people_look_for_it() {
    limited(async {
        let contact = Some("mailto:security@example.com".to_owned());
        let (server, t) =
            open_server(Stage { security_contact: contact, ..Stage::default() }).await;
        let file = |url: &str| format!("{url}/.well-known/security.txt");
        let answer = t.client.get(file(&t.url)).send().await.expect("an answer");
        assert_eq!(answer.headers()["content-type"], "text/plain; charset=utf-8");
        let text = answer.text().await.expect("text");
        assert!(text.starts_with("Contact: mailto:security@example.com\nExpires: 20"), "{text}");
        assert!(text.ends_with(&format!("Canonical: {}\n", file(&t.url))), "{text}");
        server.stop().await;
        let (server, t) = open_server(Stage::default()).await;
        let answer = t.client.get(file(&t.url)).send().await.expect("an answer");
        assert_eq!(answer.status(), 404);
        server.stop().await;
        for bad in ["security@example.com", "http://example.com", "mailto:a\nExpires: x"] {
            let run = operate(&t, &["serve", "--security-contact", bad]);
            let reported = String::from_utf8(run.stderr).expect("text");
            assert!(reported.contains("must begin with mailto:, https:// or tel:"), "{reported}");
        }
    });
}
