//! Alarms: what is found, who is notified, and how often.

use fencepost_domain::access::Role;
use fencepost_net::mail::Mail;
use serde_json::{Value, json};

use crate::{
    console::Browser,
    harness::{
        Sink, Stage, TestProject, TestServer, eventually, fresh_database, limited, run_alone, until,
    },
    people::Person,
};

/// What each rule looks for.
const TROUBLES: &str = "update jobs set created_at = now() - interval '20 minutes',
    run_at = now() - interval '20 minutes';
    update queue_pushes set failing_since = now() - interval '6 minutes', last_failure_at = now(),
    last_error = 'timeout';
    insert into schedule_fires (project_id, schedule_id, tick, outcome)
    select project_id, id, now() - interval '1 minute', 'missed' from recurring_schedules;
    insert into queue_types (project_id, queue, job_type, streak, paused_at, paused_by)
    select id, 'mail', 'send', 5, now(), 'brake' from projects where slug = 'main';
    update api_keys set created_at = now() - interval '80 days',
    expires_at = now() + interval '10 days' where name = 'ci';
    update webhook_endpoints set dropped_events = 7, dropped_at = now();
    insert into webhook_endpoints (project_id, id, url, events, event_types, queues, job_types,
    max_in_flight, timeout_seconds, secret, disabled_at, disabled_reason, is_emptied)
    select project_id, gen_random_uuid(), 'https://example.com/secret', events, event_types,
    queues, job_types, 1, 1, secret, now(), 'failing', true from webhook_endpoints";
/// What ends it.
const ENDS: &str = "update jobs set run_at = now(), created_at = now();
    update queue_pushes set failing_since = null;
    update schedule_fires set at = now() - interval '11 minutes';
    insert into schedule_fires (project_id, schedule_id, tick, outcome, job_id)
    select project_id, id, now(), 'fired', gen_random_uuid() from recurring_schedules;
    delete from queue_types;
    update api_keys set revoked_at = now() where name = 'ci';
    update webhook_endpoints set dropped_at = now() - interval '31 minutes';
    update incidents set last_found_at = now() - interval '31 minutes';
    update webhook_endpoints set deleted_at = now() where disabled_at is not null";

/// Dead letters and incidents that are an hour old.
const SILENCE: &str = "update dead_letter_groups set last_seen_at = now() - interval '1 hour';
    update incidents set last_found_at = now() - interval '1 hour'";

/// The incidents of a project once there are as many in this state, newest first.
async fn incidents(t: &TestProject, state: &str, count: usize) -> Vec<Value> {
    eventually(format!("{count} incidents that are {state}"), async || {
        let page = t.get(&format!("/v1/incidents?state={state}")).await.is(200);
        let found = page["incidents"].as_array().expect("a list").clone();
        (found.len() == count).then_some(found)
    })
    .await
}

/// The next mail of either node.
async fn next_mail(one: &TestServer, other: &TestServer) -> Mail {
    tokio::select! {
        mail = one.next_mail() => mail,
        mail = other.next_mail() => mail,
    }
}

/// Makes a dead letter of this type.
async fn fail(t: &TestProject, job_type: &str) -> String {
    let id = t.enqueue(json!({"job_type": job_type, "max_attempts": 1})).await;
    let job = t.lease("w").await;
    let error = json!({"error": {"type": "SmtpTimeout", "message": "secret@example.com"}});
    t.ack_with(&job, "w", "failed", error).await.is(200);
    id
}

/// Endpoint of a project that is notified of alarms.
async fn sink_of_alarms(t: &TestProject) -> Sink {
    let sink = Sink::start().await;
    // Queues and job types concern events about jobs.
    let body = json!({"url": sink.url, "events": ["alarm.*"], "queues": ["no-such"]});
    t.post("/v1/webhooks", body).await.is(201);
    sink
}

