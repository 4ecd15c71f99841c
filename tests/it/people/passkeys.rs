//! Passkeys: adding them, logging in with them, stepping up, and what is refused. The authenticator
//! is a program; `tests/e2e/` has Chromium's.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use ciborium::{Value as Cbor, cbor};
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{
    PASSWORD, Person,
    accounts::{open_server, secret_in},
    address_of, post_from,
    second_factor::age_sessions,
};
use crate::harness::{LoneProject, Reply, Stage, TestProject, TestServer, limited};

const ADA: &str = "ada@example.com";
const DOMAIN: &str = "queue.example.com";
const ORIGIN: &str = "https://queue.example.com";

const PRESENT: u8 = 1;
const VERIFIED: u8 = 4;
const MAY_BE_COPIED: u8 = 8;
const IS_COPIED: u8 = 16;
const HAS_CREDENTIAL: u8 = 64;

enum Key {
    Es256(EcdsaKeyPair),
    EdDsa(Ed25519KeyPair),
}

/// An authenticator with one passkey, and what it lies about.
struct Authenticator {
    key: Key,
    credential_id: Vec<u8>,
    count: u32,
    rp_id: &'static str,
    origin: &'static str,
    flags: u8,
    kind: Option<&'static str>,
    user: Option<String>,
}

fn encode(bytes: impl AsRef<[u8]>) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

impl Authenticator {
    fn with(key: Key) -> Self {
        Self {
            key,
            credential_id: rand::random::<[u8; 32]>().to_vec(),
            count: 0,
            rp_id: DOMAIN,
            origin: ORIGIN,
            flags: PRESENT | VERIFIED,
            kind: None,
            user: None,
        }
    }

    fn new() -> Self {
        let random = SystemRandom::new();
        let algorithm = &ECDSA_P256_SHA256_ASN1_SIGNING;
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(algorithm, &random).expect("a key");
        let key = EcdsaKeyPair::from_pkcs8(algorithm, pkcs8.as_ref(), &random).expect("a key");
        Self::with(Key::Es256(key))
    }

    fn ed25519() -> Self {
        let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).expect("a key");
        Self::with(Key::EdDsa(Ed25519KeyPair::from_pkcs8(pkcs8.as_ref()).expect("a key")))
    }

    fn public_key(&self) -> Cbor {
        match &self.key {
            Key::Es256(key) => {
                let point = key.public_key().as_ref();
                let [x, y] = [1, 33].map(|at| Cbor::Bytes(point[at..at + 32].to_vec()));
                cbor!({1 => 2, 3 => -7, -1 => 1, -2 => x, -3 => y}).expect("a map")
            }
            Key::EdDsa(key) => {
                let point = Cbor::Bytes(key.public_key().as_ref().to_vec());
                cbor!({1 => 1, 3 => -8, -1 => 6, -2 => point}).expect("a map")
            }
        }
    }

    fn client_data(&self, kind: &str, challenge: &str) -> String {
        let kind = self.kind.unwrap_or(kind);
        json!({"type": kind, "challenge": challenge, "origin": self.origin, "crossOrigin": false})
            .to_string()
    }

    fn head(&self, flags: u8) -> Vec<u8> {
        let mut data = Sha256::digest(self.rp_id.as_bytes()).to_vec();
        data.push(flags);
        data.extend(self.count.to_be_bytes());
        data
    }

    /// Answers `navigator.credentials.create()`.
    fn create(&mut self, question: &Value) -> Value {
        let options = &question["options"];
        self.user = options["user"]["id"].as_str().map(str::to_owned);
        let challenge = options["challenge"].as_str().expect("a challenge");
        let mut data = self.head(self.flags | HAS_CREDENTIAL);
        data.extend([0; 16]);
        data.extend(u16::try_from(self.credential_id.len()).expect("short").to_be_bytes());
        data.extend(&self.credential_id);
        ciborium::into_writer(&self.public_key(), &mut data).expect("bytes");
        let object = cbor!({"fmt" => "none", "attStmt" => {}, "authData" => Cbor::Bytes(data)});
        let mut bytes = Vec::new();
        ciborium::into_writer(&object.expect("a map"), &mut bytes).expect("bytes");
        json!({
            "challenge_token": question["challenge_token"],
            "credential": {
                "id": encode(&self.credential_id), "rawId": encode(&self.credential_id),
                "type": "public-key", "clientExtensionResults": {},
                "response": {
                    "clientDataJSON": encode(self.client_data("webauthn.create", challenge)),
                    "attestationObject": encode(bytes), "transports": ["internal"],
                },
            },
        })
    }

    /// Answers `navigator.credentials.get()`.
    fn get(&mut self, question: &Value) -> Value {
        let challenge = question["options"]["challenge"].as_str().expect("a challenge");
        let data = self.head(self.flags);
        let client_data = self.client_data("webauthn.get", challenge);
        let signed = [data.as_slice(), Sha256::digest(client_data.as_bytes()).as_slice()].concat();
        let signature = match &self.key {
            Key::Es256(key) => {
                let signature = key.sign(&SystemRandom::new(), &signed).expect("a signature");
                signature.as_ref().to_vec()
            }
            Key::EdDsa(key) => key.sign(&signed).as_ref().to_vec(),
        };
        json!({
            "challenge_token": question["challenge_token"],
            "credential": {
                "id": encode(&self.credential_id), "rawId": encode(&self.credential_id),
                "type": "public-key", "clientExtensionResults": {},
                "response": {
                    "clientDataJSON": encode(client_data), "authenticatorData": encode(data),
                    "signature": encode(signature), "userHandle": self.user,
                },
            },
        })
    }
}

