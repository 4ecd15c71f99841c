//! Accounts: from the first mail to the last row.

use fencepost_config::Signup;
use fencepost_identity::accounts;
use fencepost_net::mail::Mail;
use serde_json::{Value, json};

use super::{PASSWORD, Person, address_of, post_from};
use crate::harness::{
    Database, LoneProject, Stage, TestProject, TestServer, eventually, fresh_database, limited,
    run_alone,
};

/// The secret in a mail.
pub fn secret_in(mail: &Mail) -> String {
    let at = mail.text.find("fp_mail_").expect("a secret");
    mail.text[at..].chars().take_while(|it| it.is_ascii_alphanumeric() || *it == '_').collect()
}

pub async fn open_server(stage: Stage) -> (TestServer, LoneProject) {
    let server = TestServer::start_as(fresh_database().await, stage).await;
    let project = server.project("main").await;
    (server, project)
}

#[test]
fn a_stranger_signs_up_and_the_first_key_works_at_once_at_the_free_plans_limits() {
    run_alone(async |t| {
        let body =
            json!({"email": "Ada@Example.com", "password": PASSWORD, "project_name": "Acme Inc"});
        let made = post_from(t, "/v1/auth/signup", body, "192.0.2.1").await.is(201);
        assert_eq!(made["account"]["email"], "ada@example.com");
        assert_eq!(made["account"]["email_verified"], false);
        let slug = made["project"]["slug"].as_str().expect("a slug");
        assert!(slug.starts_with("acme-inc-"), "{slug}");
        assert_eq!(made["project"]["plan"], "free");
        assert_eq!(
            made["api_key"]["key"]["scopes"],
            json!(["produce", "work", "read", "payload:read", "manage", "schedules"])
        );
        let secret = made["api_key"]["secret"].as_str().expect("a key");
        let ada = t.with_key(secret);
        let tenth = ada.post("/v1/jobs", json!({"job_type": "hello"})).await;
        assert_eq!(tenth.headers["x-ratelimit-limit"], "300", "until the address is verified");
        ada.lease("w").await;
        t.database.execute("update accounts set verified_at = now()").await;
        let reply = eventually("the new plan to count", async || {
            let reply = ada.post("/v1/jobs", json!({"job_type": "hello"})).await;
            reply.is(201);
            (reply.headers["x-ratelimit-limit"] == "3000").then_some(reply)
        })
        .await;
        assert_eq!(reply.headers["ratelimit-policy"], "\"produce\";q=3000;w=60");
        assert!(reply.headers["ratelimit"].to_str().expect("text").starts_with("\"produce\";r=29"));
        let job = ada.lease("w").await;
        ada.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(t.get("/v1/jobs").await.is(200)["jobs"], json!([]), "no other project sees it");
    });
}

#[test]
fn an_invalid_sign_up_is_refused_with_the_field() {
    run_alone(async |t| {
        let refuse = async |field: &str, body: Value| {
            post_from(t, "/v1/auth/signup", body, "192.0.2.2").await.refuses(field)
        };
        let with = |name: &str, value: Value| {
            let mut body = json!({"email": "ada@example.com", "password": PASSWORD});
            body[name] = value;
            body
        };
        refuse("email", with("email", json!("unknown"))).await;
        refuse("password", with("password", json!("short"))).await;
        let weak = refuse("password", with("password", json!("password1234"))).await;
        assert!(weak.starts_with("is too easy to guess"), "{weak}");
        refuse("password", with("password", json!("ada@example.com!"))).await;
        refuse("project_name", with("project_name", json!("a\u{0}b"))).await;
        refuse("invitation", with("invitation", json!("fp_mail_unknown"))).await;
        refuse("role", with("role", json!("owner"))).await;
        let number = "select count(*) from accounts";
        assert_eq!(t.database.number(number).await, 0, "nothing is left of them");
    });
}

