//! Keys: what they may, how long they last, and who hears when they end; and the audit log.

use std::time::{Duration, Instant};

use fencepost_domain::access::Role;
use serde_json::{Value, json};

use super::{Person, post_from};
use crate::harness::{
    LoneProject, Reply, Stage, TestProject, TestServer, fresh_database, limited, redis_url, run,
    run_alone, until,
};

fn with(t: &TestProject, made: &Value) -> TestProject {
    t.with_key(made["secret"].as_str().expect("a key"))
}

fn id_of(made: &Value) -> String {
    made["key"]["id"].as_str().expect("an id").to_owned()
}

#[test]
fn a_key_is_made_listed_renamed_and_revoked_and_is_seen_once() {
    run(async |t| {
        let made = t.post("/v1/keys", json!({"name": "worker", "preset": "worker"})).await.is(201);
        assert_eq!(made["key"]["scopes"], json!(["work"]));
        assert_eq!(made["key"]["state"], "live");
        let (key, path) = (with(t, &made), format!("/v1/keys/{}", id_of(&made)));
        key.poll("w", 1).await;
        let error = key.get("/v1/jobs").await.is_error(403, "forbidden");
        assert_eq!(error["message"], "this operation requires the scope `read`");
        let shown = t.get(&path).await.is(200);
        assert!(!shown.to_string().contains(&key.api_key), "it is seen once");
        assert_eq!(t.patch(&path, json!({"name": "w2"})).await.is(200)["name"], "w2");
        let page = t.get("/v1/keys?limit=1").await.is(200);
        assert_eq!((&page["keys"][0]["name"], &page["has_more"]), (&json!("w2"), &json!(true)));
        let cursor = page["next_cursor"].as_str().expect("a cursor");
        let next = t.get(&format!("/v1/keys?limit=1&cursor={cursor}")).await.is(200);
        assert_eq!((&next["keys"][0]["name"], &next["has_more"]), (&json!("test"), &json!(false)));
        t.delete(&path).await.is_empty(204);
        t.delete(&path).await.is_empty(204);
        assert_eq!(t.get(&path).await.is(200)["state"], "revoked");
        key.post("/v1/workers/poll", json!({"worker_id": "w", "queues": ["q"], "wait_seconds": 0}))
            .await
            .is_error(401, "unauthorized");
        t.act(&format!("{path}/rotate")).await.is_error(404, "key_not_found");
    });
}

#[test]
fn no_key_has_more_rights_or_a_longer_life_than_its_creator() {
    run_alone(async |t| {
        let ahead =
            json!({"name": "m", "scopes": ["keys", "read"], "expires_at": ahead(t, 3_600).await});
        let manager = with(t, &t.post("/v1/keys", ahead.clone()).await.is(201));
        let more = json!({"name": "x", "scopes": ["produce"]});
        manager.post("/v1/keys", more).await.is_error(403, "role_exceeds_caller");
        let less = manager.post("/v1/keys", json!({"name": "x"})).await.is(201);
        assert_eq!(less["key"]["scopes"], json!(["read", "keys"]), "all that it may give");
        assert_eq!(less["key"]["expires_at"], ahead["expires_at"], "not after its maker");
        // The first key may do more: to replace it would be to get that.
        let first = t.get("/v1/keys").await.is(200)["keys"]
            .as_array()
            .expect("keys")
            .last()
            .expect("one")
            .clone();
        let path = format!("/v1/keys/{}/rotate", first["id"].as_str().expect("an id"));
        manager.act(&path).await.is_error(403, "role_exceeds_caller");
        let path = path.trim_end_matches("/rotate");
        manager.delete(path).await.is_error(403, "role_exceeds_caller");
        manager.patch(path, json!({"name": "x"})).await.is_error(403, "role_exceeds_caller");
        let operator = json!({"name": "o", "preset": "operator"});
        let operator = with(t, &t.post("/v1/keys", operator).await.is(201));
        operator.get("/v1/keys").await.is_error(403, "forbidden");
        let refuse = async |field: &str, body: Value| t.post("/v1/keys", body).await.refuses(field);
        refuse("name", json!({"name": ""})).await;
        refuse("preset", json!({"name": "x", "scopes": ["read"], "preset": "worker"})).await;
        refuse("scopes[0]", json!({"name": "x", "scopes": ["root"]})).await;
        refuse("scopes", json!({"name": "x", "scopes": []})).await;
        refuse("expires_at", json!({"name": "x", "expires_at": "2001-01-01T00:00:00Z"})).await;
        refuse("expires_at", json!({"name": "x", "expires_at": "2126-01-01T00:00:00Z"})).await;
        refuse(
            "rate_limits.work_per_minute",
            json!({"name": "x", "rate_limits": {"work_per_minute": 0}}),
        )
        .await;
    });
}