#[test]
fn alarms_report_a_new_kind_of_dead_letter_once_on_any_number_of_nodes() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let second = TestServer::start(server.database.clone()).await;
        let other = server.project("other").await;
        let ada = Person::sign_up(&other, "ada@example.com").await;
        let t = other.with_key(ada.made["api_key"]["secret"].as_str().expect("a key"));
        let slug = ada.made["project"]["slug"].as_str().expect("a slug");
        let sink = Sink::start().await;
        let body = json!({"url": sink.url, "events": ["alarm.*"]});
        ada.post(&format!("/v1/projects/{slug}/webhooks"), body).await.is(201);
        let verify = next_mail(&server, &second).await;
        assert_eq!(verify.subject, "Verify your e-mail address");
        let id = fail(&t, "mail.send").await;
        let reported = sink.next().await.body();
        assert_eq!(reported["type"], "alarm.triggered");
        let incident = &reported["data"]["incident"];
        assert_eq!(
            (&reported["data"]["job"], &reported["data"]["error"]),
            (&Value::Null, &Value::Null)
        );
        assert_eq!(
            (&incident["alarm"], &incident["rule"]),
            (&json!("dead_letters"), &json!("dead_letters"))
        );
        assert_eq!(incident["details"]["job_id"], id.as_str());
        let summary = "1 job of the type mail.send became a dead letter with SmtpTimeout.";
        assert_eq!(incident["summary"], summary);
        let mail = next_mail(&server, &second).await;
        assert_eq!(mail.to, "ada@example.com");
        assert_eq!(mail.subject, format!("[{slug}] Jobs became dead letters"));
        assert!(mail.text.contains(summary) && !mail.text.contains("secret@"), "{}", mail.text);
        let open = incidents(&t, "open", 1).await.remove(0);
        assert_eq!((&open["id"], &open["state"]), (&incident["id"], &json!("open")));
        let groups = t.get("/v1/dead-letters/groups").await.is(200);
        assert_eq!(groups["groups"][0]["fingerprint"], open["subject"]);
        // A second one of the same group adds nothing, until it was quiet for half an hour.
        fail(&t, "mail.send").await;
        let quiet = "update dead_letter_groups
                     set last_seen_at = now() - interval '31 minutes', first_seen_at = now() - interval '1 hour';
                     update dead_letters set died_at = now() - interval '31 minutes';
                     update incidents set last_found_at = now() - interval '31 minutes'";
        server.database.execute(quiet).await;
        let reported = sink.next().await.body();
        assert_eq!(reported["type"], "alarm.resolved");
        assert_eq!(reported["data"]["incident"]["id"], open["id"]);
        assert!(reported["data"]["incident"]["resolved_at"].is_string());
        let resolved = next_mail(&server, &second).await;
        assert!(resolved.subject.contains("Resolved: "), "{}", resolved.subject);
        assert_eq!(incidents(&t, "resolved", 1).await[0]["id"], open["id"]);
        // One that is known is reported from ten on.
        for _ in 0..9 {
            fail(&t, "mail.send").await;
        }
        fail(&t, "mail.send").await;
        let reported = sink.next().await.body();
        assert_eq!(reported["data"]["incident"]["details"]["value"], 10);
        assert_eq!(server.database.number("select count(*) from incidents").await, 2);
        assert_eq!(other.get("/v1/incidents").await.is(200)["incidents"], json!([]));
        let foreign = format!("/v1/incidents/{}", open["id"].as_str().expect("an id"));
        other.get(&foreign).await.is_error(404, "alarm_not_found");
        server.stop().await;
        second.stop().await;
    });
}