async fn start() -> (TestServer, LoneProject, Person) {
    let public_url = Some(ORIGIN.to_owned());
    let (server, t) = open_server(Stage { public_url, ..Stage::default() }).await;
    let ada = Person::sign_up(&t, ADA).await;
    (server, t, ada)
}

async fn add(person: &Person, authenticator: &mut Authenticator) -> Reply {
    let question = person.post("/v1/me/passkeys/options", json!({})).await.is(200);
    let mut body = authenticator.create(&question);
    body["name"] = json!("laptop");
    person.post("/v1/me/passkeys", body).await
}

async fn ask(t: &TestProject) -> Value {
    post_from(t, "/v1/auth/passkeys/options", json!({}), "192.0.2.1").await.is(200)
}

async fn log_in_with(t: &TestProject, body: Value) -> Reply {
    post_from(t, "/v1/auth/login/passkey", body, &address_of(ADA)).await
}

async fn log_in(t: &TestProject, authenticator: &mut Authenticator) -> Reply {
    let question = ask(t).await;
    log_in_with(t, authenticator.get(&question)).await
}

#[track_caller]
fn is_refused(reply: &Reply, why: &str) {
    let error = reply.is_error(401, "passkey_refused");
    assert_eq!(error["message"], format!("the passkey is refused: {why}"));
}

