//! A provider that lies: each of its tokens, and each of its documents, breaks one rule.

use std::sync::{Arc, Mutex};

use axum::{
    Json, Router,
    extract::{Path, State},
    response::{IntoResponse, Redirect, Response},
    routing::{get, post},
};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64_URL};
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair},
};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::{Browser, Person, Stage, TestServer, config, departure, fresh_database, with_provider};

#[derive(Clone)]
pub struct Liar {
    pub url: String,
    key: Arc<EcdsaKeyPair>,
    /// What the next code is exchanged for.
    token: Arc<Mutex<String>>,
}

impl Liar {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let random = SystemRandom::new();
        let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let document = EcdsaKeyPair::generate_pkcs8(algorithm, &random).expect("a key");
        let key = EcdsaKeyPair::from_pkcs8(algorithm, document.as_ref(), &random);
        let key = Arc::new(key.expect("a key"));
        let liar = Self { url, key, token: Arc::default() };
        let routes = Router::new()
            .route("/{name}/.well-known/openid-configuration", get(discovery))
            .route("/keys", get(keys))
            .route("/token", post(token))
            .with_state(liar.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        liar
    }

    /// Its key, beside one of a kind that few know.
    pub fn keys(&self) -> Value {
        let point = self.key.public_key().as_ref();
        let [x, y] = [&point[1..33], &point[33..]].map(|it| BASE64_URL.encode(it));
        let key = json!({"kty": "EC", "crv": "P-256", "kid": "one", "use": "sig", "x": x, "y": y});
        let later = json!({"kty": "AKP", "kid": "later", "alg": "ML-DSA-65", "pub": "x"});
        json!({"keys": [later, key]})
    }

    /// A token with this head and these claims.
    pub fn sign(&self, head: &Value, claims: &Value) -> String {
        let text = [head, claims].map(|it| BASE64_URL.encode(it.to_string())).join(".");
        if head["alg"] == "HS256" {
            // With what everybody knows as the secret.
            let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, self.key.public_key().as_ref());
            let tag = ring::hmac::sign(&key, text.as_bytes());
            return format!("{text}.{}", BASE64_URL.encode(tag));
        }
        let signature = self.key.sign(&SystemRandom::new(), text.as_bytes()).expect("it signs");
        format!("{text}.{}", BASE64_URL.encode(signature))
    }
}

async fn discovery(State(liar): State<Liar>, Path(name): Path<String>) -> Response {
    let url = &liar.url;
    let mut reported = json!({
        "issuer": format!("{url}/{name}"), "authorization_endpoint": format!("{url}/auth"),
        "token_endpoint": format!("{url}/token"), "jwks_uri": format!("{url}/keys"),
    });
    match name.as_str() {
        "impostor" => reported["issuer"] = json!("https://accounts.example.com"),
        "plain" => reported["token_endpoint"] = json!("http://example.com/token"),
        "huge" => reported["more"] = json!("x".repeat(300_000)),
        "moved" => {
            return Redirect::to("/moved-away/.well-known/openid-configuration").into_response();
        }
        "moved-away" => reported["issuer"] = json!(format!("{url}/moved")),
        "junk" => return "<html>".into_response(),
        _ => (),
    }
    Json(reported).into_response()
}

async fn keys(State(liar): State<Liar>) -> Json<Value> {
    Json(liar.keys())
}

async fn token(State(liar): State<Liar>) -> Json<Value> {
    let id_token = liar.token.lock().expect("a lock").clone();
    Json(json!({"access_token": "x", "token_type": "Bearer", "id_token": id_token}))
}

const NAMES: [&str; 6] = ["good", "impostor", "plain", "huge", "moved", "junk"];

async fn served(liar: &Liar) -> TestServer {
    let providers = NAMES.map(|name| {
        format!(
            "[[providers]]\nname = \"{name}\"\nissuer = \"{}/{name}\"\nclient_id = \"me\"\n",
            liar.url
        )
    });
    let providers = config("oidc-liar", &providers.join("\n"));
    TestServer::start_as(fresh_database().await, Stage { providers, ..Stage::default() }).await
}

#[expect(clippy::disallowed_methods, reason = "a provider has a clock of its own")]
pub fn now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.expect("a time").as_secs()
}

