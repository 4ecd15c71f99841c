//! Tokens of CI services and clusters, exchanged for keys of minutes.

use serde_json::{Value, json};

use super::{
    LoneProject, Person, Stage, TestServer, config, fresh_database,
    liar::{Liar, now},
    post_from, with_provider,
};

const PATH: &str = "/v1/keys/exchange";
const SUBJECT: &str = "repo:acme/app:ref:refs/heads/main";

/// A server that accepts tokens of `/ci`, and of `/cluster` with keys in a file.
async fn served(name: &str) -> (Liar, TestServer, LoneProject) {
    let liar = Liar::start().await;
    let keys = std::env::temp_dir().join(format!("{name}-{}.json", std::process::id()));
    std::fs::write(&keys, liar.keys().to_string()).expect("a file");
    let text = format!(
        "[[token_issuers]]\nissuer = \"{0}/ci\"\n\
         [[token_issuers]]\nissuer = \"{0}/cluster\"\naudience = \"queue\"\nkeys_file = \"{1}\"\n\
         [[token_issuers]]\nissuer = \"{0}/junk\"\n",
        liar.url,
        keys.display()
    );
    let stage = Stage { providers: config(name, &text), ..Stage::default() };
    std::fs::remove_file(keys).expect("it is there");
    let server = TestServer::start_as(fresh_database().await, stage).await;
    let t = server.project("main").await;
    (liar, server, t)
}

/// A token of the CI service.
fn token(liar: &Liar, t: &LoneProject, reported: &[(&str, Value)]) -> String {
    let mut claims = json!({
        "iss": format!("{}/ci", liar.url), "aud": t.url, "sub": SUBJECT,
        "iat": now() - 3_000, "exp": now() + 3_600,
    });
    for (name, value) in reported {
        claims[*name] = value.clone();
    }
    liar.sign(&json!({"alg": "ES256", "kid": "one"}), &claims)
}

/// A key that trusts such tokens.
async fn key_that_trusts(t: &LoneProject, issuer: String, subject: &str) -> Value {
    let trusts = json!({"issuer": issuer, "subject": subject});
    let scopes = ["produce", "read"];
    let body = json!({"name": "deploy", "scopes": scopes, "trusts": trusts});
    let made = t.post("/v1/keys", body).await.is(201);
    assert_eq!((&made["secret"], &made["key"]["trusts"]), (&json!(null), &trusts));
    made["key"].clone()
}

fn body(t: &LoneProject, key: &Value, token: &str) -> Value {
    json!({"project": t.id, "key_id": key["id"], "token": token})
}

fn with(t: &LoneProject, made: &Value) -> LoneProject {
    t.with_key(made["secret"].as_str().expect("a key"))
}

fn end_of(made: &Value) -> u64 {
    let end = made["key"]["expires_at"].as_str().expect("a time");
    let end: chrono::DateTime<chrono::Utc> = end.parse().expect("a time");
    u64::try_from(end.timestamp()).expect("after 1970")
}