#[test]
fn every_rule_finds_what_it_is_for_and_sees_its_end() {
    run_alone(async |t| {
        let sink = sink_of_alarms(t).await;
        t.put("/v1/queues/pushed/push", json!({"url": sink.url})).await.is(201);
        let schedule = json!({"job_type": "t", "cron_expression": "0 0 1 1 *"});
        t.put("/v1/recurring/nightly", schedule).await.is(200);
        let expires = t.database.text("select (now() + interval '20 days')::text").await;
        let key = json!({"name": "ci", "scopes": ["produce"],
                         "expires_at": expires.replace(' ', "T").replace("+00", "Z")});
        let key = t.post("/v1/keys", key).await.is(201);
        let ready = t.enqueue(json!({"queue": "slow"})).await;
        t.enqueue(json!({"queue": "stopped"})).await;
        t.act("/v1/queues/stopped/pause").await.is(200);
        t.database.execute(TROUBLES).await;
        let open = incidents(t, "open", 6).await;
        let about = |rule: &str| {
            let one = open.iter().find(|it| it["rule"] == rule);
            one.unwrap_or_else(|| panic!("no incident of {rule}: {open:?}")).clone()
        };
        assert_eq!(about("circuit_open")["subject"], "mail/send");
        assert_eq!(about("schedule_missed")["subject"], "nightly");
        assert_eq!(about("key_expiring")["subject"], key["key"]["id"]);
        assert_eq!(about("push_failing")["details"]["error_type"], "timeout");
        assert_eq!(about("deliveries_dropped")["details"]["value"], 7);
        let disabled = about("endpoint_disabled");
        assert_eq!(disabled["details"]["name"], "https://example.com/", "no more of the URL");
        let reader = t.post("/v1/keys", json!({"name": "r", "scopes": ["read"]})).await.is(201);
        let secret = reader["secret"].as_str().expect("a key").to_owned();
        let reader = t.with_key(secret);
        let seen = incidents(&reader, "open", 6).await;
        let names: Vec<_> = seen.iter().filter(|it| it["details"]["name"] != Value::Null).collect();
        assert_eq!(names.len(), 1, "that of the schedule: {names:?}");
        // That a job waits is reported once it has lasted for two minutes.
        let begun = "select count(*) from incidents where rule = 'oldest_ready'";
        t.database.until(begun, 1).await;
        let lasted = "update incidents set began_at = now() - interval '2 minutes'
                      where rule = 'oldest_ready'";
        t.database.execute(lasted).await;
        let open = incidents(t, "open", 7).await;
        let waits = open.iter().find(|it| it["rule"] == "oldest_ready").expect("an incident");
        assert_eq!(
            (&waits["subject"], &waits["details"]["job_id"]),
            (&json!("slow"), &json!(ready))
        );
        assert_eq!(waits["details"]["queues"], json!(["slow"]));
        t.database.execute(ENDS).await;
        incidents(t, "open", 0).await;
        assert_eq!(incidents(t, "resolved", 7).await.len(), 7);
        let mut reported = Vec::new();
        for _ in 0..14 {
            reported.push(sink.next().await.body()["type"].as_str().expect("a type").to_owned());
        }
        reported.sort();
        assert_eq!((&*reported[6], &*reported[7]), ("alarm.resolved", "alarm.triggered"));
    });
}

#[test]
fn queues_whose_workers_are_gone_are_one_incident() {
    run_alone(async |t| {
        let sink = sink_of_alarms(t).await;
        let old = "update jobs set run_at = now() - interval '901 s',
                       created_at = now() - interval '901 s'";
        for queue in ["a", "b", "served"] {
            t.enqueue(json!({"queue": queue})).await;
        }
        let poll = json!({
            "worker_id": "w", "queues": ["served"], "job_types": ["other"], "wait_seconds": 0,
        });
        t.polled(poll).await;
        until("the worker to be listed", async || {
            t.get("/v1/workers").await.is(200)["workers"][0]["worker_id"] == "w"
        })
        .await;
        t.database.execute(old).await;
        let begun = "select count(*) from incidents where rule = 'oldest_ready'";
        t.database.until(begun, 2).await;
        // It joins an incident that has begun.
        t.enqueue(json!({"queue": "c"})).await;
        t.database.execute(&format!("{old} where queue = 'c'")).await;
        let counted = "select count(*) from queue_counts where queue = 'c' and active = 1";
        t.database.until(counted, 1).await;
        let lasted = "update incidents set began_at = now() - interval '2 minutes'";
        t.database.execute(lasted).await;
        let open = incidents(t, "open", 2).await;
        let of = |subject: &str| open.iter().find(|it| it["subject"] == subject).expect("it");
        let gone = of("queues without workers");
        assert_eq!(gone["details"]["queues"], json!(["a", "b", "c"]));
        let summary = gone["summary"].as_str().expect("a sentence");
        assert!(summary.starts_with("No live worker polls 3 queues: a, b, c."), "{summary}");
        assert_eq!(of("served")["details"]["queues"], json!([]));
        for _ in 0..2 {
            assert_eq!(sink.next().await.body()["type"], "alarm.triggered");
        }
    });
}