/// Comes back with this token; returns where that leads.
async fn arrive(
    server: &TestServer,
    liar: &Liar,
    count: usize,
    reported: fn(&mut Value, &mut Value),
) -> String {
    let t = server.project(&format!("p{count}")).await;
    let mut browser = Browser::new(&t, &format!("p{count}@example.com"));
    let leads = departure(&mut browser, "/console/login/with/good").await;
    let asked: reqwest::Url = leads.parse().expect("a URL");
    let of = |name: &str| asked.query_pairs().find(|it| it.0 == name).expect(name).1.into_owned();
    let mut head = json!({"alg": "ES256", "kid": "one"});
    let mut claims = json!({
        "iss": format!("{}/good", liar.url), "aud": "me", "sub": "ada", "nonce": of("nonce"),
        "iat": now(), "exp": now() + 300, "email": "ada@example.com", "email_verified": true,
    });
    reported(&mut head, &mut claims);
    let mut token = liar.sign(&head, &claims);
    if let Some(end) = claims["end"].as_str() {
        token = format!("{}.{end}", token.rsplit_once('.').expect("parts").0);
    }
    *liar.token.lock().expect("a lock") = token;
    let path = format!("/console/login/with/good/return?code=x&state={}", of("state"));
    let answer = browser.get(&path).await;
    assert_eq!(answer.status, 303, "{}", answer.text);
    answer.headers["location"].to_str().expect("text").to_owned()
}

type Lie = (&'static str, fn(&mut Value, &mut Value));

const LIES: &[Lie] = &[
    ("another issuer", |_, it| it["iss"] = json!("https://accounts.example.com")),
    ("another audience", |_, it| it["aud"] = json!("you")),
    ("no audience", |_, it| drop(it.as_object_mut().expect("claims").remove("aud"))),
    ("for many clients", |_, it| it["aud"] = json!(["me", "you"])),
    ("of another client", |_, it| it["azp"] = json!("you")),
    ("another login", |_, it| it["nonce"] = json!("x")),
    ("no login", |_, it| drop(it.as_object_mut().expect("claims").remove("nonce"))),
    ("expired", |_, it| it["exp"] = json!(now() - 120)),
    ("endless", |_, it| drop(it.as_object_mut().expect("claims").remove("exp"))),
    ("of yesterday", |_, it| it["iat"] = json!(now() - 86_400)),
    ("of tomorrow", |_, it| it["iat"] = json!(now() + 86_400)),
    ("not valid yet", |_, it| it["nbf"] = json!(now() + 600)),
    ("no age", |_, it| drop(it.as_object_mut().expect("claims").remove("iat"))),
    ("without a subject", |_, it| it["sub"] = json!("")),
    ("with a long subject", |_, it| it["sub"] = json!("x".repeat(256))),
    ("an unknown key", |head, _| head["kid"] = json!("two")),
    ("a key of another kind", |head, _| head["kid"] = json!("later")),
    ("no algorithm", |head, it| {
        head["alg"] = json!("none");
        it["end"] = json!("");
    }),
    ("a secret as algorithm", |head, _| head["alg"] = json!("HS256")),
    ("a subject that no text holds", |_, it| it["sub"] = json!("a\0")),
    ("another curve", |head, _| head["alg"] = json!("ES384")),
    ("another family", |head, _| head["alg"] = json!("RS256")),
    ("no signature", |_, it| it["end"] = json!("")),
    ("a signature of something else", |_, it| it["end"] = json!("A".repeat(86))),
];

#[test]
fn no_token_that_breaks_a_rule_logs_anybody_in() {
    with_provider(async {
        let liar = Liar::start().await;
        let server = served(&liar).await;
        let t = server.project("main").await;
        Person::sign_up(&t, "ada@example.com").await;
        let sql = format!(
            "insert into identities (account_id, id, issuer, subject)
             select id, gen_random_uuid(), '{}/good', subject
             from accounts, unnest(array['ada', '', repeat('x', 256)]) subject",
            liar.url
        );
        t.database.execute(&sql).await;
        let good = arrive(&server, &liar, 0, |_, _| ()).await;
        assert_eq!(good, "/console", "the yardstick");
        let nameless = arrive(&server, &liar, 1, |head, _| {
            drop(head.as_object_mut().expect("a head").remove("kid"));
        });
        assert_eq!(nameless.await, "/console", "only one key fits");
        for (count, (what, lie)) in LIES.iter().enumerate() {
            let end = arrive(&server, &liar, count + 2, *lie).await;
            assert_eq!(end, "/console/login?refused=provider", "{what}");
        }
        for name in &NAMES[1..] {
            let mut browser = Browser::new(&t, &format!("{name}@example.com"));
            let page = browser.get(&format!("/console/login/with/{name}")).await;
            page.says(503, "the login provider does not answer");
        }
        server.stop().await;
    });
}
