//! Logging in with OpenID Connect providers: with a real one, and with one that lies.

mod exchange;
mod liar;

use std::{path::Path, process::Command, sync::Arc, time::Duration};

use fencepost_identity::accounts::oidc::Providers;
use reqwest::{
    Url,
    header::{LOCATION, SET_COOKIE},
};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use super::{PASSWORD, Person, accounts::secret_in, address_of, post_from, second_factor};
use crate::{
    console::Browser,
    harness::{
        LoneProject, Process, Stage, TestServer, free_port, fresh_database, run_for, scratch,
        until_ready,
    },
};

const SECRET: &str = "of this client alone / & more";

/// The provider's packages, installed once for all tests.
async fn packages() -> &'static Path {
    static INSTALLED: OnceCell<std::path::PathBuf> = OnceCell::const_new();
    let install = async || {
        let dir = scratch("oidc-provider");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oidc-provider");
        for file in ["package.json", "package-lock.json", "provider.mjs"] {
            std::fs::copy(source.join(file), dir.join(file)).expect("a copy");
        }
        let mut npm = tokio::process::Command::new("npm");
        let npm = npm.args(["ci", "--no-audit", "--no-fund", "--ignore-scripts"]);
        let npm = npm.kill_on_drop(true);
        let done = npm.current_dir(&dir).output().await.expect("npm runs");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        dir
    };
    INSTALLED.get_or_init(install).await
}

/// A server with a provider.
struct Set {
    t: LoneProject,
    server: TestServer,
    provider: String,
    _process: Process,
}

/// A file for `--oidc-config`.
fn config(name: &str, text: &str) -> Arc<Providers> {
    let dir = scratch(name);
    std::fs::write(dir.join("secret"), format!("{SECRET}\n")).expect("a file");
    let text = text.replace("DIR", dir.to_str().expect("text"));
    std::fs::write(dir.join("oidc.toml"), text).expect("a file");
    Arc::new(Providers::open(&dir.join("oidc.toml")).expect("it is valid"))
}

impl Set {
    /// A server whose people may log in with the provider `acme`.
    async fn start(name: &str, more: &str) -> Self {
        let port = free_port();
        let provider = format!("http://127.0.0.1:{port}");
        let text = format!(
            "[[providers]]\nname = \"acme\"\nlabel = \"Acme\"\nissuer = \"{provider}\"\n\
             client_id = \"fencepost\"\nclient_secret_file = \"DIR/secret\"\n{more}\n"
        );
        let stage = Stage { providers: config(name, &text), ..Stage::default() };
        let server = TestServer::start_as(fresh_database().await, stage).await;
        let redirect = format!("{}/console/login/with/acme/return", server.url);
        let mut node = Command::new("node");
        node.arg(packages().await.join("provider.mjs"));
        let process = Process::start(node.args([&port.to_string(), &redirect, SECRET]));
        let t = server.project("main").await;
        until_ready(&provider).await;
        Self { t, server, provider, _process: process }
    }

    /// Every visitor of the provider is this person from now on.
    async fn is(&self, person: Value) {
        let request = self.t.client.put(format!("{}/person", self.provider)).json(&person);
        assert_eq!(request.send().await.expect("an answer").status(), 204);
    }

    /// What the provider's pages lead to: our own URL, with its query.
    async fn visit(&self, url: &str) -> String {
        let never = reqwest::redirect::Policy::none();
        let client = crate::harness::client_builder().redirect(never).build().expect("a client");
        let (mut at, mut cookies) = (url.parse::<Url>().expect("a URL"), Vec::<String>::new());
        loop {
            let request = client.get(at.clone()).header("cookie", cookies.join("; "));
            let answer = request.send().await.expect("an answer");
            for line in answer.headers().get_all(SET_COOKIE) {
                let pair = line.to_str().expect("text").split(';').next().expect("a pair");
                cookies.push(pair.to_owned());
            }
            let to = answer.headers().get(LOCATION).expect("it leads on").to_str().expect("text");
            at = at.join(to).expect("a URL");
            if let Some(path) = at.as_str().strip_prefix(&self.t.url) {
                return path.to_owned();
            }
        }
    }

    /// Begins a login; returns what the provider sends the browser back to.
    async fn leave(&self, browser: &mut Browser) -> String {
        self.visit(&departure(browser, "/console/login/with/acme").await).await
    }

    /// Begins a link.
    async fn leave_to_link(&self, browser: &mut Browser) -> String {
        let page = browser.post("/console/account/link/acme", &[]).await;
        page.says(200, "The page of the provider opens.");
        let refresh = page.headers["refresh"].to_str().expect("text");
        self.visit(refresh.strip_prefix("0; url=").expect("a URL")).await
    }