#[test]
fn known_and_unknown_addresses_are_answered_alike() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        let other_password = "eight purple elephants";
        let sign_up = async |password: &str, address: &str| {
            let body = json!({"email": "ada@example.com", "password": password});
            post_from(&t, "/v1/auth/signup", body, address).await.is(201)
        };
        let first = sign_up(PASSWORD, "192.0.2.1").await;
        let verify = json!({"token": secret_in(&server.next_mail().await)});
        let again = sign_up(other_password, "192.0.2.3").await;
        let verify_again = json!({"token": secret_in(&server.next_mail().await)});
        let ada = Person::log_in(&t, "ada@example.com", PASSWORD, Value::Null).await;
        ada.post("/v1/auth/verify", verify.clone()).await.is_empty(204);
        ada.post("/v1/auth/verify", verify).await.is_error(400, "invalid_token");
        let known = sign_up("nine orange giraffes", "192.0.2.5").await;
        let fields = |it: &Value| -> Vec<String> {
            it.as_object().expect("an object").keys().cloned().collect()
        };
        assert_eq!(fields(&first), fields(&again));
        assert_eq!(fields(&first["account"]), fields(&again["account"]));
        assert_ne!(first["account"]["id"], again["account"]["id"]);
        assert_eq!(fields(&first), fields(&known), "only its owner learns that it is known");
        // Only one of them can prove the address.
        let other = Person::log_in(&t, "ada@example.com", other_password, Value::Null).await;
        assert_eq!(other.account_id, again["account"]["id"].as_str().expect("an id"));
        other.post("/v1/auth/verify", verify_again).await.is_error(409, "email_taken");
        // The verified owner logs in as themselves.
        let login = json!({"email": "ada@example.com", "password": PASSWORD});
        let session = post_from(&t, "/v1/auth/login", login, "192.0.2.4").await.is(200);
        assert_eq!(session["account_id"], first["account"]["id"]);
        let answers = async |email: &str| {
            let login = json!({"email": email, "password": "not this one, no"});
            let reply = post_from(&t, "/v1/auth/login", login, &address_of(email)).await;
            let mut error = reply.is_error(401, "invalid_credentials");
            error["request_id"] = Value::Null;
            let reset = json!({"email": email});
            let reset = post_from(&t, "/v1/auth/password/reset", reset, &address_of(email)).await;
            reset.is_empty(204);
            error
        };
        assert_eq!(answers("ada@example.com").await, answers("unknown@example.com").await);
        server.stop().await;
    });
}

#[test]
fn a_forgotten_password_is_replaced_by_mail_and_every_session_ends() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        let ada = Person::sign_up_unverified(&t, "ada@example.com").await;
        server.next_mail().await;
        let reset = json!({"email": "ada@example.com"});
        post_from(&t, "/v1/auth/password/reset", reset, "192.0.2.1").await.is_empty(204);
        let token = secret_in(&server.next_mail().await);
        let confirm = async |token: &str, password: &str| {
            let body = json!({"token": token, "new_password": password});
            post_from(&t, "/v1/auth/password/reset/confirm", body, "192.0.2.1").await
        };
        confirm(&token, "short").await.refuses("new_password");
        confirm("fp_mail_junk", "seven yellow submarines").await.is_error(400, "invalid_token");
        confirm(&token, "seven yellow submarines").await.is_empty(204);
        confirm(&token, "seven yellow submarines").await.is_error(400, "invalid_token");
        ada.get("/v1/me").await.is_error(401, "unauthorized");
        let old = json!({"email": "ada@example.com", "password": PASSWORD});
        post_from(&t, "/v1/auth/login", old, "192.0.2.5")
            .await
            .is_error(401, "invalid_credentials");
        let again =
            Person::log_in(&t, "ada@example.com", "seven yellow submarines", Value::Null).await;
        let me = again.get("/v1/me").await.is(200);
        assert_eq!(
            me["account"]["email_verified"], true,
            "the holder of the mail reads the address"
        );
        server.stop().await;
    });
}

