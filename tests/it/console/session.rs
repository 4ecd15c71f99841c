//! Signing up, logging in, and who may send a form.

use fencepost_domain::access::Role;

use super::{
    Browser,
    pages::{CORPUS, is_clean},
};
use crate::{
    harness::{run, run_alone},
    people::{PASSWORD, Person, post_from},
};
use serde_json::json;

#[test]
fn a_stranger_signs_up_and_sees_a_key_once_that_works_at_once() {
    run_alone(async |t| {
        let mut browser = Browser::new(t, "ada@example.com");
        browser.get("/").await.goes_temporarily("/console");
        browser.get("/console").await.goes("/console/login");
        let form = [("email", "ada@example.com"), ("password", "too short")];
        let refused = browser.post("/console/signup", &form).await;
        refused.says(400, "must have 12 to 128 characters");
        refused.says(400, "value=\"ada@example.com\"");
        assert!(!refused.text.contains("too short"), "a password is never shown again");
        let page = browser.sign_up("ada@example.com", "Acme <Inc>").await;
        page.says(200, "waiting for your first job");
        page.says(200, "Acme &#60;Inc&#62;");
        let at = page.text.find("fp_live_").expect("a key");
        let key = &page.text[at..at + "fp_live_".len() + 49];
        assert!(browser.has_session());
        let ada = t.with_key(key);
        let job = ada.enqueue(json!({"job_type": "greet"})).await;
        let slug = t.database.text("select slug from projects where name = 'Acme <Inc>'").await;
        let page = format!("/console/p/{slug}");
        browser.get("/console").await.goes(&page);
        browser.get(&format!("{page}/first")).await.says(200, "waits for a worker");
        let leased = ada.lease("w").await;
        browser.get(&format!("{page}/first")).await.says(200, "A worker runs it");
        ada.ack(&leased, "w", "succeeded").await.is(200);
        browser.get(&format!("{page}/first")).await.says(200, "your first job has run");
        let later = browser.get(&format!("{page}/start")).await;
        assert!(!later.text.contains(key), "the key is shown once");
        browser.get(&format!("{page}/jobs/{job}")).await.says(200, "succeeded");
    });
}

#[test]
fn a_login_leads_to_the_requested_page_and_no_other_site() {
    run_alone(async |t| {
        Person::sign_up(t, "ada@example.com").await;
        let mut browser = Browser::new(t, "ada@example.com");
        let wanted = format!("/console/p/{}/jobs?state=pending", t.id);
        let login = browser.get(&wanted).await;
        assert_eq!(login.status, 303);
        let place = login.headers["location"].to_str().expect("text").to_owned();
        browser.get(&place).await.says(200, &format!("value=\"{wanted}\""));
        let wrong = [("email", "ada@example.com"), ("password", "another password of mine")];
        browser.post("/console/login", &wrong).await.says(401, "or the password is wrong");
        assert!(!browser.has_session());
        let form = [("email", "ada@example.com"), ("password", PASSWORD), ("next", &wanted)];
        browser.post("/console/login", &form).await.goes(&wanted);
        let form =
            [("email", "ada@example.com"), ("password", PASSWORD), ("next", "//evil.example")];
        browser.post("/console/login", &form).await.goes("/console?from=login");
        browser.post("/console/logout", &[]).await.goes("/console/login");
        assert!(!browser.has_session());
        browser.get("/console/projects").await.goes("/console/login?next=%2Fconsole%2Fprojects");
        browser.get("/console?from=login").await.says(200, "refused the session cookie");
    });
}