#[test]
fn a_project_changes_its_alarms_and_no_other() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (t, other) = (server.project("main").await, server.project("other").await);
        let defaults = t.get("/v1/alarms").await.is(200);
        assert_eq!(defaults["alarms"].as_array().map(Vec::len), Some(13));
        let letters = t.get("/v1/alarms/dead_letters").await.is(200);
        assert_eq!(
            letters,
            json!({"name": "dead_letters", "rule": "dead_letters", "queues": [], "threshold": 10,
                   "for_seconds": 300, "mail_to": "owners", "enabled": true, "updated_at": null,
                   "etag": letters["etag"]})
        );
        let refused = [
            ("dead_letters", json!({"rule": "oldest_ready"}), "rule"),
            ("dead_letters", json!({"threshold": 0}), "threshold"),
            ("dead_letters", json!({"threshold": 1001}), "threshold"),
            ("dead_letters", json!({"for_seconds": 59}), "for_seconds"),
            ("circuit_open", json!({"threshold": 1}), "threshold"),
            ("key_expiring", json!({"for_seconds": 60}), "for_seconds"),
            ("key_expiring", json!({"queues": ["q"]}), "queues"),
            ("dead_letters", json!({"queues": [""]}), "queues[0]"),
            ("mine", json!({}), "rule"),
            ("Mine", json!({"rule": "oldest_ready"}), "alarm"),
            ("dead_letters", json!({"mail_to": "everybody"}), "mail_to"),
        ];
        for (name, body, field) in refused {
            t.put(&format!("/v1/alarms/{name}"), body).await.refuses(field);
        }
        let fast =
            json!({"rule": "oldest_ready", "queues": ["slow"], "threshold": 60, "for_seconds": 0});
        let made = t.put("/v1/alarms/slow_waits", fast).await.is(200);
        assert_eq!((&made["threshold"], &made["mail_to"]), (&json!(60), &json!("owners")));
        t.put("/v1/alarms/dead_letters", json!({"enabled": false})).await.is(200);
        other.get("/v1/alarms/slow_waits").await.is_error(404, "alarm_not_found");
        other.delete("/v1/alarms/slow_waits").await.is_error(404, "alarm_not_found");
        assert_eq!(other.get("/v1/alarms/dead_letters").await.is(200)["enabled"], true);
        fail(&t, "t").await;
        for queue in ["slow", "other"] {
            t.enqueue(json!({"queue": queue})).await;
        }
        let age = "update jobs set created_at = now() - interval '61 seconds',
                                   run_at = now() - interval '61 seconds' where state = 'pending'";
        t.database.execute(age).await;
        let found = incidents(&t, "open", 1).await.remove(0);
        assert_eq!((&found["alarm"], &found["subject"]), (&json!("slow_waits"), &json!("slow")));
        t.delete("/v1/alarms/slow_waits").await.is_empty(204);
        t.delete("/v1/alarms/slow_waits").await.is_error(404, "alarm_not_found");
        incidents(&t, "resolved", 1).await;
        t.delete("/v1/alarms/dead_letters").await.is_empty(204);
        assert_eq!(t.get("/v1/alarms/dead_letters").await.is(200), letters);
        incidents(&t, "open", 1).await;
        server.stop().await;
    });
}

#[test]
fn a_muted_incident_is_listed_and_not_reported() {
    run_alone(async |t| {
        let sink = sink_of_alarms(t).await;
        fail(t, "t").await;
        let first = sink.next().await.body()["data"]["incident"].clone();
        let path = format!("/v1/incidents/{}/mute", first["id"].as_str().expect("an id"));
        for (bad, field) in [(-1, "seconds"), (2_592_001, "seconds")] {
            t.post(&path, json!({"seconds": bad})).await.refuses(field);
        }
        let muted = t.post(&path, json!({"seconds": 3600})).await.is(200);
        assert!(muted["muted_until"].is_string());
        t.database.execute(SILENCE).await;
        incidents(t, "resolved", 1).await;
        t.database.execute("delete from dead_letter_groups").await;
        fail(t, "t").await;
        let second = incidents(t, "open", 1).await.remove(0);
        assert_eq!(second["subject"], first["subject"]);
        // It ends the mute of the first one, too.
        let of_second = format!("/v1/incidents/{}/mute", second["id"].as_str().expect("an id"));
        let unmuted = t.post(&of_second, json!({"seconds": 0})).await.is(200);
        assert_eq!(unmuted["muted_until"], Value::Null);
        let of_first = t.get(path.trim_end_matches("/mute")).await.is(200);
        assert_eq!(of_first["muted_until"], Value::Null);
        // The end of the second one is the next that is reported.
        t.database.execute(SILENCE).await;
        let reported = sink.next().await.body();
        assert_eq!(reported["type"], "alarm.resolved");
        assert_eq!(reported["data"]["incident"]["id"], second["id"]);
    });
}