    /// A person with an account, in a browser, who has linked the provider's present person.
    async fn linked(&self, email: &str) -> (Person, Browser) {
        let person = Person::sign_up(&self.t, email).await;
        let mut browser = Browser::new(&self.t, email);
        browser.log_in(email).await;
        let back = self.leave_to_link(&mut browser).await;
        browser.get(&back).await.goes("/console/account?done=provider_linked");
        (person, browser)
    }
}

/// The first of these tests installs the provider.
fn with_provider(test: impl Future<Output = ()>) {
    run_for(Duration::from_secs(240), test);
}

fn encoded(name: &str, value: &str) -> String {
    form_urlencoded::Serializer::new(String::new()).append_pair(name, value).finish()
}

/// Where the button leads to.
async fn departure(browser: &mut Browser, path: &str) -> String {
    let page = browser.get(path).await;
    assert_eq!(page.status, 303, "{}", page.text);
    page.headers["location"].to_str().expect("text").to_owned()
}

#[test]
fn a_linked_person_logs_in_with_a_provider_and_goes_where_they_wanted() {
    with_provider(async {
        let set = Set::start("oidc-good", "").await;
        set.is(json!({"sub": "ada", "email": "ada@acme.example", "email_verified": true})).await;
        let (person, mut browser) = set.linked("ada@example.com").await;
        let page = browser.get("/console/account?done=provider_linked").await;
        page.says(200, "You can log in with it from now on.");
        page.says(200, "<td class=\"wrap\">ada@acme.example</td>");
        while !set.server.next_mail().await.text.contains("was linked to your account") {}

        let mut other = Browser::new(&set.t, "phone@example.com");
        let login = other.get("/console/login?next=%2Fconsole%2Faccount").await;
        login.says(200, "href=\"/console/login/with/acme?next=%2Fconsole%2Faccount\"");
        let path = "/console/login/with/acme?next=%2Fconsole%2Faccount";
        let back = set.visit(&departure(&mut other, path).await).await;
        other.get(&back).await.goes("/console/account");
        assert_eq!(other.cookies.len(), 2, "a session, and nothing of the way to it");
        other.get("/console/account").await.says(200, "ada@example.com");
        // The provider's word alone changes nothing that lasts.
        let step_up = other.post("/console/account/totp", &[]).await;
        assert!(
            step_up.headers["location"].to_str().expect("text").starts_with("/console/step-up")
        );

        let identities = person.get("/v1/me/identities").await.is(200);
        let identity = &identities["identities"][0];
        assert_eq!(
            (&identity["provider"], &identity["email"]),
            (&json!("Acme"), &json!("ada@acme.example"))
        );
        assert!(identity["last_used_at"].is_string());
        assert_eq!(person.get("/v1/me/export").await.is(200)["identities"][0], *identity);
        let log = person.get("/v1/me/security-log").await.is(200)["entries"].to_string();
        assert!(log.contains("identity.linked") && log.contains("login.succeeded"), "{log}");

        let path = format!("/v1/me/identities/{}", identity["id"].as_str().expect("an id"));
        let stranger = Person::sign_up(&set.t, "eve@example.com").await;
        stranger.delete(&path).await.is_error(404, "identity_not_found");
        stranger.delete("/v1/me/identities/x").await.is_error(404, "identity_not_found");
        second_factor::age_sessions(&set.t).await;
        person.delete(&path).await.is_error(403, "step_up_required");
        person.post("/v1/auth/step-up", json!({"password": PASSWORD})).await.is_empty(204);
        person.delete(&path).await.is_empty(204);
        let mut late = Browser::new(&set.t, "late@example.com");
        let back = set.leave(&mut late).await;
        late.get(&back).await.goes("/console/login?refused=unlinked");
        let refused = late.get("/console/login?refused=unlinked").await;
        refused.says(200, "No account is linked to this login.");
        set.server.stop().await;
    });
}

#[test]
fn a_login_with_a_provider_is_not_linked_to_an_account_by_its_address() {
    with_provider(async {
        let set = Set::start("oidc-address", "allowed_domains = [\"Acme.example\"]").await;
        Person::sign_up(&set.t, "ada@acme.example").await;
        set.is(json!({"sub": "eve", "email": "ada@acme.example", "email_verified": true})).await;
        let mut browser = Browser::new(&set.t, "eve@example.com");
        let back = set.leave(&mut browser).await;
        browser.get(&back).await.goes("/console/login?refused=unlinked");
        assert!(browser.cookies.is_empty());
        // Nor does one of another domain, or one that the provider has not verified, get as far.
        for person in [
            json!({"sub": "eve", "email": "eve@acme.example.org", "email_verified": true}),
            json!({"sub": "bob", "email": "bob@acme.example", "email_verified": false}),
            json!({"sub": "zed"}),
        ] {
            let email = format!("{}@example.com", person["sub"].as_str().expect("text"));
            set.is(person).await;
            let mut browser = Browser::new(&set.t, &email);
            let back = set.leave(&mut browser).await;
            browser.get(&back).await.goes("/console/login?refused=domain");
        }
        set.server.stop().await;
    });
}