#[test]
fn an_invitation_says_where_it_leads_and_when_it_is_void() {
    run_alone(async |t| {
        let owner = Person::sign_up(t, "owner@example.com").await;
        owner.join(t, Role::Owner).await;
        let body = json!({"email": "zed@example.com", "role": "member"});
        let made = owner.post("/v1/projects/main/invitations", body).await.is(201);
        let token = made["token"].as_str().expect("a token");
        let (link, signup) = ("/console/invitation", "/console/signup?invited=true");
        let (open, opened) = ("/console/links/invitation", [("token", token)]);
        let mut stranger = Browser::new(t, "zed@example.com");
        stranger.get(link).await.says(200, "Open the link in the mail, or paste it here.");
        let not_whole = [("token", &token[..token.len() - 1])];
        stranger.post(open, &not_whole).await.says(200, "not a whole link");
        let pasted = format!("https://a.example/console/invitation#token={token} ");
        let pasted = stranger.post(open, &[("token", &pasted)]).await;
        pasted.says(200, "You are invited to main");
        stranger.get(link).await.says(200, "the invitation was sent to zed@example.com");
        stranger.get("/console/verify").await.says(200, "paste it here");
        stranger.get(signup).await.says(200, "You are invited to <strong>main</strong> as member");
        stranger.get(signup).await.says(200, "value=\"zed@example.com\"");
        Person::sign_up(t, "zed@example.com").await;
        stranger.log_in("zed@example.com").await;
        let accept = [("token", token), ("back", "/console")];
        let joined = stranger.post("/console/do/invitations_accept", &accept).await;
        joined.goes("/console/p/main?done=invitations_accept");
        stranger.get(link).await.says(200, "This invitation cannot be accepted.");
        let mut late = Browser::new(t, "late@example.com");
        late.post(open, &opened).await.says(200, "This invitation cannot be accepted.");
        let late = late.get(signup).await;
        late.says(200, "This invitation cannot be accepted.");
        assert!(!late.text.contains(token), "the form is one for a project of one's own");
        late.says(200, "name=\"project_name\"");
    });
}

#[test]
fn an_action_that_cannot_be_undone_is_confirmed_on_a_page_without_scripts() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Owner).await;
        let job = t.enqueue(json!({"max_attempts": 1})).await;
        let leased = t.lease("w").await;
        t.ack(&leased, "w", "failed").await.is(200);
        let asked = browser.act(t, "dead_letters_delete", &[("job_id", &job)]).await;
        asked.says(200, "Delete this dead letter? This cannot be undone.");
        asked.says(200, &format!("name=\"job_id\" value=\"{job}\""));
        asked.says(200, &format!("<code>{job}</code>"));
        t.get(&format!("/v1/jobs/{job}")).await.is(200);
        let sure = [("job_id", job.as_str()), ("sure", "true")];
        let done = browser.act(t, "dead_letters_delete", &sure).await;
        done.goes(&format!("/console/p/{}?done=dead_letters_delete", t.id));
        t.get(&format!("/v1/jobs/{job}")).await.is_error(404, "job_not_found");
    });
}

#[test]
fn a_member_leaves_by_a_button() {
    run_alone(async |t| {
        let person = Person::sign_up(t, "vic@example.com").await;
        person.join(t, Role::Viewer).await;
        let mut browser = Browser::new(t, "vic@example.com");
        browser.log_in("vic@example.com").await;
        let page = browser.get(&format!("/console/p/{}/members", t.id)).await;
        page.says(200, ">Leave</button>");
        let account_id = person.get("/v1/me").await.is(200)["account"]["id"].clone();
        let account_id = account_id.as_str().expect("an id");
        let back = ("back", "/console/projects");
        let revoke = ("revoke_keys", "true");
        let form = [("account_id", account_id), ("sure", "true"), revoke, back];
        let path = format!("/console/p/{}/do/members_remove", t.id);
        browser.post(&path, &form).await.goes("/console/projects?done=members_remove");
        browser.get(&format!("/console/p/{}", t.id)).await.says(404, "Not found");
    });
}

#[test]
fn no_other_site_can_send_a_form() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Owner).await;
        t.enqueue(json!({})).await;
        for site in [Some("cross-site"), Some("same-site"), Some("none"), None] {
            browser.site = site;
            browser.act(t, "queues_pause", &[("queue", "default")]).await.says(403, "forbidden");
            browser.post("/console/logout", &[]).await.says(403, "forbidden");
        }
        assert_eq!(t.get("/v1/queues/default").await.is(200)["paused_at"], json!(null));
        browser.site = Some("same-origin");
        browser.act(t, "queues_pause", &[("queue", "default")]).await;
        assert!(t.get("/v1/queues/default").await.is(200)["paused_at"].is_string());
    });
}

