//! Members: invited, given roles, and gone.

use fencepost_domain::access::Role;

use super::{PASSWORD, Person, accounts::secret_in, post_from};
use crate::harness::{Stage, TestServer, fresh_database, limited, run_alone};
use serde_json::json;

#[test]
fn an_invited_person_signs_up_and_is_a_member() {
    limited(async {
        let stage = Stage { signup: fencepost_config::Signup::Invite, ..Stage::default() };
        let database = fresh_database().await;
        let open = TestServer::start(database.clone()).await;
        let ada = Person::sign_up(&open.project("main").await, "ada@example.com").await;
        open.stop().await;
        let server = TestServer::start_as(database, stage).await;
        let t = server.project("other").await;
        let ada = Person { url: server.url.clone(), ..ada };
        let slug = ada.made["project"]["slug"].as_str().expect("a slug").to_owned();
        let path = format!("/v1/projects/{slug}/invitations");
        ada.post(&path, json!({"email": "unknown", "role": "member"})).await.refuses("email");
        ada.post(&path, json!({"email": "b@example.com", "role": "king"})).await.refuses("role");
        let body = json!({"email": "bob@example.com", "role": "member"});
        let invited = ada.post(&path, body).await.is(201);
        let mail = server.next_mail().await;
        assert_eq!(mail.to, "bob@example.com");
        assert_eq!(mail.subject, "You are invited to a project", "no words of a tenant");
        let token = secret_in(&mail);
        assert_ne!(invited["token"], token.as_str(), "each is in one place");
        let answered = json!({"token": invited["token"]});
        let preview = t.post("/v1/invitations/preview", answered).await.is(200);
        assert_eq!(preview["email"], "bob@example.com");
        assert_eq!(ada.get(&path).await.is(200)["invitations"][0]["email"], "bob@example.com");
        let signup = json!({"email": "bob@example.com", "password": PASSWORD, "invitation": token});
        let made = post_from(&t, "/v1/auth/signup", signup.clone(), "192.0.2.1").await.is(201);
        assert_eq!(
            (&made["project"]["slug"], &made["project"]["role"]),
            (&json!(slug), &json!("member"))
        );
        assert!(made["api_key"].is_null());
        post_from(&t, "/v1/auth/signup", signup, "192.0.2.1").await.refuses("invitation");
        let bob = Person::log_in(&t, "bob@example.com", PASSWORD, made).await;
        let jobs = format!("/v1/projects/{slug}/jobs");
        bob.post(&jobs, json!({"job_type": "t"})).await.is(201);
        assert_eq!(bob.get(&jobs).await.is(200)["jobs"].as_array().map(Vec::len), Some(1));
        bob.get(&format!("/v1/projects/{slug}/keys")).await.is_error(403, "forbidden");
        let revoked =
            ada.post(&path, json!({"email": "c@example.com", "role": "viewer"})).await.is(201);
        let id = revoked["invitation"]["id"].as_str().expect("an id");
        ada.delete(&format!("{path}/{id}")).await.is_empty(204);
        ada.delete(&format!("{path}/{id}")).await.is_error(404, "invitation_not_found");
        let accept = json!({"token": revoked["token"]});
        bob.post("/v1/invitations/accept", accept).await.refuses("invitation");
        server.stop().await;
    });
}

#[test]
fn no_member_grants_more_than_they_have_and_the_last_owner_stays() {
    run_alone(async |t| {
        let mut people = Vec::new();
        for role in [Role::Owner, Role::Admin, Role::Viewer] {
            let person = Person::sign_up(t, &format!("{}@example.com", role.name())).await;
            person.join(t, role).await;
            people.push(person);
        }
        let [owner, admin, viewer] = &people[..] else { unreachable!() };
        let member = |it: &Person| format!("/v1/projects/main/members/{}", it.account_id);
        let to = |role: &str| json!({"role": role});
        admin.patch(&member(viewer), to("member")).await.is(200);
        admin.patch(&member(viewer), to("owner")).await.is_error(403, "role_exceeds_caller");
        admin.patch(&member(owner), to("viewer")).await.is_error(403, "role_exceeds_caller");
        admin.delete(&member(owner)).await.is_error(403, "role_exceeds_caller");
        viewer.delete(&member(admin)).await.is_error(403, "role_exceeds_caller");
        owner.patch(&member(owner), to("admin")).await.is_error(409, "cannot_remove_owner");
        owner.delete(&member(owner)).await.is_error(409, "cannot_remove_owner");
        owner.patch(&member(admin), to("owner")).await.is(200);
        owner.delete(&member(owner)).await.is_empty(204);
        owner.get("/v1/projects/main").await.is_error(404, "project_not_found");
        viewer.delete(&member(viewer)).await.is_empty(204);
        admin.delete("/v1/projects/main?confirm=other").await.refuses("confirm");
        assert_eq!(admin.delete("/v1/projects/main").await.refuses("confirm"), "is missing");
        t.get("/v1/jobs").await.is(200);
        admin.delete("/v1/projects/main?confirm=main").await.is_empty(204);
        t.get("/v1/jobs").await.is_error(401, "unauthorized");
        admin.get("/v1/projects/main").await.is_error(404, "project_not_found");
    });
}

