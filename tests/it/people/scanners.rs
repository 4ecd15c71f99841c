//! Reports of secret scanners: signed by a known key, or refused.

use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};
use fencepost_identity::accounts::scanners::ScannerKeys;
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair},
};
use serde_json::json;

use super::accounts::open_server;
use crate::harness::{Reply, Stage, TestProject, limited};

/// How a P-256 key begins in its DER form.
const HEAD: &str = "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE";

fn new_key() -> EcdsaKeyPair {
    let (alg, random) = (&ECDSA_P256_SHA256_ASN1_SIGNING, SystemRandom::new());
    let pkcs8 = EcdsaKeyPair::generate_pkcs8(alg, &random).expect("a key");
    EcdsaKeyPair::from_pkcs8(alg, pkcs8.as_ref(), &random).expect("a key")
}

/// A file of public keys, as scanners publish it.
fn file(keys: &[(&str, &EcdsaKeyPair)]) -> String {
    let of = |(id, key): &(&str, &EcdsaKeyPair)| {
        // The first byte of the point ends the head.
        let der = [&BASE64.decode(HEAD).expect("base64")[..], &key.public_key().as_ref()[1..]];
        let pem = format!(
            "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n",
            BASE64.encode(der.concat())
        );
        json!({"key_identifier": id, "key": pem, "is_current": true})
    };
    json!({"public_keys": keys.iter().map(of).collect::<Vec<_>>()}).to_string()
}

fn sign(key: &EcdsaKeyPair, body: &str) -> String {
    let signature = key.sign(&SystemRandom::new(), body.as_bytes()).expect("a signature");
    BASE64.encode(signature.as_ref())
}

async fn report(t: &TestProject, id: &str, signature: &str, body: &str) -> Reply {
    let request = t.client.post(format!("{}/v1/keys/scanner-reports", t.url));
    let request = request
        .header("content-type", "application/json")
        .header("github-public-key-identifier", id)
        .header("github-public-key-signature", signature);
    Reply::of(request.body(body.to_owned()).send().await.expect("an answer")).await
}

#[test]
fn keys_that_a_known_scanner_has_found_end_at_once() {
    limited(async {
        let (old, new, stranger) = (new_key(), new_key(), new_key());
        let known = ScannerKeys::parse(&file(&[("old", &old), ("new", &new)])).expect("keys");
        let stage = Stage { scanner_keys: known.into(), ..Stage::default() };
        let (server, t) = open_server(stage).await;
        let mut leaked = Vec::new();
        for name in ["a", "b"] {
            let made = t.post("/v1/keys", json!({"name": name})).await.is(201);
            let key = made["secret"].as_str().expect("a key").to_owned();
            leaked.push(t.with_key(key));
        }
        let body = json!([
            {"token": leaked[0].api_key, "type": "fencepost_api_key", "url": "https://example.com"},
            {"token": "fp_live_junk"}, {"token": leaked[1].api_key},
        ]);
        let body = body.to_string();
        let right = sign(&new, &body);
        for (id, signature) in [
            ("new", ""),
            ("", right.as_str()),
            ("old", &right),
            ("unknown", &right),
            ("new", &sign(&stranger, &body)),
            ("new", &sign(&new, "[]")),
        ] {
            let refused = report(&t, id, signature, &body).await;
            refused.refuses("github-public-key-signature");
        }
        for key in &leaked {
            key.get("/v1/limits").await.is(200);
        }
        // A repeated report changes nothing more.
        for _ in 0..2 {
            report(&t, "new", &right, &body).await.is_empty(204);
        }
        for key in &leaked {
            key.get("/v1/limits").await.is_error(401, "unauthorized");
        }
        t.get("/v1/limits").await.is(200);
        let log = t.get("/v1/audit-log?action=key.reported").await.is(200);
        assert_eq!(log["entries"][0]["actor"]["kind"], "system");
        let junk = json!([leaked[0].api_key]).to_string();
        let error = report(&t, "old", &sign(&old, &junk), &junk).await;
        assert!(!error.is_error(400, "invalid_request").to_string().contains("fp_live_"));
        let many = json!(vec![json!({"token": "x"}); 1_001]).to_string();
        report(&t, "old", &sign(&old, &many), &many).await.refuses("body");
        server.stop().await;
    });
}