#[test]
fn a_browser_that_says_less_names_the_origin_of_its_form() {
    run(async |t| {
        let mut browser = Browser::new(t, "ada@example.com");
        let login = browser.get("/console/login").await;
        assert_eq!(login.headers["referrer-policy"], "same-origin", "or there is no origin");
        let send = async |origin: &str| {
            let form = [("email", "ada@example.com"), ("password", "whatever it may be")];
            let request = t.client.post(format!("{}/console/login", t.url)).form(&form);
            let answer = request.header("origin", origin).send().await.expect("an answer");
            answer.status().as_u16()
        };
        assert_eq!(send(&t.url).await, 401, "it is heard, and the password is wrong");
        assert_eq!(send("https://evil.example").await, 403);
        assert_eq!(send("null").await, 403);
    });
}

#[test]
fn cookies_are_nothing_to_the_api_and_keys_are_nothing_to_the_console() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Owner).await;
        let jobs = format!("/v1/projects/{}/jobs", t.id);
        browser.get(&jobs).await.is_error(401, "unauthorized");
        let page = t.get(&format!("/console/p/{}", t.id)).await;
        assert!(page.text.contains("Log in"), "{}", page.text);
    });
}

#[test]
fn tabs_share_a_session_and_a_stolen_cookie_ends_it() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Viewer).await;
        let page = format!("/console/p/{}", t.id);
        browser.cookies.remove("__Host-fencepost-access");
        let stolen = browser.cookies.clone();
        let mut other_tab = Browser::new(t, "ada@example.com");
        other_tab.cookies = stolen.clone();
        browser.get(&page).await.says(200, "Overview");
        assert_ne!(browser.cookies["__Host-fencepost-refresh"], stolen["__Host-fencepost-refresh"]);
        // The other tab asked at the same moment, with the same cookie.
        other_tab.get(&page).await.says(200, "Overview");
        t.database
            .execute("update refresh_tokens set used_at = used_at - interval '31 s' where used_at is not null")
            .await;
        let mut thief = Browser::new(t, "ada@example.com");
        thief.cookies = stolen;
        assert_eq!(thief.get(&page).await.status, 303);
        // A reused token was stolen: the session is revoked.
        let over = browser.get(&page).await;
        assert_eq!(over.status, 303, "{}", over.text);
        assert!(!browser.has_session());
    });
}

#[test]
fn a_browser_that_has_logged_in_keeps_a_mark_after_its_session() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Viewer).await;
        assert!(browser.cookies.contains_key("__Host-fencepost-device"), "{:?}", browser.cookies);
        browser.post("/console/logout", &[]).await.goes("/console/login");
        assert!(!browser.cookies.contains_key("__Host-fencepost-access"));
        assert!(browser.cookies.contains_key("__Host-fencepost-device"));
    });
}

#[test]
fn a_token_of_a_program_gains_nothing_as_a_cookie() {
    run_alone(async |t| {
        let person = Person::sign_up(t, "ada@example.com").await;
        person.join(t, Role::Viewer).await;
        let refresh = json!({"refresh_token": person.refresh_token});
        post_from(t, "/v1/auth/refresh", refresh, "192.0.2.1").await.is(200);
        let mut thief = Browser::new(t, "ada@example.com");
        thief.cookies.insert("__Host-fencepost-refresh".to_owned(), person.refresh_token.clone());
        assert_eq!(thief.get(&format!("/console/p/{}", t.id)).await.status, 303);
        // A reused token was stolen: the session is revoked.
        person.get("/v1/me").await.is_error(401, "unauthorized");
    });
}

#[test]
fn a_session_that_was_ended_leads_to_the_login() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Admin).await;
        let account = browser.get("/console/account").await;
        let at = account.text.find("sess_").expect("a session");
        let id = &account.text[at..at + "sess_".len() + 26];
        let form = [("session_id", id), ("back", "/console/account")];
        browser.post("/console/do/me_end_session", &form).await;
        let sessions =
            t.database.number("select count(*) from sessions where revoked_at is null").await;
        assert_eq!(sessions, 1, "the one that signing up began, over the API");
        let page = browser.get("/console/account").await;
        assert_eq!(page.status, 303);
        assert!(!browser.has_session());
    });
}

#[test]
fn a_link_from_elsewhere_is_asked_for_again_by_the_console_itself() {
    run(async |t| {
        let mut browser = Browser::new(t, "ada@example.com");
        let address = format!("{}/console/projects", t.url);
        let first = t
            .client
            .get(&address)
            .header("sec-fetch-site", "cross-site")
            .header("sec-fetch-mode", "navigate");
        let first = first.send().await.expect("an answer");
        assert_eq!(
            (first.status().as_u16(), &first.headers()["refresh"]),
            (200, &"0".parse().expect("a value"))
        );
        browser.get("/console/projects").await.goes("/console/login?next=%2Fconsole%2Fprojects");
    });
}