#[test]
fn a_refresh_token_is_used_once_and_one_that_comes_twice_ends_the_session() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        let refresh = async |token: &str| {
            post_from(t, "/v1/auth/refresh", json!({"refresh_token": token}), "192.0.2.1").await
        };
        let next = refresh(&ada.refresh_token).await.is(200);
        assert_eq!(next["session_id"], ada.session_id);
        let newest = next["refresh_token"].as_str().expect("a token").to_owned();
        let newer =
            Person { access_token: next["access_token"].as_str().expect("a token").into(), ..ada };
        newer.get("/v1/me").await.is(200);
        refresh("fp_refresh_junk").await.is_error(401, "invalid_credentials");
        refresh(&newer.refresh_token).await.is_error(401, "invalid_credentials");
        refresh(&newest).await.is_error(401, "invalid_credentials");
        newer.get("/v1/me").await.is_error(401, "unauthorized");
    });
}

#[test]
fn sessions_are_listed_and_ended_and_a_new_password_ends_the_others() {
    run_alone(async |t| {
        let one = Person::sign_up(t, "ada@example.com").await;
        let two = Person::log_in(t, "ada@example.com", PASSWORD, Value::Null).await;
        let three = Person::log_in(t, "ada@example.com", PASSWORD, Value::Null).await;
        let stranger = Person::sign_up(t, "eve@example.com").await;
        let list = one.get("/v1/me/sessions").await.is(200);
        let sessions = list["sessions"].as_array().expect("sessions");
        assert_eq!(sessions.len(), 3);
        let current: Vec<_> = sessions.iter().filter(|it| it["is_current"] == true).collect();
        assert_eq!((current.len(), &current[0]["id"]), (1, &json!(one.session_id)));
        let path = format!("/v1/me/sessions/{}", two.session_id);
        stranger.delete(&path).await.is_error(404, "session_not_found");
        one.delete(&path).await.is_empty(204);
        two.get("/v1/me").await.is_error(401, "unauthorized");
        let change = json!({"current_password": "no", "new_password": "seven yellow submarines"});
        one.post("/v1/auth/password", change).await.is_error(401, "invalid_credentials");
        let change = json!({"current_password": PASSWORD, "new_password": "password1234"});
        one.post("/v1/auth/password", change).await.refuses("new_password");
        let change =
            json!({"current_password": PASSWORD, "new_password": "seven yellow submarines"});
        one.post("/v1/auth/password", change).await.is_empty(204);
        three.get("/v1/me").await.is_error(401, "unauthorized");
        one.get("/v1/me").await.is(200);
        one.post("/v1/auth/logout", json!({})).await.is_empty(204);
        one.get("/v1/me").await.is_error(401, "unauthorized");
    });
}

#[test]
fn guesses_are_delayed_by_address_and_pair_without_a_lockout() {
    run_alone(async |t| {
        Person::sign_up(t, "ada@example.com").await;
        let guess = async |email: &str, password: &str, address: &str| {
            let body = json!({"email": email, "password": password});
            post_from(t, "/v1/auth/login", body, address).await
        };
        for _ in 0..5 {
            let wrong = guess("ada@example.com", "wrong wrong wrong", "198.51.100.1").await;
            wrong.is_error(401, "invalid_credentials");
        }
        let refused = guess("ada@example.com", PASSWORD, "198.51.100.1").await;
        refused.is_error(429, "rate_limit_exceeded");
        let wait: u32 = refused.headers["retry-after"].to_str().expect("text").parse().expect("s");
        assert!((1..=180).contains(&wait), "{wait}");
        // The owner, from elsewhere, is let in.
        guess("ada@example.com", PASSWORD, "198.51.100.2").await.is(200);
        // One address that tries many others is refused, too.
        let mut refused = 0;
        for number in 0..25 {
            let reply = guess(&format!("{number}@example.com"), "wrong", "198.51.100.3").await;
            refused += u32::from(reply.status == 429);
        }
        assert!((4..=6).contains(&refused), "{refused} of 25");
    });
}