#[test]
fn a_job_of_a_ci_service_gets_a_key_of_minutes_for_its_token() {
    with_provider(async {
        let (liar, server, t) = served("exchange-good").await;
        let key = key_that_trusts(&t, format!("{}/ci", liar.url), SUBJECT).await;
        let good = token(&liar, &t, &[]);
        let made = post_from(&t, PATH, body(&t, &key, &good), "192.0.2.1").await.is(201);
        let ci = with(&t, &made);
        ci.enqueue(json!({})).await;
        ci.get("/v1/queues/default/pause").await.is_error(405, "method_not_allowed");
        ci.post("/v1/queues/default/pause", json!({})).await.is_error(403, "forbidden");
        assert_eq!(made["key"]["created_by"], key["id"]);
        assert!((now() + 880..=now() + 900).contains(&end_of(&made)), "15 minutes");
        let audit = t.get("/v1/audit-log").await.is(200)["entries"][0].clone();
        assert_eq!(
            (&audit["action"], &audit["after"]["subject"]),
            (&json!("key.exchanged"), &json!(SUBJECT))
        );

        // A token may be exchanged again while it lives, and no key lives longer than it.
        let soon = now() + 120;
        let short = token(&liar, &t, &[("exp", json!(soon))]);
        for _ in 0..2 {
            let made = post_from(&t, PATH, body(&t, &key, &short), "192.0.2.1").await.is(201);
            assert_eq!(end_of(&made), soon);
        }
        // A cluster whose keys are in a file, with an audience of its own, and a beginning.
        let cluster = format!("{}/cluster", liar.url);
        let key = key_that_trusts(&t, cluster.clone(), "system:serviceaccount:acme:*").await;
        let claims = [
            ("iss", json!(cluster)),
            ("aud", json!(["queue"])),
            ("sub", json!("system:serviceaccount:acme:worker")),
        ];
        let in_cluster = token(&liar, &t, &claims);
        post_from(&t, PATH, body(&t, &key, &in_cluster), "192.0.2.1").await.is(201);
        let count = async |query: &str| {
            let page = t.get(&format!("/v1/keys?limit=10{query}")).await.is(200);
            page["keys"].as_array().expect("keys").len()
        };
        assert_eq!((count("").await, count("&exchanged=true").await), (3, 4));
        let shown = t.get(&format!("/v1/keys/{}", key["id"].as_str().expect("an id"))).await;
        assert!(shown.is(200)["last_used_at"].is_string(), "an exchange is a use");

        // What has expired is forgotten after a day.
        let sql = "update api_keys set expires_at = now() - interval '25 h' where is_exchanged";
        t.database.execute(sql).await;
        let mut conn = t.database.connect().await;
        fencepost_store::sweep::purge::prune_expired(&mut conn).await.expect("pruned");
        assert_eq!(t.database.number("select count(*) from api_keys").await, 3);
        server.stop().await;
    });
}

#[test]
fn a_token_that_the_key_does_not_trust_gets_nothing() {
    with_provider(async {
        let (liar, server, t) = served("exchange-bad").await;
        let ci = format!("{}/ci", liar.url);
        let key = key_that_trusts(&t, ci.clone(), SUBJECT).await;
        let cluster = format!("{}/cluster", liar.url);
        let of_cluster = key_that_trusts(&t, cluster.clone(), SUBJECT).await;
        let good = token(&liar, &t, &[]);
        let plain = t.post("/v1/keys", json!({"name": "x"})).await.is(201)["key"].clone();
        let other = server.project("other").await;
        let ended = key_that_trusts(&t, ci.clone(), "x").await;
        let path = format!("/v1/keys/{}", ended["id"].as_str().expect("an id"));
        t.delete(&path).await.is_empty(204);

        let lie = |reported: &[(&str, Value)]| token(&liar, &t, reported);
        let ended_body = body(&t, &ended, &lie(&[("sub", json!("x"))]));
        let forged = format!("{}x", &good[..good.len() - 1]);
        let refused = [
            ("another subject", body(&t, &key, &lie(&[("sub", json!("repo:acme/app"))]))),
            ("a longer subject", body(&t, &key, &lie(&[("sub", json!(format!("{SUBJECT}2")))]))),
            ("another audience", body(&t, &key, &lie(&[("aud", json!("sts.amazonaws.com"))]))),
            ("expired", body(&t, &key, &lie(&[("exp", json!(now() - 61))]))),
            ("just expired", body(&t, &key, &lie(&[("exp", json!(now() - 5))]))),
            ("an unknown issuer", body(&t, &key, &lie(&[("iss", json!("https://ci.example"))]))),
            ("of another issuer", body(&t, &of_cluster, &good)),
            ("a key with a secret", body(&t, &plain, &good)),
            ("a revoked key", ended_body),
            ("another project", body(&other, &key, &good)),
            ("no project", json!({"project": "x", "key_id": key["id"], "token": good})),
            ("a NUL", json!({"project": "x\0", "key_id": key["id"], "token": good})),
            ("a forged one", body(&t, &key, &forged)),
            ("junk", body(&t, &key, "junk")),
            ("an API key", body(&t, &key, &t.api_key)),
        ];
        for (count, (what, body)) in refused.into_iter().enumerate() {
            let reply = post_from(&t, PATH, body, &format!("192.0.2.{count}")).await;
            assert_eq!((reply.status, what), (reqwest::StatusCode::UNAUTHORIZED, what));
            reply.is_error(401, "token_refused");
        }
        let silent = token(&liar, &t, &[("iss", json!(format!("{}/junk", liar.url)))]);
        let reply = post_from(&t, PATH, body(&t, &key, &silent), "192.0.2.99").await;
        reply.is_error(503, "unavailable");
        let long = body(&t, &key, &"x".repeat(8_193));
        post_from(&t, PATH, long, "192.0.2.99").await.refuses("token");
        let odd = json!({"project": "main", "key_id": "x", "token": good});
        post_from(&t, PATH, odd, "192.0.2.99").await.refuses("key_id");
        let count = "select count(*) from api_keys where is_exchanged";
        assert_eq!(t.database.number(count).await, 0);

        let make =
            async |trusts: Value| t.post("/v1/keys", json!({"name": "x", "trusts": trusts})).await;
        let reported = make(json!({"issuer": "https://ci.example", "subject": "x"})).await;
        assert!(reported.refuses("trusts.issuer").contains(&ci));
        for subject in ["", "*", "a*b", &"x".repeat(256)] {
            make(json!({"issuer": ci, "subject": subject})).await.refuses("trusts.subject");
        }
        let rotate = format!("/v1/keys/{}/rotate", key["id"].as_str().expect("an id"));
        t.act(&rotate).await.refuses("key_id");
        server.stop().await;
    });
}