#[test]
fn a_failure_takes_no_session_with_it() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Viewer).await;
        let page = format!("/console/p/{}", t.id);
        let cookies = browser.cookies.len();
        let before = browser.cookies.remove("__Host-fencepost-access");
        assert!(before.is_some());
        browser.get(&format!("{page}/jobs/job_none")).await.says(404, "Not found");
        assert_eq!(browser.cookies.len(), cookies, "the token that it had is used up");
        t.database.execute("update refresh_tokens set used_at = used_at - interval '1 hour'").await;
        browser.cookies.remove("__Host-fencepost-access");
        browser.get(&page).await.says(200, "Overview");
    });
}

#[test]
fn a_password_may_begin_and_end_with_a_space() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Viewer).await;
        let next = " loud herons lend galoshes ";
        let form =
            [("current_password", PASSWORD), ("new_password", next), ("back", "/console/account")];
        browser
            .post("/console/do/auth_password", &form)
            .await
            .goes("/console/account?done=auth_password");
        let form = [("email", "ada@example.com"), ("password", next.trim())];
        browser.post("/console/login", &form).await.says(401, "is wrong");
        let form = [("email", "ada@example.com"), ("password", next)];
        browser.post("/console/login", &form).await.goes("/console?from=login");
    });
}

#[test]
fn a_visitor_without_a_session_stays_on_the_page_with_the_key() {
    run_alone(async |t| {
        let mut browser = Browser::new(t, "ada@example.com");
        browser.sign_up("ada@example.com", "Acme").await.says(200, "fp_live_");
        browser.cookies.clear();
        browser.get("/console/p/acme/first").await.says(200, "There is no session");
        // Over plain HTTP a browser says less, and keeps no cookie: it sees its key at once.
        let form = [("email", "bob@example.com"), ("password", PASSWORD)];
        let request = t.client.post(format!("{}/console/signup", t.url)).form(&form);
        let page = request.header("origin", &t.url).send().await.expect("an answer");
        assert_eq!(page.status(), 200);
        assert!(page.text().await.expect("a page").contains("fp_live_"));
    });
}

#[test]
fn a_second_signup_leads_to_its_own_project() {
    run_alone(async |t| {
        let mut browser = Browser::new(t, "ada@example.com");
        browser.sign_up("ada@example.com", "First").await.says(200, "fp_live_");
        browser.cookies.clear();
        browser.sign_up("ada@example.com", "Second").await.says(200, "fp_live_");
        let slug = async |name: &str| {
            let sql = format!("select slug from projects where name = '{name}'");
            format!("/console/p/{}", t.database.text(&sql).await)
        };
        browser.get(&slug("Second").await).await.says(200, "Overview");
        browser.get(&slug("First").await).await.says(404, "Not found");
        browser.get("/console/login").await.goes("/console");
    });
}

#[test]
fn pages_of_accounts_show_what_links_and_providers_bring_as_text() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Owner).await;
        for text in CORPUS {
            let sql = format!(
                "insert into identities (account_id, id, issuer, subject, email)
                 select id, gen_random_uuid(), {text}, {text}, {text} from accounts",
                text = format_args!("'{}'", text.replace('\'', "''"))
            );
            t.database.execute(&sql).await;
        }
        let mut stranger = Browser::new(t, "eve@example.com");
        for text in CORPUS {
            let name: String = text.bytes().map(|it| format!("%{it:02x}")).collect();
            for page in ["login?next=/console/", "login?refused=", "login?done="] {
                let page = stranger.get(&format!("/console/{page}{name}")).await;
                is_clean(&page.text);
            }
            is_clean(&stranger.post("/console/links/email", &[("token", text)]).await.text);
            for page in ["account?refused=", "step-up?next=/console/", "login/with/"] {
                let page = browser.get(&format!("/console/{page}{name}")).await;
                is_clean(&page.text);
            }
        }
        browser.get("/console/account").await.says(200, "&#60;script&#62;alert(1)");
    });
}