/// A time ahead of the database's clock.
async fn ahead(t: &LoneProject, seconds: i64) -> String {
    let sql = format!("select (extract(epoch from now())::bigint + {seconds})");
    let at = t.database.number(&sql).await;
    chrono::DateTime::from_timestamp(at, 0)
        .expect("a time")
        .to_rfc3339_opts(chrono::SecondsFormat::Secs, true)
}

#[test]
fn a_rotated_key_stays_valid_for_its_overlap() {
    run(async |t| {
        let old = t.post("/v1/keys", json!({"name": "app", "preset": "producer"})).await.is(201);
        let path = format!("/v1/keys/{}/rotate", id_of(&old));
        t.post(&path, json!({"overlap_seconds": 2_592_001})).await.refuses("overlap_seconds");
        let new = t.post(&path, json!({"overlap_seconds": 3_600})).await.is(201);
        assert_eq!(new["key"]["scopes"], old["key"]["scopes"]);
        let (old_key, new_key) = (with(t, &old), with(t, &new));
        for key in [&old_key, &new_key] {
            key.post("/v1/jobs", json!({"job_type": "t"})).await.is(201);
        }
        let now = t.post(&path, json!({"overlap_seconds": 0})).await.is(201);
        old_key.post("/v1/jobs", json!({"job_type": "t"})).await.is_error(401, "unauthorized");
        with(t, &now).post("/v1/jobs", json!({"job_type": "t"})).await.is(201);
    });
}

#[test]
fn a_leaked_key_can_be_revoked_by_its_finder() {
    run(async |t| {
        let made = t.post("/v1/keys", json!({"name": "leaked"})).await.is(201);
        let report = async |key: &str| {
            post_from(t, "/v1/keys/report", json!({"key": key}), "192.0.2.1").await.is_empty(204);
        };
        report("junk").await;
        report(&fencepost_identity::accounts::key::generate("live")).await;
        with(t, &made).get("/v1/jobs").await.is(200);
        report(made["secret"].as_str().expect("a key")).await;
        with(t, &made).get("/v1/jobs").await.is_error(401, "unauthorized");
        let log = t.get("/v1/audit-log?action=key.reported").await.is(200);
        assert_eq!(log["entries"][0]["target"], made["key"]["id"]);
    });
}

/// What is promised: a revoked key is obeyed everywhere within this.
const REVOKED_WITHIN: Duration = Duration::from_secs(5);

/// Waits until this many nodes are subscribed: a node serves before it subscribes, and what it
/// missed it finds out when its cache is old.
async fn until_subscribed(t: &LoneProject, nodes: i64) {
    let instance = t.database.text("select replace(public_id::text, '-', '') from instance").await;
    let client = ::redis::Client::open(redis_url()).expect("a URL");
    let mut conn = client.get_multiplexed_async_connection().await.expect("a connection");
    until(format!("{nodes} nodes that listen"), async || {
        let ask = ["CHANNELS".to_owned(), format!("*{instance}*forget*")];
        let channels: Vec<String> =
            ::redis::cmd("PUBSUB").arg(&ask).query_async(&mut conn).await.expect("channels");
        let [channel] = channels.as_slice() else { return false };
        let asked = ::redis::cmd("PUBSUB").arg("NUMSUB").arg(channel).to_owned();
        let heard_by: (String, i64) = asked.query_async(&mut conn).await.expect("a number");
        heard_by.1 >= nodes
    })
    .await;
}