#[test]
fn keys_of_tokens_end_with_the_key_that_trusts_them() {
    with_provider(async {
        let (liar, server, t) = served("exchange-race").await;
        let key = key_that_trusts(&t, format!("{}/ci", liar.url), SUBJECT).await;
        let good = token(&liar, &t, &[]);
        let first = post_from(&t, PATH, body(&t, &key, &good), "192.0.2.1").await.is(201);
        let path = format!("/v1/keys/{}", key["id"].as_str().expect("an id"));
        let exchange = async |n: usize| {
            post_from(&t, PATH, body(&t, &key, &good), &format!("192.0.2.{n}")).await;
        };
        let many = futures_util::future::join_all((2..10).map(exchange));
        // No question: they would end within minutes.
        let (ended, _) = tokio::join!(t.delete(&path), many);
        ended.is_empty(204);
        let live = "select count(*) from api_keys where is_exchanged and revoked_at is null";
        assert_eq!(t.database.number(live).await, 0);
        with(&t, &first).get("/v1/jobs").await.is_error(401, "unauthorized");

        // Keeping what a key has created does not keep these.
        let key = key_that_trusts(&t, format!("{}/ci", liar.url), SUBJECT).await;
        post_from(&t, PATH, body(&t, &key, &good), "192.0.2.30").await.is(201);
        let path = format!("/v1/keys/{}?revoke_keys=false", key["id"].as_str().expect("an id"));
        t.delete(&path).await.is_empty(204);
        assert_eq!(t.database.number(live).await, 0);

        // A suspended project exchanges none.
        let person = Person::sign_up(&t, "ada@example.com").await;
        person.join(&t, fencepost_domain::access::Role::Owner).await;
        let trusts = json!({"issuer": format!("{}/ci", liar.url), "subject": "repo:acme/*"});
        let made = person.post("/v1/projects/main/keys", json!({"name": "x", "trusts": trusts}));
        let key = made.await.is(201)["key"].clone();
        t.database.execute("update projects set suspended_at = now() where slug = 'main'").await;
        let reply = post_from(&t, PATH, body(&t, &key, &good), "192.0.2.20").await;
        reply.is_error(403, "suspended");
        server.stop().await;
    });
}