#[test]
fn a_demoted_member_cannot_return_by_their_own_invitation() {
    run_alone(async |t| {
        let owner = Person::sign_up(t, "owner@example.com").await;
        owner.join(t, Role::Owner).await;
        let admin = Person::sign_up(t, "admin@example.com").await;
        admin.join(t, Role::Admin).await;
        let body = json!({"email": "again@example.com", "role": "admin"});
        let made = admin.post("/v1/projects/main/invitations", body).await.is(201);
        let path = format!("/v1/projects/main/members/{}", admin.account_id);
        owner.patch(&path, json!({"role": "viewer"})).await.is(200);
        let accept = json!({"token": made["token"]});
        admin.post("/v1/invitations/accept", accept).await.refuses("invitation");
        admin.get("/v1/projects/main/keys").await.is_error(403, "forbidden");
        admin.get("/v1/projects/%00/jobs").await.is_error(404, "project_not_found");
    });
}

#[test]
fn verifying_an_address_revokes_what_a_stranger_made_with_it() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        // A stranger claims Ada's address, and shares the project with a friend.
        let thief = Person::sign_up_unverified(&t, "ada@example.com").await;
        server.next_mail().await;
        let friend = Person::sign_up(&t, "friend@example.com").await;
        server.next_mail().await;
        let slug = thief.made["project"]["slug"].as_str().expect("a slug").to_owned();
        let invitations = format!("/v1/projects/{slug}/invitations");
        let body = json!({"email": "friend@example.com", "role": "owner"});
        thief.post(&invitations, body).await.is_error(403, "email_not_verified");
        friend.join_project(&t, &slug, Role::Owner).await;
        let later = json!({"email": "later@example.com", "role": "owner"});
        let later = friend.post(&invitations, later).await.is(201);
        server.next_mail().await;
        let later = json!({"token": later["token"]});
        let key = thief.made["api_key"]["secret"].as_str().expect("a key").to_owned();
        let with_key = t.with_key(key);
        with_key.get("/v1/jobs").await.is(200);
        // Ada, who reads the mail, asks for a new password.
        let reset = json!({"email": "ada@example.com"});
        post_from(&t, "/v1/auth/password/reset", reset, "192.0.2.9").await.is_empty(204);
        let token = secret_in(&server.next_mail().await);
        let confirm = json!({"token": token, "new_password": "seven yellow submarines"});
        post_from(&t, "/v1/auth/password/reset/confirm", confirm, "192.0.2.9").await.is_empty(204);
        with_key.get("/v1/jobs").await.is_error(401, "unauthorized");
        thief.get("/v1/me").await.is_error(401, "unauthorized");
        let jobs = format!("/v1/projects/{slug}/jobs");
        friend.get(&jobs).await.is_error(404, "project_not_found");
        friend.post("/v1/invitations/accept", later).await.refuses("invitation");
        let ada =
            Person::log_in(&t, "ada@example.com", "seven yellow submarines", json!(null)).await;
        ada.get(&jobs).await.is(200);
        server.stop().await;
    });
}