#[test]
fn a_passkey_logs_in_without_a_password_and_is_asked_for_after_it() {
    limited(async {
        let (server, t, ada) = start().await;
        for mut key in [Authenticator::new(), Authenticator::ed25519()] {
            let added = add(&ada, &mut key).await.is(201);
            assert_eq!(added["passkey"]["name"], "laptop");
            let session = log_in(&t, &mut key).await.is(200);
            assert_eq!(session["account_id"], json!(ada.account_id));
            // A password alone is half of a login.
            let body = json!({"email": ADA, "password": PASSWORD});
            let half = post_from(&t, "/v1/auth/login", body, &address_of(ADA)).await;
            let half = half.is_error(403, "code_required");
            let mut body = key.get(&ask(&t).await);
            body["login_token"] = half["login_token"].clone();
            log_in_with(&t, body.clone()).await.is(200);
            log_in_with(&t, body).await.is_error(401, "invalid_credentials");
        }
        let factors = ada.get("/v1/me/second-factors").await.is(200);
        let passkeys = factors["passkeys"].as_array().expect("passkeys");
        assert_eq!((passkeys.len(), &factors["recovery_codes_left"]), (2, &json!(10)));
        assert!(passkeys.iter().all(|it| it["last_used_at"].is_string()));
        let log = ada.get("/v1/me/security-log").await.is(200).to_string();
        assert!(log.contains("passkey.added"), "{log}");

        for it in passkeys {
            let path = format!("/v1/me/passkeys/{}", it["id"].as_str().expect("an id"));
            ada.delete(&path).await.is_empty(204);
            ada.delete(&path).await.is_error(404, "passkey_not_found");
        }
        let none = ada.get("/v1/me/second-factors").await.is(200);
        assert_eq!((&none["passkeys"], &none["recovery_codes_left"]), (&json!([]), &json!(0)));
        let body = json!({"email": ADA, "password": PASSWORD});
        post_from(&t, "/v1/auth/login", body, &address_of(ADA)).await.is(200);
        server.stop().await;
    });
}

#[test]
fn an_answer_counts_once_however_many_send_it() {
    limited(async {
        let (server, t, ada) = start().await;
        let mut key = Authenticator::new();
        let question = ada.post("/v1/me/passkeys/options", json!({})).await.is(200);
        let mut new = key.create(&question);
        new["name"] = json!("laptop");
        let codes = ada.post("/v1/me/passkeys", new.clone()).await.is(201);
        assert_eq!(codes["recovery_codes"].as_array().map(Vec::len), Some(10));
        is_refused(&ada.post("/v1/me/passkeys", new).await, "it was used already: try again");
        let body = key.get(&ask(&t).await);
        let tries = (0..8).map(|_| log_in_with(&t, body.clone()));
        let replies = futures_util::future::join_all(tries).await;
        let done = replies.iter().filter(|it| it.status == 200).count();
        assert_eq!(done, 1, "one of them logs in");
        for it in replies.iter().filter(|it| it.status != 200) {
            is_refused(it, "it was used already: try again");
        }
        server.stop().await;
    });
}

#[test]
fn a_new_password_removes_passkeys_on_demand() {
    limited(async {
        let (server, t, ada) = start().await;
        let mut key = Authenticator::new();
        add(&ada, &mut key).await.is(201);
        let change = async |from: &str, to: &str, more: Value| {
            let mut body = json!({"current_password": from, "new_password": to});
            body.as_object_mut().expect("one").extend(more.as_object().expect("one").clone());
            ada.post("/v1/auth/password", body).await.is_empty(204);
        };
        let (second, third) = ("loud herons lend galoshes", "seven yellow submarines");
        change(PASSWORD, second, json!({})).await;
        log_in(&t, &mut key).await.is(200);
        change(second, third, json!({"remove_passkeys": true})).await;
        is_refused(&log_in(&t, &mut key).await, "no account has it, or not this one");
        let factors = ada.get("/v1/me/second-factors").await.is(200);
        assert_eq!(factors["recovery_codes_left"], 0);
        server.stop().await;
    });
}

/// Waits for the mail about a passkey that may be a copy.
async fn is_warned(server: &TestServer) {
    while !server.next_mail().await.text.contains("may have been copied") {}
}

