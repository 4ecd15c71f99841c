//! People: signing up, logging in and out, passwords, members, and the end of an account.

use fencepost_domain::access::Role;

use crate::harness::{LoneProject, Reply, TestProject};
use reqwest::Method;
use serde_json::{Value, json};

pub const PASSWORD: &str = "quiet otters borrow umbrellas";

/// A person with a session.
pub struct Person {
    pub url: String,
    pub email: String,
    pub account_id: String,
    pub session_id: String,
    pub access_token: String,
    pub refresh_token: String,
    /// What signing up answered.
    pub made: Value,
    pub client: reqwest::Client,
}

impl Person {
    /// Signs up, verifies the address and logs in, from an address of their own.
    pub async fn sign_up(t: &LoneProject, email: &str) -> Self {
        let person = Self::sign_up_unverified(t, email).await;
        let id = person.id().0;
        let verify = format!("update accounts set verified_at = now() where id = '{id}'");
        t.database.execute(&verify).await;
        person
    }

    /// Signs up and logs in.
    pub async fn sign_up_unverified(t: &TestProject, email: &str) -> Self {
        let address = address_of(email);
        let body = json!({"email": email, "password": PASSWORD, "project_name": email});
        let made = post_from(t, "/v1/auth/signup", body, &address).await.is(201);
        Self::log_in(t, email, PASSWORD, made).await
    }

    /// Logs in.
    pub async fn log_in(t: &TestProject, email: &str, password: &str, made: Value) -> Self {
        let body = json!({"email": email, "password": password});
        let session = post_from(t, "/v1/auth/login", body, &address_of(email)).await.is(200);
        let text = |name: &str| session[name].as_str().expect("a text").to_owned();
        Self {
            url: t.url.clone(),
            email: email.to_owned(),
            account_id: text("account_id"),
            session_id: text("session_id"),
            access_token: text("access_token"),
            refresh_token: text("refresh_token"),
            made,
            client: t.client.clone(),
        }
    }

    /// A request with the session.
    pub async fn send(&self, method: Method, path: &str, body: Option<Value>) -> Reply {
        let request = self.client.request(method, format!("{}{path}", self.url));
        let mut request = request
            .bearer_auth(&self.access_token)
            .header("x-forwarded-for", address_of(&self.email));
        if let Some(body) = body {
            request = request.json(&body);
        }
        Reply::of(request.send().await.expect("an answer")).await
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.send(Method::GET, path, None).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Reply {
        self.send(Method::POST, path, Some(body)).await
    }

    pub async fn patch(&self, path: &str, body: Value) -> Reply {
        self.send(Method::PATCH, path, Some(body)).await
    }

    pub async fn delete(&self, path: &str) -> Reply {
        self.send(Method::DELETE, path, None).await
    }

    /// Is a member of the project from now on, by the database's word.
    pub async fn join(&self, t: &LoneProject, role: Role) {
        self.join_project(t, "main", role).await;
    }

    /// Becomes a member of the project with this slug.
    pub async fn join_project(&self, t: &LoneProject, slug: &str, role: Role) {
        let sql = format!(
            "insert into members (project_id, account_id, role)
             select id, '{}', '{}' from projects where slug = '{slug}'",
            self.id().0,
            role.name(),
        );
        t.database.execute(&sql).await;
    }

    fn id(&self) -> fencepost_domain::ids::AccountId {
        self.account_id.parse().expect("an id")
    }
}

/// Each person calls from somewhere else.
pub fn address_of(email: &str) -> String {
    let hash = email.bytes().fold(7_u32, |hash, it| hash.wrapping_mul(31).wrapping_add(it.into()));
    format!("172.{}.{}.{}", hash >> 16 & 255, hash >> 8 & 255, hash & 255)
}

/// Posts without a credential, from this address.
pub async fn post_from(t: &TestProject, path: &str, body: Value, address: &str) -> Reply {
    let request = t.client.post(format!("{}{path}", t.url)).header("x-forwarded-for", address);
    Reply::of(request.json(&body).send().await.expect("an answer")).await
}

mod accounts;
mod bound_keys;
mod claims;
mod device_login;
mod email_change;
mod keys;
mod logins;
mod mails;
mod master_keys;
mod members;
mod passkeys;
mod passwords;
mod payloads;
mod providers;
mod scanners;
pub mod second_factor;
pub mod security;
