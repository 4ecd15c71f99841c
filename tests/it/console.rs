//! The console as a browser sees it: pages, forms and cookies over HTTP. `tests/e2e/` looks at it
//! with a real browser.

mod buttons;
mod device;
mod forms;
mod pages;
mod parity;
mod second_factor;
mod session;
mod stuck;

use std::collections::BTreeMap;

use fencepost_domain::access::Role;

use crate::{
    harness::{LoneProject, Reply, TestProject},
    people::{PASSWORD, Person, address_of},
};
use reqwest::{Method, StatusCode, header::SET_COOKIE};

/// A browser: it keeps cookies, and says where its requests come from.
pub struct Browser {
    pub url: String,
    pub address: String,
    pub cookies: BTreeMap<String, String>,
    pub site: Option<&'static str>,
    client: reqwest::Client,
}

impl Browser {
    /// One without a session.
    pub fn new(t: &TestProject, email: &str) -> Self {
        let never = reqwest::redirect::Policy::none();
        let client = crate::harness::client_builder().redirect(never).build().expect("a client");
        let (url, address) = (t.url.clone(), address_of(email));
        Self { url, address, cookies: BTreeMap::new(), site: Some("same-origin"), client }
    }

    /// One whose visitor is a member of the project.
    pub async fn of_member(t: &LoneProject, email: &str, role: Role) -> Self {
        let person = Person::sign_up(t, email).await;
        person.join(t, role).await;
        let mut browser = Self::new(t, email);
        browser.log_in(email).await;
        browser
    }

    /// Whether it has a cookie of a session.
    pub fn has_session(&self) -> bool {
        let of_session = ["__Host-fencepost-access", "__Host-fencepost-refresh"];
        of_session.iter().any(|it| self.cookies.contains_key(*it))
    }

    /// Logs in.
    pub async fn log_in(&mut self, email: &str) {
        let form = [("email", email), ("password", PASSWORD)];
        self.post("/console/login", &form).await.goes("/console?from=login");
    }

    /// Signs up, and opens the page that this leads to.
    pub async fn sign_up(&mut self, email: &str, project: &str) -> Reply {
        let form = [("email", email), ("password", PASSWORD), ("project_name", project)];
        let led = self.post("/console/signup", &form).await;
        assert_eq!(led.status, StatusCode::SEE_OTHER, "{}", led.text);
        let place = led.headers["location"].to_str().expect("text").to_owned();
        self.get(&place).await
    }

    /// Opens a page.
    pub async fn get(&mut self, path: &str) -> Reply {
        self.send(Method::GET, path, None).await
    }

    /// Sends a form.
    pub async fn post(&mut self, path: &str, form: &[(&str, &str)]) -> Reply {
        self.send(Method::POST, path, Some(form)).await
    }

    /// Presses a button of the project.
    pub async fn act(&mut self, t: &TestProject, operation: &str, form: &[(&str, &str)]) -> Reply {
        let back = format!("/console/p/{}", t.id);
        let form: Vec<_> =
            [("back", back.as_str())].into_iter().chain(form.iter().copied()).collect();
        self.post(&format!("{back}/do/{operation}"), &form).await
    }

    async fn send(&mut self, method: Method, path: &str, form: Option<&[(&str, &str)]>) -> Reply {
        let cookies: Vec<_> =
            self.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let mut request = self
            .client
            .request(method, format!("{}{path}", self.url))
            .header("x-forwarded-for", &self.address)
            .header("cookie", cookies.join("; "));
        if let Some(site) = self.site {
            request = request.header("sec-fetch-site", site);
        }
        if let Some(form) = form {
            request = request.form(form);
        }
        let reply = Reply::of(request.send().await.expect("an answer")).await;
        for line in reply.headers.get_all(SET_COOKIE) {
            let line = line.to_str().expect("text");
            assert!(line.ends_with("; Secure; HttpOnly; SameSite=Strict"), "{line}");
            assert!(line.contains("; Path=/; Max-Age="), "{line}");
            let (name, rest) = line.split_once('=').expect("a cookie");
            let value = rest.split(';').next().expect("a value");
            if value.is_empty() {
                self.cookies.remove(name);
            } else {
                self.cookies.insert(name.to_owned(), value.to_owned());
            }
        }
        reply
    }
}

/// What a browser sends of the untouched form with this field; inputs only.
pub fn form_with(page: &str, field: &str) -> Vec<(String, String)> {
    let mut forms = page.split("<form ").skip(1).filter_map(|it| it.split("</form>").next());
    let form = forms.find(|it| it.contains(&format!("name=\"{field}\"")));
    let form = form.expect("the form");
    let inputs = form.split("<input ").skip(1).filter_map(|it| it.split('>').next());
    let is_sent = |it: &&str| !it.contains("type=\"checkbox\"") || it.contains(" checked");
    let value = |input: &str, name: &str| {
        let after = format!(" {input}").split_once(&format!(" {name}=\""))?.1.to_owned();
        Some(after.split('"').next()?.replace("&#34;", "\""))
    };
    let selects = form.split("<select ").skip(1).filter_map(|it| it.split("</select>").next());
    let chosen = selects.filter_map(|list| {
        let (select, options) = list.split_once('>')?;
        let options: Vec<_> =
            options.split("<option ").skip(1).filter_map(|it| it.split('>').next()).collect();
        let chosen = options.iter().find(|it| it.contains(" selected")).or(options.first());
        Some((value(select, "name")?, value(chosen?, "value")?))
    });
    let typed = inputs
        .filter(is_sent)
        .filter_map(|it| Some((value(it, "name")?, value(it, "value").unwrap_or_default())));
    typed.chain(chosen).collect()
}

/// The same, to be sent.
pub fn pairs(form: &[(String, String)]) -> Vec<(&str, &str)> {
    form.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
}

impl Reply {
    /// Sends the browser on to this place.
    #[track_caller]
    pub fn goes(&self, to: &str) {
        assert_eq!(self.status, StatusCode::SEE_OTHER, "{}", self.text);
        assert_eq!(self.headers["location"], to);
    }

    /// Is a page that says this.
    #[track_caller]
    pub fn says(&self, status: u16, text: &str) {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        // As a browser shows it: a line break is a space.
        let shown: Vec<_> = self.text.split_whitespace().collect();
        let is_there = shown.join(" ").contains(text) || self.text.contains(text);
        assert!(is_there, "{text:?} is not in {}", self.text);
    }

    /// Redirects to this path.
    #[track_caller]
    pub fn goes_temporarily(&self, to: &str) {
        assert_eq!(self.status, StatusCode::TEMPORARY_REDIRECT, "{}", self.text);
        assert_eq!(self.headers["location"], to);
    }
}