#[test]
fn what_was_stolen_of_a_login_or_is_repeated_is_of_no_use() {
    with_provider(async {
        let set = Set::start("oidc-stolen", "").await;
        set.is(json!({"sub": "ada"})).await;
        let (_, mut browser) = set.linked("ada@example.com").await;
        browser.post("/console/logout", &[]).await.goes("/console/login");

        // The URL without the cookie; with that of another login; and with another state.
        let back = set.leave(&mut browser).await;
        let mut thief = Browser::new(&set.t, "eve@example.com");
        thief.get(&back).await.goes("/console/login?refused=expired");
        set.leave(&mut thief).await;
        thief.get(&back).await.goes("/console/login?refused=expired");
        let kept = browser.cookies.clone();
        let other = back.replace("state=", "state=x");
        browser.get(&other).await.goes("/console/login?refused=expired");
        // As if the provider mixed up two servers (RFC 9207).
        browser.cookies = kept.clone();
        let other = back.replace("iss=", "iss=x");
        browser.get(&other).await.goes("/console/login?refused=provider");
        // It is used once.
        browser.cookies = kept.clone();
        browser.get(&back).await.goes("/console");
        let mut again = Browser::new(&set.t, "again@example.com");
        again.cookies = kept;
        again.get(&back).await.goes("/console/login?refused=provider");
        assert!(again.cookies.keys().all(|it| it == "__Host-fencepost-device"));
        // The person declines, or the code is junk.
        let back = set.leave(&mut again).await;
        let state = back.split(['?', '&']).find(|it| it.starts_with("state=")).expect("a state");
        let declined = format!("/console/login/with/acme/return?error=access_denied&{state}");
        again.get(&declined).await.goes("/console/login?refused=provider");
        again.get("/console/login/with/another").await.says(404, "Not found");
        set.server.stop().await;
    });
}

#[test]
fn a_link_needs_the_session_that_began_it_and_a_step_up() {
    with_provider(async {
        let set = Set::start("oidc-link", "").await;
        set.is(json!({"sub": "ada"})).await;
        Person::sign_up(&set.t, "ada@example.com").await;
        let mut ada = Browser::new(&set.t, "ada@example.com");
        ada.post("/console/account/link/acme", &[]).await.goes("/console/login");
        ada.log_in("ada@example.com").await;
        second_factor::age_sessions(&set.t).await;
        let refused = ada.post("/console/account/link/acme", &[]).await;
        refused.goes("/console/step-up?next=");
        ada.post("/console/step-up", &[("password", PASSWORD)]).await;

        // Another site can neither begin it nor bring its own answer.
        ada.site = Some("cross-site");
        ada.post("/console/account/link/acme", &[]).await.says(403, "a page of the console");
        ada.site = Some("same-origin");
        Person::sign_up(&set.t, "eve@example.com").await;
        let mut eve = Browser::new(&set.t, "eve@example.com");
        eve.log_in("eve@example.com").await;
        let of_eve = set.leave_to_link(&mut eve).await;
        ada.get(&of_eve).await.goes("/console/account?refused=expired");
        ada.get("/console/account?refused=expired").await.says(200, "Try again.");
        // Eve's cookie in Ada's browser is that of another session.
        let provider = "__Host-fencepost-provider";
        ada.cookies.insert(provider.to_owned(), eve.cookies[provider].clone());
        ada.get(&of_eve).await.goes("/console/account?refused=expired");
        // The session is stepped down, or ends, while its person is at the provider.
        let back = set.leave_to_link(&mut ada).await;
        second_factor::age_sessions(&set.t).await;
        ada.get(&back).await.goes(&format!("/console/step-up?{}", encoded("next", &back)));
        ada.post("/console/step-up", &[("password", PASSWORD)]).await;
        // Its code was not used.
        ada.get(&back).await.goes("/console/account?done=provider_linked");
        set.t.database.execute("delete from identities").await;
        let back = set.leave_to_link(&mut ada).await;
        let kept = ada.cookies.clone();
        ada.post("/console/logout", &[]).await.goes("/console/login");
        ada.cookies = kept;
        assert_eq!(ada.get(&back).await.status, 303);
        let count = "select count(*) from identities";
        assert_eq!(set.t.database.number(count).await, 0);
        set.server.stop().await;
    });
}