#[test]
fn claiming_an_address_buys_no_guesses_at_its_owner() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        Person::sign_up(&t, "ada@example.com").await;
        let claim = json!({"email": "ada@example.com", "password": "seven yellow submarines"});
        post_from(&t, "/v1/auth/signup", claim.clone(), "198.51.100.1").await.is(201);
        let mut refused = 0;
        for number in 0..10 {
            let mut body = claim.clone();
            if number % 2 == 0 {
                body["password"] = "a guess at her password".into();
            }
            let reply = post_from(&t, "/v1/auth/login", body, "198.51.100.1").await;
            refused += u32::from(reply.status == 429);
        }
        assert_eq!(refused, 5, "their own password does not set the count back");
        server.stop().await;
    });
}

#[test]
fn who_may_sign_up_is_for_the_operator_to_say() {
    limited(async {
        let sign_up = async |t: &TestProject| {
            let body = json!({"email": "ada@example.com", "password": PASSWORD});
            post_from(t, "/v1/auth/signup", body, "192.0.2.1").await
        };
        for signup in [Signup::Closed, Signup::Invite] {
            let (server, t) = open_server(Stage { signup, ..Stage::default() }).await;
            sign_up(&t).await.is_error(403, "signup_closed");
            server.stop().await;
        }
    });
}

#[test]
fn a_deleted_account_leaves_nothing_and_a_project_keeps_an_owner() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        let ada = Person::sign_up(&t, "ada@example.com").await;
        let bob = Person::sign_up(&t, "bob@example.com").await;
        let key = ada.made["api_key"]["secret"].as_str().expect("a key").to_owned();
        let of_ada = t.with_key(key);
        fill(&of_ada).await;
        let slug = ada.made["project"]["slug"].as_str().expect("a slug").to_owned();
        let invited = ada
            .post(
                &format!("/v1/projects/{slug}/invitations"),
                json!({"email": "bob@example.com", "role": "member"}),
            )
            .await
            .is(201);
        let accept = json!({"token": invited["token"]});
        bob.post("/v1/invitations/accept", accept).await.is(200);
        let export = ada.get("/v1/me/export").await.is(200);
        assert_eq!(export["account"]["email"], "ada@example.com");
        assert!(export["audit_entries"].to_string().contains("invitation.created"));
        let delete = json!({"password": PASSWORD});
        ada.post("/v1/me/delete", delete.clone()).await.is_error(409, "cannot_remove_owner");
        bob.delete(&format!("/v1/projects/{slug}/members/{}", bob.account_id)).await.is_empty(204);
        let wrong = ada.post("/v1/me/delete", json!({"password": "no"})).await;
        wrong.is_error(401, "invalid_credentials");
        ada.post("/v1/me/delete", delete).await.is_empty(204);
        ada.get("/v1/me").await.is_error(401, "unauthorized");
        of_ada.get("/v1/jobs").await.is_error(401, "unauthorized");
        let rows = rows_of_deleted_projects(&t.database).await;
        assert!(rows.iter().map(|it| it.1).sum::<i64>() > 10, "there was something: {rows:?}");
        t.database.execute("update projects set deleted_at = now() - interval '1 hour' where deleted_at is not null").await;
        let left =
            "select count(*) from projects where deleted_at is not null and purged_at is null";
        t.database.until(left, 0).await;
        let purged = "(select id from projects where purged_at is not null)";
        for (table, _) in rows {
            let left = format!("select count(*) from {table} where project_id in {purged}");
            let left = t.database.number(&left).await;
            // What was used stays for the operator's books.
            if !table.starts_with("usage_") {
                assert_eq!(left > 0, table == "audit_log", "{table}: {left}");
            }
        }
        let people = "select count(*) from accounts where email = 'ada@example.com'";
        assert_eq!(t.database.number(people).await, 0);
        bob.get("/v1/me").await.is(200);
        server.stop().await;
    });
}