async fn revocation_on_another_node(redis: bool) -> Duration {
    let database = fresh_database().await;
    let stage = || match redis {
        true => Stage::default(),
        false => Stage { redis: None, ..Stage::default() },
    };
    let one = TestServer::start_as(database.clone(), stage()).await;
    let other = TestServer::start_as(database, stage()).await;
    let t = one.project("main").await;
    let made = t.post("/v1/keys", json!({"name": "k"})).await.is(201);
    let there = with(&t, &made).through(&other.url);
    there.get("/v1/jobs").await.is(200);
    let poll = json!({"worker_id": "w", "queues": ["q"], "wait_seconds": 30});
    let parked = tokio::spawn({
        let there = there.clone();
        async move { there.post("/v1/workers/poll", poll).await }
    });
    until("the worker to be listed", async || {
        !there.get("/v1/workers").await.is(200)["workers"].as_array().is_some_and(Vec::is_empty)
    })
    .await;
    if redis {
        until_subscribed(&t, 2).await;
    }
    let started = Instant::now();
    t.delete(&format!("/v1/keys/{}", id_of(&made))).await.is_empty(204);
    let ended: Reply = parked.await.expect("an answer");
    ended.is_error(401, "unauthorized");
    there.get("/v1/jobs").await.is_error(401, "unauthorized");
    let took = started.elapsed();
    one.stop().await;
    other.stop().await;
    took
}

#[test]
fn a_revoked_key_is_refused_on_every_node_and_its_polls_end() {
    limited(async {
        let alone = revocation_on_another_node(false).await;
        assert!(alone < REVOKED_WITHIN, "without Redis: {alone:?}");
        let pushed = revocation_on_another_node(true).await;
        assert!(pushed < Duration::from_secs(1), "with Redis: {pushed:?}");
    });
}

#[test]
fn a_busy_stream_ends_when_its_key_is_revoked() {
    run(async |t| {
        let made = t.post("/v1/keys", json!({"name": "k", "preset": "read_only"})).await.is(201);
        let request = t.client.get(format!("{}/v1/events/stream", t.url));
        let secret = made["secret"].as_str().expect("a key");
        let mut stream = request.bearer_auth(secret).send().await.expect("a stream");
        assert_eq!(stream.status(), 200);
        let busy = tokio::spawn({
            let t = t.clone();
            async move {
                loop {
                    t.enqueue(json!({})).await;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        });
        stream.chunk().await.expect("it continues").expect("an event");
        t.delete(&format!("/v1/keys/{}", id_of(&made))).await.is_empty(204);
        while stream.chunk().await.is_ok_and(|it| it.is_some()) {}
        busy.abort();
    });
}

#[test]
fn a_test_projects_keys_are_test_keys_and_use_is_noted() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        let project =
            ada.post("/v1/projects", json!({"name": "Trying", "mode": "test"})).await.is(201);
        assert_eq!((&project["mode"], &project["role"]), (&json!("test"), &json!("owner")));
        let keys = format!("/v1/projects/{}/keys", project["slug"].as_str().expect("a slug"));
        let keys = keys.as_str();
        let made = ada.post(keys, json!({"name": "k"})).await.is(201);
        assert!(made["secret"].as_str().expect("a key").starts_with("fp_test_"));
        assert_eq!(made["key"]["created_by"], json!(ada.account_id));
        with(t, &made).get("/v1/jobs").await.is(200);
        let path = format!("{keys}/{}", id_of(&made));
        until("the key to be marked as used", async || {
            !ada.get(&path).await.is(200)["last_used_at"].is_null()
        })
        .await;
        let bad = ada.post("/v1/projects", json!({"name": "x", "mode": "prod"})).await;
        bad.refuses("mode");
    });
}

#[test]
fn the_use_of_a_key_is_recorded_though_its_row_was_locked_at_first() {
    run_alone(async |t| {
        let held = t.post("/v1/keys", json!({"name": "held"})).await.is(201);
        let free = t.post("/v1/keys", json!({"name": "free"})).await.is(201);
        let mut holder = t.database.connect().await;
        let lock = "select from api_keys where name = 'held' for no key update";
        for sql in ["begin", lock] {
            sqlx::raw_sql(sql).execute(&mut holder).await.expect("it runs");
        }
        for key in [&held, &free] {
            with(t, key).get("/v1/jobs").await.is(200);
        }
        let is_used = async |key: &Value| {
            let page = t.get("/v1/keys").await.is(200);
            let keys = page["keys"].as_array().expect("keys");
            let found = keys.iter().find(|it| it["id"] == key["key"]["id"]);
            !found.expect("the key")["last_used_at"].is_null()
        };
        until("the free key to be marked as used", async || is_used(&free).await).await;
        assert!(!is_used(&held).await);
        sqlx::raw_sql("commit").execute(&mut holder).await.expect("it commits");
        until("the held key to be marked as used", async || is_used(&held).await).await;
    });
}