#[test]
fn a_member_gets_twenty_mails_a_day_of_a_project() {
    limited(async {
        let server = TestServer::start_as(fresh_database().await, Stage::default()).await;
        let other = server.project("other").await;
        let ada = Person::sign_up(&other, "ada@example.com").await;
        let slug = ada.made["project"]["slug"].as_str().expect("a slug");
        let trouble = format!(
            "insert into dead_letter_groups (project_id, fingerprint, job_type, sample_job_id)
             select id, gen_random_uuid(), 't', gen_random_uuid()
             from projects, generate_series(1, 25) where slug = '{slug}';
             insert into dead_letters (project_id, job_id, fingerprint, queue, job_type)
             select project_id, sample_job_id, fingerprint, 'q', 't' from dead_letter_groups"
        );
        server.database.execute(&trouble).await;
        server.database.until("select count(*) from incidents", 25).await;
        let mails = "select count(*) from mails where project_id is not null";
        assert_eq!(server.database.number(mails).await, 20);
        let waiting = "select count(*) from mails where sent_at is null";
        server.database.until(waiting, 0).await;
        server.stop().await;
    });
}

const DISABLE: &str =
    "update webhook_endpoints set disabled_at = now(), disabled_reason = 'failing'";
const ENABLE: &str = "update webhook_endpoints set disabled_at = null, disabled_reason = null";

#[test]
fn alarms_that_reach_no_one_are_named() {
    run_alone(async |t| {
        let unheard = async || t.get("/v1/alarms").await.is(200)["unheard"].clone();
        let sink = Sink::start().await;
        let endpoint = json!({"url": sink.url, "events": ["alarm.*"]});
        t.post("/v1/webhooks", endpoint).await.is(201);
        t.database.execute(DISABLE).await;
        assert_eq!(unheard().await, json!([]), "there are no members");
        let ada = Person::sign_up_unverified(t, "ada@example.com").await;
        ada.join(t, Role::Owner).await;
        let all = t.get("/v1/alarms").await.is(200);
        let names: Vec<_> =
            all["alarms"].as_array().expect("alarms").iter().map(|it| &it["name"]).collect();
        assert_eq!(all["unheard"], json!(names));
        let mut browser = Browser::new(t, "ada@example.com");
        browser.log_in("ada@example.com").await;
        for page in ["/console/p/main", "/console/p/main/alarms"] {
            browser.get(page).await.says(200, "no one.</strong>");
        }
        let eve = Person::sign_up(t, "eve@example.com").await;
        eve.join(t, Role::Admin).await;
        t.put("/v1/alarms/dead_letters", json!({"mail_to": "admins"})).await.is(200);
        t.put("/v1/alarms/oldest_ready", json!({"mail_to": "none"})).await.is(200);
        t.put("/v1/alarms/key_expiring", json!({"enabled": false})).await.is(200);
        let heard = ["dead_letters", "oldest_ready", "key_expiring"];
        let left: Vec<_> =
            names.iter().filter(|name| !heard.iter().any(|it| **name == it)).collect();
        assert_eq!(unheard().await, json!(left));
        t.database.execute(ENABLE).await;
        assert_eq!(unheard().await, json!([]), "a webhook hears");
        t.database.execute(DISABLE).await;
        assert_eq!(unheard().await, json!(left));
        let verify = "update accounts set verified_at = now() where email = 'ada@example.com'";
        t.database.execute(verify).await;
        assert_eq!(unheard().await, json!([]));
        let overview = browser.get("/console/p/main").await;
        assert!(!overview.text.contains("no one.</strong>"), "{}", overview.text);
    });
}