/// Something in as many tables as one can reach quickly.
async fn fill(t: &TestProject) {
    t.post(
        "/v1/workers/register",
        json!({"worker_id": "w", "queues": ["default"], "job_types": ["test"]}),
    )
    .await
    .is(200);
    let id = t.enqueue(json!({"max_attempts": 1, "unique": {"key": "u"}})).await;
    let job = t.lease("w").await;
    t.ack_with(&job, "w", "failed", json!({"error": {"message": "no"}})).await.is(200);
    t.job_becomes(&id, "dead_letter").await;
    t.enqueue(json!({})).await;
    let job = t.lease("w").await;
    t.ack(&job, "w", "succeeded").await.is(200);
    let body = json!({"jobs": [
        {"key": "a", "job_type": "test"}, {"key": "b", "job_type": "test", "depends_on": ["a"]},
    ]});
    t.post("/v1/workflows", body).await.is(201);
    let schedule = json!({"job_type": "test", "cron_expression": "@daily"});
    t.put("/v1/recurring/r", schedule).await.is(200);
    t.act("/v1/queues/default/pause").await.is(200);
}

/// Every table with rows of projects, and how many rows those that were deleted have in it.
async fn rows_of_deleted_projects(database: &Database) -> Vec<(String, i64)> {
    let mut conn = database.connect().await;
    let tables: Vec<String> = sqlx::query_scalar(
        "select table_name::text from information_schema.columns
         where column_name = 'project_id' and table_schema = 'public'",
    )
    .fetch_all(&mut conn)
    .await
    .expect("tables");
    assert!(tables.len() >= 28, "{tables:?}");
    let mut rows = Vec::new();
    for table in tables {
        let sql = format!(
            "select count(*) from {table} where project_id in (select id from projects where deleted_at is not null)"
        );
        let count = database.number(&sql).await;
        rows.push((table, count));
    }
    rows
}

#[test]
fn an_account_is_exported_ten_times_a_day() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        for _ in 0..accounts::EXPORTS_PER_ACCOUNT.count {
            ada.get("/v1/me/export").await.is(200);
        }
        ada.get("/v1/me/export").await.is_error(429, "rate_limit_exceeded");
    });
}

#[test]
fn a_login_with_a_password_answers_with_a_device_token() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        let ada = Person::sign_up(&t, "ada@example.com").await;
        let log_in = async |more: Value| {
            let mut login = json!({"email": "ada@example.com", "password": PASSWORD});
            login.as_object_mut().expect("one").extend(more.as_object().expect("one").clone());
            post_from(&t, "/v1/auth/login", login, "192.0.2.4").await
        };
        let first = log_in(json!({})).await.is(200);
        let token = first["device_token"].as_str().expect("a token");
        let again = log_in(json!({"device_token": token})).await.is(200);
        assert_eq!(again["device_token"], token, "until the password changes");
        let refresh = json!({"refresh_token": again["refresh_token"]});
        let refreshed = post_from(&t, "/v1/auth/refresh", refresh, "192.0.2.4").await.is(200);
        assert_eq!(refreshed["device_token"], Value::Null);
        log_in(json!({"device_token": "x".repeat(129)})).await.refuses("device_token");
        let change = json!({"current_password": PASSWORD, "new_password": "loud herons lend it"});
        ada.post("/v1/auth/password", change).await.is_empty(204);
        let login = json!({"email": "ada@example.com", "password": "loud herons lend it"});
        let changed = post_from(&t, "/v1/auth/login", login, "192.0.2.4").await.is(200);
        assert!(changed["device_token"].is_string() && changed["device_token"] != token);
        server.stop().await;
    });
}