#[test]
fn the_audit_log_says_who_did_what_and_how_it_was_before() {
    run_alone(async |t| {
        let made = t.post("/v1/keys", json!({"name": "canary-name"})).await.is(201);
        t.patch("/v1/queues/mail", json!({"max_concurrency": 5})).await.is(200);
        t.patch("/v1/queues/mail", json!({"max_concurrency": 7})).await.is(200);
        t.act("/v1/queues/mail/pause").await.is(200);
        let schedule =
            json!({"job_type": "t", "cron_expression": "@daily", "payload": "canary-payload"});
        t.put("/v1/recurring/r", schedule).await.is(200);
        t.delete("/v1/recurring/r").await.is_empty(204);
        let page = t.get("/v1/audit-log").await.is(200);
        let actions: Vec<_> = page["entries"]
            .as_array()
            .expect("entries")
            .iter()
            .map(|it| it["action"].clone())
            .collect();
        let expected = [
            "recurring.deleted",
            "recurring.put",
            "queue.paused",
            "queue.changed",
            "queue.changed",
            "key.created",
        ];
        assert_eq!(actions, expected);
        let change = &page["entries"][3];
        assert_eq!(change["before"]["max_concurrency"], 5);
        assert_eq!(change["after"]["max_concurrency"], 7);
        assert_eq!(change["actor"]["kind"], "key");
        assert!(change["request_id"].as_str().is_some_and(|it| it.starts_with("req_")));
        let text = page.to_string();
        let secret = made["secret"].as_str().expect("a key");
        assert!(!text.contains(secret) && !text.contains("canary-payload"), "no secrets");
        let some = t.get("/v1/audit-log?action=queue.*&limit=2").await.is(200);
        assert_eq!(
            (some["entries"].as_array().map(Vec::len), &some["has_more"]),
            (Some(2), &json!(true))
        );
        t.get("/v1/audit-log?limit=201").await.refuses("limit");
        t.get("/v1/audit-log?created_after=yesterday").await.refuses("created_after");
        let export = t.get("/v1/audit-log/export").await;
        assert_eq!(export.headers["content-type"], "application/x-ndjson");
        let lines: Vec<Value> =
            export.text.lines().map(|it| serde_json::from_str(it).expect("JSON")).collect();
        assert_eq!((lines.len(), &lines[0]["action"]), (6, &json!("recurring.deleted")));
        follow_the_log(t, &lines).await;
        let mut conn = t.database.connect().await;
        let update = sqlx::query("update audit_log set action = 'x'").execute(&mut conn).await;
        assert!(update.is_err(), "rows are never changed");
    });
}

/// Exports what comes after an entry, as a SIEM does. `known` are all entries, newest first.
async fn follow_the_log(t: &LoneProject, known: &[Value]) {
    let after = async |id: &str, more: &str| {
        let export = t.get(&format!("/v1/audit-log/export?after={id}{more}")).await;
        assert_eq!(export.status, 200, "{}", export.text);
        let lines = export.text.lines();
        lines.map(|it| serde_json::from_str(it).expect("JSON")).collect::<Vec<Value>>()
    };
    let first = "aud_00000000000000000000000000";
    assert!(after(first, "").await.is_empty(), "others may come before those of this minute");
    // Time passes. Rows are never changed, so that takes the trigger away.
    for sql in [
        "alter table audit_log disable trigger all",
        "update audit_log set at = at - interval '61 s'",
        "alter table audit_log enable trigger all",
    ] {
        t.database.execute(sql).await;
    }
    let ids = |of: &[Value]| of.iter().map(|it| it["id"].clone()).collect::<Vec<_>>();
    let mut oldest_first = ids(known);
    oldest_first.reverse();
    assert_eq!(ids(&after(first, "").await), oldest_first);
    let third = oldest_first[2].as_str().expect("an id");
    assert_eq!(ids(&after(third, "").await), oldest_first[3..]);
    assert_eq!(after(third, "&action=recurring.*").await.len(), 2);
    t.get("/v1/audit-log/export?after=x").await.refuses("after");
}