#[test]
fn what_another_site_or_a_copy_has_got_is_refused() {
    limited(async {
        let (server, t, ada) = start().await;
        let mut key = Authenticator::new();
        for (change, why) in lies() {
            let mut lying = Authenticator::new();
            change(&mut lying);
            is_refused(&add(&ada, &mut lying).await, why);
        }
        key.count = 7;
        add(&ada, &mut key).await.is(201);
        let present = (key.credential_id.clone(), key.user.clone());
        for (change, why) in lies() {
            change(&mut key);
            is_refused(&log_in(&t, &mut key).await, why);
            (key.rp_id, key.origin) = (DOMAIN, ORIGIN);
            (key.flags, key.kind) = (PRESENT | VERIFIED, None);
        }
        key.count = 7;
        is_refused(&log_in(&t, &mut key).await, "its counter went back: there may be a copy of it");
        is_warned(&server).await;
        key.count = 8;
        key.flags |= MAY_BE_COPIED;
        let why = "it is of another kind than the one that was added";
        is_refused(&log_in(&t, &mut key).await, why);
        is_warned(&server).await;
        key.flags = PRESENT | VERIFIED;
        log_in(&t, &mut key).await.is(200);
        let mut other = Authenticator::new();
        other.credential_id.clone_from(&key.credential_id);
        other.user.clone_from(&key.user);
        other.count = 9;
        is_refused(&log_in(&t, &mut other).await, "its signature is wrong");
        key.count = 9;
        key.user = None;
        is_refused(&log_in(&t, &mut key).await, "it does not say whose it is");
        key.user = Some(encode([7; 16]));
        is_refused(&log_in(&t, &mut key).await, "it is of another account");
        (key.credential_id, key.user) = present;
        key.credential_id.push(0);
        is_refused(&log_in(&t, &mut key).await, "no account has it, or not this one");
        key.credential_id.pop();

        // Another question's answer, and a token that was changed.
        let question = ask(&t).await;
        let mut body = key.get(&question);
        body["challenge_token"] = ask(&t).await["challenge_token"].clone();
        is_refused(&log_in_with(&t, body).await, "it is an answer to another challenge");
        let mut body = key.get(&question);
        let token = body["challenge_token"].as_str().expect("a token");
        body["challenge_token"] = json!(token.replace('.', "x"));
        is_refused(&log_in_with(&t, body).await, "the challenge has expired: try again");
        let question = ada.post("/v1/me/passkeys/options", json!({})).await.is(200);
        let body = key.get(&question);
        is_refused(&log_in_with(&t, body).await, "it is an answer to another kind of challenge");
        let body = json!({"challenge_token": "x", "credential": {"rawId": 7}});
        log_in_with(&t, body).await.refuses("credential");
        server.stop().await;
    });
}

