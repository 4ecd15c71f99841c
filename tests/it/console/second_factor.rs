//! Adding an authenticator app in the console, logging in with it, and stepping up.

use fencepost_domain::access::Role;

use super::Browser;
use crate::{
    harness::{Reply, run_alone},
    people::{
        PASSWORD,
        second_factor::{age_sessions, let_time_pass, shown},
    },
};

const ADA: &str = "ada@example.com";

/// The value of a hidden field.
fn hidden(page: &Reply, name: &str) -> String {
    let field = format!("name=\"{name}\" value=\"");
    let at = page.text.find(&field).unwrap_or_else(|| panic!("{name}: {}", page.text));
    page.text[at + field.len()..].split('"').next().expect("a value").to_owned()
}

#[test]
fn an_app_is_added_by_its_picture_and_asked_for_at_login() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, ADA, Role::Owner).await;
        browser.get("/console/account").await.says(200, "Add an authenticator app");
        let page = browser.post("/console/account/totp", &[]).await;
        page.says(200, "<svg");
        let secret = hidden(&page, "secret");
        let uri = hidden(&page, "uri").replace("&#38;", "&");
        let wrong = [("code", "12345"), ("secret", secret.as_str()), ("uri", uri.as_str())];
        let again = browser.post("/console/account/totp/confirm", &wrong).await;
        again.says(401, "This code is wrong.");
        assert_eq!(hidden(&again, "secret"), secret);
        let code = shown(&secret);
        let right = [("code", code.as_str()), ("secret", &secret), ("uri", &uri)];
        let codes = browser.post("/console/account/totp/confirm", &right).await;
        codes.says(200, "They are shown once.");
        browser.get("/console/account").await.says(200, "10 recovery codes are left");
        browser.post("/console/logout", &[]).await.goes("/console/login");

        let form = [("email", ADA), ("password", PASSWORD), ("next", "/console/account")];
        let asked = "/console/login/code?next=%2Fconsole%2Faccount";
        browser.post("/console/login", &form).await.goes(asked);
        browser.get(asked).await.says(200, "value=\"/console/account\"");
        browser.get("/console/account").await.goes("/console/login?next=%2Fconsole%2Faccount");
        let used = [("code", code.as_str()), ("next", "/console/account")];
        browser
            .post("/console/login/code", &used)
            .await
            .says(401, "This code is wrong, or was used");
        let_time_pass(t).await;
        let code = shown(&secret);
        let form = [("code", code.as_str()), ("next", "/console/account")];
        browser.post("/console/login/code", &form).await.goes("/console/account");
        browser.get("/console/login/code").await.goes("/console/login");

        age_sessions(t).await;
        let new = browser.post("/console/account/recovery-codes", &[]).await;
        assert_eq!(new.status, 303, "{}", new.text);
        let step_up = new.headers["location"].to_str().expect("text").to_owned();
        assert!(step_up.starts_with("/console/step-up?next="), "{step_up}");
        browser.get(&step_up).await.says(200, "name=\"code\"");
        let_time_pass(t).await;
        let code = shown(&secret);
        let form = [("code", code.as_str()), ("next", "/console/account")];
        browser.post("/console/step-up", &form).await.goes("/console/account?done=auth_step_up");
        browser
            .post("/console/account/recovery-codes", &[])
            .await
            .says(200, "They are shown once.");
        let removed = browser.post("/console/do/me_remove_totp", &[("back", "/console/account")]);
        removed.await.goes("/console/account?done=me_remove_totp");
        let page = browser.get("/console/account?done=me_remove_totp").await;
        page.says(200, "The authenticator app is removed.");
    });
}

#[test]
fn an_old_session_must_give_the_password_before_it_makes_a_key() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, ADA, Role::Owner).await;
        age_sessions(t).await;
        let keys = format!("/console/p/{}/keys", t.id);
        let form = [("name", "k"), ("scopes", "read")];
        let refused = browser.post(&keys, &form).await;
        assert_eq!(refused.status, 303, "{}", refused.text);
        let next = [("next", "/console/p/main/keys"), ("password", "another password of mine")];
        browser.post("/console/step-up", &next).await.says(401, "password is");
        let next = [("next", "//evil.example"), ("password", PASSWORD)];
        browser.post("/console/step-up", &next).await.goes("/console?done=auth_step_up");
        browser.post(&keys, &form).await.says(200, "It is shown once.");
    });
}