#[test]
fn the_keys_that_a_key_has_made_are_named_before_it_goes() {
    run(async |t| {
        let make = async |by: &TestProject| {
            let body = json!({"name": "k", "scopes": ["read", "keys"]});
            let made = by.post("/v1/keys", body).await.is(201);
            (with(by, &made), id_of(&made))
        };
        let (first, first_id) = make(t).await;
        let (second, second_id) = make(&first).await;
        let (third, third_id) = make(&second).await;
        let path = format!("/v1/keys/{first_id}");
        let refused = t.delete(&path).await.is_error(409, "keys_remain");
        let mut named: Vec<_> = refused["keys"].as_array().expect("keys").clone();
        named.sort_by_key(|it| it["id"].to_string());
        let ids: Vec<_> = named.iter().map(|it| it["id"].as_str().expect("an id")).collect();
        let mut made = [second_id.as_str(), third_id.as_str()];
        made.sort_unstable();
        assert_eq!(ids, made);
        assert_eq!(named[0]["scopes"], json!(["read", "keys"]));
        first.get("/v1/keys").await.is(200);
        t.delete(&format!("{path}?revoke_keys=perhaps")).await.refuses("revoke_keys");
        t.delete(&format!("{path}?revoke_keys=false")).await.is_empty(204);
        first.get("/v1/keys").await.is_error(401, "unauthorized");
        third.get("/v1/keys").await.is(200);
        t.delete(&format!("/v1/keys/{second_id}?revoke_keys=true")).await.is_empty(204);
        third.get("/v1/keys").await.is_error(401, "unauthorized");
        let log = t.get("/v1/audit-log?action=key.revoked").await.is(200);
        assert_eq!(log["entries"].as_array().map(Vec::len), Some(3), "{log}");
        // Who has found a key may have made others with it.
        let (leaked, _) = make(t).await;
        let (child, _) = make(&leaked).await;
        let report = json!({"key": leaked.api_key});
        post_from(t, "/v1/keys/report", report, "192.0.2.1").await.is_empty(204);
        child.get("/v1/keys").await.is_error(401, "unauthorized");
    });
}

#[test]
fn the_keys_of_a_member_who_goes_end_unless_they_are_kept() {
    run_alone(async |t| {
        let owner = Person::sign_up(t, "owner@example.com").await;
        owner.join(t, Role::Owner).await;
        let mut keys = Vec::new();
        for (email, answer) in [("a@example.com", true), ("b@example.com", false)] {
            let admin = Person::sign_up(t, email).await;
            admin.join(t, Role::Admin).await;
            let made = admin.post("/v1/projects/main/keys", json!({"name": "k"})).await.is(201);
            let path = format!("/v1/projects/main/members/{}", admin.account_id);
            let refused = owner.delete(&path).await.is_error(409, "keys_remain");
            assert_eq!(refused["keys"][0]["id"], made["key"]["id"]);
            owner.delete(&format!("{path}?revoke_keys={answer}")).await.is_empty(204);
            admin.get("/v1/projects/main").await.is_error(404, "project_not_found");
            keys.push(with(t, &made));
        }
        keys[0].get("/v1/jobs").await.is_error(401, "unauthorized");
        keys[1].get("/v1/jobs").await.is(200);
        // An account that is deleted leaves by the same rule, with its invitations.
        let admin = Person::sign_up(t, "c@example.com").await;
        admin.join(t, Role::Admin).await;
        let made = admin.post("/v1/projects/main/keys", json!({"name": "k"})).await.is(201);
        let invite = json!({"email": "zed@example.com", "role": "admin"});
        admin.post("/v1/projects/main/invitations", invite).await.is(201);
        let delete = |more: Value| {
            let mut body = json!({"password": super::PASSWORD});
            body.as_object_mut()
                .expect("an object")
                .extend(more.as_object().expect("an object").clone());
            body
        };
        admin.post("/v1/me/delete", delete(json!({}))).await.is_error(409, "keys_remain");
        admin.post("/v1/me/delete", delete(json!({"revoke_keys": true}))).await.is_empty(204);
        with(t, &made).get("/v1/jobs").await.is_error(401, "unauthorized");
        let open = owner.get("/v1/projects/main/invitations").await.is(200);
        assert_eq!(open["invitations"], json!([]));
        let log = owner.get("/v1/projects/main/audit-log?action=member.removed").await.is(200);
        assert_eq!(log["entries"].as_array().map(Vec::len), Some(3), "{log}");
    });
}