#[test]
fn an_invitation_can_be_looked_at_until_it_is_used() {
    run_alone(async |t| {
        let owner = Person::sign_up(t, "owner@example.com").await;
        owner.join(t, Role::Owner).await;
        let body = json!({"email": "zed@example.com", "role": "admin"});
        let made = owner.post("/v1/projects/main/invitations", body).await.is(201);
        let token = json!({"token": made["token"]});
        let look = async |token: &serde_json::Value| {
            post_from(t, "/v1/invitations/preview", token.clone(), "192.0.2.9").await
        };
        for _ in 0..2 {
            let seen = look(&token).await.is(200);
            assert_eq!(seen["project_name"], "main");
            assert_eq!(
                (&seen["email"], &seen["role"]),
                (&json!("zed@example.com"), &json!("admin"))
            );
            assert_eq!(seen["expires_at"], made["invitation"]["expires_at"]);
        }
        let zed = Person::sign_up(t, "zed@example.com").await;
        zed.post("/v1/invitations/accept", token.clone()).await.is(200);
        look(&token).await.refuses("invitation");
        look(&json!({"token": "fp_mail_junk"})).await.refuses("invitation");
        for _ in 0..20 {
            look(&json!({"token": "fp_mail_junk"})).await;
        }
        look(&token).await.is_error(429, "rate_limit_exceeded");
    });
}

#[test]
fn a_plan_bounds_members_and_keys_and_a_full_project_can_still_rotate() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        let slug = ada.made["project"]["slug"].as_str().expect("a slug").to_owned();
        let keys = format!("/v1/projects/{slug}/keys");
        for number in 1..10 {
            ada.post(&keys, json!({"name": number.to_string()})).await.is(201);
        }
        let reply = ada.post(&keys, json!({"name": "one more"})).await;
        assert!(
            reply.is_error(429, "quota_exceeded")["message"]
                .as_str()
                .is_some_and(|it| it.contains("10 live keys"))
        );
        let page = ada.get(&keys).await.is(200);
        let first = page["keys"][0]["id"].as_str().expect("an id");
        ada.post(&format!("{keys}/{first}/rotate"), json!({})).await.is(201);
        let invitations = format!("/v1/projects/{slug}/invitations");
        for number in 1..5 {
            let body = json!({"email": format!("{number}@example.com"), "role": "viewer"});
            ada.post(&invitations, body).await.is(201);
        }
        let body = json!({"email": "x@example.com", "role": "viewer"});
        ada.post(&invitations, body).await.is_error(429, "quota_exceeded");
    });
}

#[test]
fn an_address_has_one_invitation_and_it_is_used_up_with_all_that_were_there() {
    run_alone(async |t| {
        let owner = Person::sign_up(t, "owner@example.com").await;
        owner.join(t, Role::Owner).await;
        let zed = Person::sign_up(t, "zed@example.com").await;
        let path = "/v1/projects/main/invitations";
        let invite = async |role: &str| {
            let made = owner.post(path, json!({"email": "zed@example.com", "role": role})).await;
            json!({"token": made.is(201)["token"]})
        };
        let first = invite("admin").await;
        let second = invite("viewer").await;
        let open = owner.get(path).await.is(200)["invitations"].as_array().map(Vec::len);
        assert_eq!(open, Some(1));
        zed.post("/v1/invitations/accept", first).await.refuses("invitation");
        // What an earlier release has left behind.
        t.database
            .execute(
                "insert into invitations (project_id, id, email, role, secret_hash, expires_at)
                 select project_id, gen_random_uuid(), email, 'admin', sha256('x'), expires_at
                 from invitations",
            )
            .await;
        let joined = zed.post("/v1/invitations/accept", second).await;
        assert!(joined.status.is_success(), "{}", joined.text);
        assert_eq!(owner.get(path).await.is(200)["invitations"], json!([]));
    });
}

#[test]
fn the_name_of_a_project_is_no_link_and_hides_nothing() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        let slug = ada.made["project"]["slug"].as_str().expect("a slug");
        for name in ["locked: go to https://evil.example", "a\u{202e}b", "a\u{2028}b"] {
            ada.post("/v1/projects", json!({"name": name})).await.refuses("name");
            ada.patch(&format!("/v1/projects/{slug}"), json!({"name": name})).await.refuses("name");
            let signup =
                json!({"email": "eve@example.com", "password": PASSWORD, "project_name": name});
            post_from(t, "/v1/auth/signup", signup, "192.0.2.1").await.refuses("project_name");
        }
    });
}