type Lie = (fn(&mut Authenticator), &'static str);

fn lies() -> [Lie; 6] {
    [
        (|it| it.origin = "https://queue.example.com.evil.example", "it was given to another site"),
        (|it| it.rp_id = "example.com", "it is for another site"),
        (|it| it.flags = PRESENT, "the authenticator has not verified you"),
        (|it| it.flags = VERIFIED, "the authenticator has not verified you"),
        (|it| it.flags = PRESENT | VERIFIED | IS_COPIED, "it cannot be read"),
        (|it| it.kind = Some("payment.get"), "it is an answer to another kind of challenge"),
    ]
}

#[test]
fn a_stolen_session_adds_no_passkey_and_one_of_another_account_proves_nothing() {
    limited(async {
        let (server, t, ada) = start().await;
        let eve = Person::sign_up(&t, "eve@example.com").await;
        let (mut of_ada, mut of_eve) = (Authenticator::new(), Authenticator::new());
        let question = ada.post("/v1/me/passkeys/options", json!({})).await.is(200);
        add(&ada, &mut of_ada).await.is(201);
        add(&eve, &mut of_eve).await.is(201);
        // The question of another account.
        let mut body = Authenticator::new().create(&question);
        body["name"] = json!("mine");
        let refused = eve.post("/v1/me/passkeys", body.clone()).await;
        is_refused(&refused, "it is an answer to another kind of challenge");
        let user = of_ada.user.clone();
        let mut same = of_ada.create(&eve.post("/v1/me/passkeys/options", json!({})).await.is(200));
        same["name"] = json!("hers");
        is_refused(&eve.post("/v1/me/passkeys", same).await, "an account has it already");
        of_ada.user = user;

        age_sessions(&t).await;
        ada.post("/v1/me/passkeys/options", json!({})).await.is_error(403, "step_up_required");
        ada.post("/v1/me/passkeys", body).await.is_error(403, "step_up_required");
        let id = ada.get("/v1/me/second-factors").await.is(200)["passkeys"][0]["id"].clone();
        let path = format!("/v1/me/passkeys/{}", id.as_str().expect("an id"));
        ada.delete(&path).await.is_error(403, "step_up_required");
        eve.delete(&path).await.is_error(403, "step_up_required");
        ada.post("/v1/auth/step-up", json!({"password": PASSWORD})).await.refuses("code");
        let foreign = of_eve.get(&ask(&t).await);
        let refused = ada.post("/v1/auth/step-up", json!({"passkey": foreign})).await;
        is_refused(&refused, "no account has it, or not this one");
        let own = of_ada.get(&ask(&t).await);
        ada.post("/v1/auth/step-up", json!({"passkey": own.clone()})).await.is_empty(204);
        let again = ada.post("/v1/auth/step-up", json!({"passkey": own})).await;
        is_refused(&again, "it was used already: try again");
        ada.delete(&path).await.is_empty(204);
        is_refused(&log_in(&t, &mut of_ada).await, "no account has it, or not this one");
        server.stop().await;
    });
}

#[test]
fn a_passkey_from_before_a_reset_of_the_password_needs_the_new_one() {
    limited(async {
        let (server, t, ada) = start().await;
        let mut key = Authenticator::new();
        server.next_mail().await;
        add(&ada, &mut key).await.is(201);
        server.next_mail().await;
        log_in(&t, &mut key).await.is(200);
        let reset = json!({"email": ADA});
        post_from(&t, "/v1/auth/password/reset", reset, "192.0.2.9").await.is_empty(204);
        let new = "loud herons lend galoshes";
        let link = secret_in(&server.next_mail().await);
        let confirm = json!({"token": link, "new_password": new});
        post_from(&t, "/v1/auth/password/reset/confirm", confirm, "192.0.2.9").await.is_empty(204);
        let why = "the password was reset after it was added: log in with the password first, and \
                   then use it";
        is_refused(&log_in(&t, &mut key).await, why);
        let body = json!({"email": ADA, "password": new});
        let half = post_from(&t, "/v1/auth/login", body, &address_of(ADA)).await;
        let half = half.is_error(403, "code_required");
        let mut body = key.get(&ask(&t).await);
        body["login_token"] = half["login_token"].clone();
        log_in_with(&t, body).await.is(200);
        log_in(&t, &mut key).await.is(200);
        server.stop().await;
    });
}

#[test]
fn a_server_without_a_domain_has_no_passkeys_and_an_account_has_ten() {
    limited(async {
        let (server, t) = open_server(Stage::default()).await;
        let why = "this server has no domain name, which passkeys need";
        let asked = post_from(&t, "/v1/auth/passkeys/options", json!({}), "192.0.2.1").await;
        is_refused(&asked, why);
        server.stop().await;
        let (server, _, ada) = start().await;
        for _ in 0..10 {
            add(&ada, &mut Authenticator::new()).await.is(201);
        }
        let question = ada.post("/v1/me/passkeys/options", json!({})).await.is(200);
        let present = question["options"]["excludeCredentials"].as_array().map(Vec::len);
        assert_eq!(present, Some(10));
        add(&ada, &mut Authenticator::new()).await.is_error(429, "quota_exceeded");
        let mut nameless = Authenticator::new().create(&question);
        nameless["name"] = json!("");
        ada.post("/v1/me/passkeys", nameless).await.refuses("name");
        server.stop().await;
    });
}