/// A call with a key from this address.
async fn from(key: &TestProject, address: &str, body: Option<Value>) -> Reply {
    let path = format!("{}/v1/keys", key.url);
    let request = match &body {
        Some(body) => key.client.post(path).json(body),
        None => key.client.get(path),
    };
    let request = request.bearer_auth(&key.api_key).header("x-forwarded-for", address);
    Reply::of(request.send().await.expect("an answer")).await
}

#[test]
fn a_key_works_from_its_networks_alone_and_so_do_those_that_it_creates() {
    run(async |t| {
        let wanted = json!({
            "name": "office", "scopes": ["keys", "read"],
            "allowed_ips": ["192.0.2.0/24", "2001:db8::/32", "192.0.2.0/24"],
        });
        let made = t.post("/v1/keys", wanted).await.is(201);
        assert_eq!(made["key"]["allowed_ips"], json!(["192.0.2.0/24", "2001:db8::/32"]));
        let office = with(t, &made);
        for inside in ["192.0.2.200", "2001:db8::7"] {
            from(&office, inside, None).await.is(200);
        }
        for outside in ["198.51.100.1", "2001:db9::7"] {
            let error = from(&office, outside, None).await.is_error(403, "forbidden");
            let message = "this operation requires an IP address that the key allows";
            assert_eq!(error["message"], message);
        }
        let inside = "192.0.2.7";
        let same = from(&office, inside, Some(json!({"name": "a"}))).await.is(201);
        assert_eq!(same["key"]["allowed_ips"], json!(["192.0.2.0/24", "2001:db8::/32"]));
        let less = json!({"name": "b", "allowed_ips": ["192.0.2.7"]});
        let less = from(&office, inside, Some(less)).await.is(201);
        assert_eq!(less["key"]["allowed_ips"], json!(["192.0.2.7/32"]));
        let more = json!({"name": "c", "allowed_ips": ["192.0.2.0/23"]});
        from(&office, inside, Some(more)).await.refuses("allowed_ips");
        let rotated = t.act(&format!("/v1/keys/{}/rotate", id_of(&less))).await.is(201);
        assert_eq!(rotated["key"]["allowed_ips"], json!(["192.0.2.7/32"]));
        // Rotating another key gives no more than creating one.
        let free = t.post("/v1/keys", json!({"name": "free", "preset": "read_only"})).await.is(201);
        let path = format!("{}/v1/keys/{}/rotate", t.url, id_of(&free));
        let by_office = t.client.post(path).bearer_auth(&office.api_key);
        let by_office = by_office.header("x-forwarded-for", inside).send().await;
        let by_office = Reply::of(by_office.expect("an answer")).await.is(201);
        assert_eq!(by_office["key"]["allowed_ips"], json!(["192.0.2.0/24", "2001:db8::/32"]));
        from(&with(t, &rotated), "192.0.2.8", None).await.is_error(403, "forbidden");
        let unused = t.get(&format!("/v1/keys/{}", id_of(&rotated))).await.is(200);
        assert_eq!(unused["last_used_at"], Value::Null);
        // An adapter has the same door.
        for (address, status) in [(inside, 200), ("198.51.100.1", 403)] {
            let there = t.client.get(format!("{}/ojs/v1/queues", t.url));
            let there = there.bearer_auth(&office.api_key).header("x-forwarded-for", address);
            assert_eq!(there.send().await.expect("an answer").status(), status);
        }
        for junk in ["x", "192.0.2.7/24", ""] {
            let body = json!({"name": "k", "allowed_ips": ["192.0.2.7", junk]});
            t.post("/v1/keys", body).await.refuses("allowed_ips[1]");
        }
        let many: Vec<_> = (0..33).map(|it| format!("192.0.2.{it}")).collect();
        t.post("/v1/keys", json!({"name": "k", "allowed_ips": many})).await.refuses("allowed_ips");
    });
}