#[test]
fn one_person_of_a_provider_has_one_account() {
    with_provider(async {
        let set = Set::start("oidc-race", "").await;
        set.is(json!({"sub": "ada"})).await;
        let mut browsers = Vec::new();
        for email in ["ada@example.com", "eve@example.com"] {
            Person::sign_up(&set.t, email).await;
            let mut browser = Browser::new(&set.t, email);
            browser.log_in(email).await;
            let back = set.leave_to_link(&mut browser).await;
            browsers.push((browser, back));
        }
        let [(one, a), (two, b)] = browsers.as_mut_slice() else { panic!("two") };
        let (first, second) = tokio::join!(one.get(a), two.get(b));
        let mut ends = [first, second].map(|it| it.headers["location"].clone());
        ends.sort_by_key(|it| it.as_bytes().to_vec());
        assert_eq!(
            ends,
            ["/console/account?done=provider_linked", "/console/account?refused=taken"]
        );
        // An account has a bound of them.
        let sql = "insert into identities (account_id, id, issuer, subject)
                   select id, gen_random_uuid(), 'https://x.example', id::text || n
                   from accounts, generate_series(1, 10) n";
        set.t.database.execute(sql).await;
        set.is(json!({"sub": "bob"})).await;
        let back = set.leave_to_link(one).await;
        one.get(&back).await.goes("/console/account?refused=many");
        set.server.stop().await;
    });
}

#[test]
fn a_provider_opens_no_more_than_a_password_does() {
    with_provider(async {
        let set = Set::start("oidc-factor", "").await;
        set.is(json!({"sub": "ada"})).await;
        let (person, _) = set.linked("ada@example.com").await;
        let (secret, _) = second_factor::add_app(&set.t, &person).await;
        let mut browser = Browser::new(&set.t, "phone@example.com");
        let back = set.leave(&mut browser).await;
        browser.get(&back).await.goes("/console/login/code?next=%2Fconsole");
        browser.get("/console/account").await.goes("/console/login?next=%2Fconsole%2Faccount");
        let code = second_factor::shown(&secret);
        browser.post("/console/login/code", &[("code", &code)]).await.goes("/console");
        browser.get("/console/account").await.says(200, "ada@example.com");

        let sql = "update accounts set suspended_at = now() where email = 'ada@example.com'";
        set.t.database.execute(sql).await;
        let mut browser = Browser::new(&set.t, "tablet@example.com");
        let back = set.leave(&mut browser).await;
        browser.get(&back).await.says(403, "suspended");
        set.server.stop().await;
    });
}

#[test]
fn a_new_password_unlinks_providers_on_demand() {
    with_provider(async {
        let set = Set::start("oidc-unlinked", "").await;
        set.is(json!({"sub": "eve"})).await;
        let email = "ada@example.com";
        let ada = Person::sign_up(&set.t, email).await;
        let mut eve = Browser::new(&set.t, email);
        eve.log_in(email).await;
        let back = set.leave_to_link(&mut eve).await;
        eve.get(&back).await.goes("/console/account?done=provider_linked");
        let change = async |from: &str, to: &str, removes: bool| {
            let change = json!({
                "current_password": from, "new_password": to, "remove_identities": removes,
            });
            ada.post("/v1/auth/password", change).await.is_empty(204);
        };
        let (second, third) = ("other otters lend umbrellas", "loud herons lend galoshes");
        for (from, to, removes) in [(PASSWORD, second, false), (second, third, true)] {
            change(from, to, removes).await;
            let mut late = Browser::new(&set.t, "late@example.com");
            let back = set.leave(&mut late).await;
            let led = if removes { "/console/login?refused=unlinked" } else { "/console" };
            late.get(&back).await.goes(led);
        }
        set.server.stop().await;
    });
}

#[test]
fn a_reset_password_unlinks_what_a_thief_linked() {
    with_provider(async {
        let set = Set::start("oidc-reclaimed", "").await;
        set.is(json!({"sub": "eve"})).await;
        let email = "ada@example.com";
        Person::sign_up(&set.t, email).await;
        let mut eve = Browser::new(&set.t, email);
        eve.log_in(email).await;
        let back = set.leave_to_link(&mut eve).await;
        eve.get(&back).await.goes("/console/account?done=provider_linked");
        let body = json!({"email": email});
        post_from(&set.t, "/v1/auth/password/reset", body, &address_of(email)).await.is_empty(204);
        let token = loop {
            let mail = set.server.next_mail().await;
            if mail.text.contains("/console/reset/confirm") {
                break secret_in(&mail);
            }
        };
        let body = json!({"token": token, "new_password": "other otters lend umbrellas"});
        let path = "/v1/auth/password/reset/confirm";
        post_from(&set.t, path, body, &address_of(email)).await.is_empty(204);
        let mut late = Browser::new(&set.t, "late@example.com");
        let back = set.leave(&mut late).await;
        late.get(&back).await.goes("/console/login?refused=unlinked");
        set.server.stop().await;
    });
}
