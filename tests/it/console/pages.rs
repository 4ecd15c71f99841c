//! What pages show, and what their buttons do.

use fencepost_domain::access::Role;

use super::{Browser, form_with, pairs};
use crate::harness::{TestProject, run, run_alone};
use crate::people::Person;
use serde_json::{Value, json};

/// All pages of a project, but those of one thing.
const PAGES: [&str; 32] = [
    "",
    "/start",
    "/first",
    "/jobs",
    "/jobs?state=dead_letter&queue=default&job_type=t&tag=a:b&created_after=2020-01-01T00:00",
    "/jobs/bulk/jobs_bulk_cancel",
    "/jobs/bulk/jobs_bulk_retry?queue=default",
    "/jobs/new",
    "/job-types",
    "/job-types/t",
    "/jobs?order=oldest",
    "?period=30d",
    "/queues?search=def",
    "/dead-letters?sort=latest",
    "/jobs?q=queue%3Adefault+age%3A%3C1h&state=pending",
    "/queues",
    "/dead-letters",
    "/dead-letters/list",
    "/dead-letters/bulk/dead_letters_bulk_retry",
    "/recurring",
    "/recurring/new",
    "/workers",
    "/workflows",
    "/batches",
    "/operations",
    "/keys",
    "/webhooks",
    "/queues/default/push",
    "/members",
    "/limits",
    "/shared-limits",
    "/settings",
];

/// What must never become HTML.
pub const CORPUS: [&str; 5] = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>",
    "'><svg/onload=alert(1)>",
    "</textarea></pre></script><script>alert(1)</script>",
    "javascript:alert(1)//<a href=javascript:alert(1)>",
];

/// A job that has failed for good, with logs, an event and an error, all of them made of `text`.
async fn dead_letter(t: &TestProject, text: &str) -> String {
    let job = json!({
        "job_type": text, "payload": {text: text}, "tags": {"t": text}, "max_attempts": 1, "labels": [],
        "concurrency_key": text, "group": text,
    });
    let id = t.enqueue(job).await;
    let leased = t.lease(text).await;
    let chunk = json!({
        "job_id": id, "attempt": 1, "sequence": 1, "stream": "stdout", "data": text,
        "timestamp_ms": 1_700_000_000_000_i64,
    });
    t.post("/v1/workers/logs", json!({"worker_id": text, "chunks": [chunk]})).await.is(200);
    let error = json!({"error": {"type": text, "message": text, "stack_trace": text}});
    t.ack_with(&leased, text, "failed", error).await.is(200);
    id
}

pub fn is_clean(page: &str) {
    for text in CORPUS {
        assert!(!page.contains(text), "{text} is in {page}");
    }
    let tags = page.split('<').skip(1).map(|it| it.split('>').next().unwrap_or_default());
    for tag in tags {
        assert!(!tag.starts_with("script") || tag.contains("src=\"/console/assets/"), "{tag}");
        // Without the values, which may say anything.
        let names: String = tag.split('"').step_by(2).collect();
        for name in names.split_whitespace().skip(1) {
            assert!(!name.starts_with("style=") && !name.starts_with("on"), "{name} in {tag}");
        }
        // What leads somewhere leads to a place of ours, or over https.
        for name in ["href", "src", "action", "hx-get", "hx-post"] {
            let Some((_, after)) = tag.split_once(&format!(" {name}=\"")) else { continue };
            let is_safe = ["/", "#", "https://", "\""].iter().any(|it| after.starts_with(it));
            assert!(is_safe && !after.starts_with("//"), "{name} in {tag}");
        }
    }
}

#[test]
fn every_page_shows_what_others_wrote_as_text_under_a_policy_without_exceptions() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Owner).await;
        let mut pages: Vec<String> = PAGES.iter().map(|it| (*it).to_owned()).collect();
        for text in CORPUS {
            pages.push(format!("/jobs/{}", dead_letter(t, text).await));
            t.post("/v1/keys", json!({"name": text})).await.is(201);
            let graph =
                json!({"name": text, "jobs": [{"key": text, "job_type": text, "queue": text}]});
            let workflow = t.post("/v1/workflows", graph).await.is(201);
            pages.push(format!("/workflows/{}", workflow["id"].as_str().expect("an id")));
            let batch = t.post("/v1/batches", json!({"name": text})).await.is(201);
            let batch = batch["id"].as_str().expect("an id");
            t.enqueue(json!({"batch_id": batch, "queue": "batched"})).await;
            pages.push(format!("/batches/{batch}"));
            pages.push(format!("/jobs?batch_id={batch}"));
            pages.push(format!("/jobs/bulk/jobs_bulk_cancel?batch_id={batch}"));
            let schedule = json!({"job_type": text, "cron_expression": "@daily", "payload": text});
            let made = t.post("/v1/recurring", schedule).await.is(201);
            let id = made["id"].as_str().expect("an id");
            pages.push(format!("/recurring/s/{id}"));
            pages.push(format!("/recurring/s/{id}/edit"));
            let name: String = text.bytes().map(|it| format!("%{it:02x}")).collect();
            pages.push(format!("/queues/{name}"));
            let limit = json!({"by": "group", "rates": [{"count": 9, "per_seconds": 60}]});
            t.put(&format!("/v1/shared-limits/{name}"), limit).await.is(200);
            let own = format!("/v1/shared-limits/{name}/groups/{name}");
            t.put(&own, json!({"max_running": 1})).await.is(200);
            pages.push(format!("/shared-limits/{name}"));
            pages.push(format!("/jobs?job_type={name}"));
            let member = json!({"title": text, "description": text, "enum": [text]});
            let schema = json!({"required": [text], "properties": {text: member}});
            t.put(&format!("/v1/job-types/{name}"), json!({"schema": schema})).await.is(200);
            pages.push(format!("/job-types/{name}"));
            pages.push(format!("/jobs/new?job_type={name}"));
            pages.push(format!("/jobs?state={name}"));
            pages.push(format!("/audit-log?target={name}"));
            pages.push(format!("/workers?label={name}"));
        }
        let cancelled = json!({"filter": {"queue": CORPUS[0]}});
        let begun = t.post("/v1/jobs/cancel", cancelled).await.is(202);
        pages.push(format!("/operations/{}", begun["operation"]["id"].as_str().expect("an id")));
        pages.push("/audit-log".to_owned());
        for path in pages {
            let page = browser.get(&format!("/console/p/{}{path}", t.id)).await;
            let expected = if path.starts_with("/jobs?state=%") { 400 } else { 200 };
            assert_eq!(page.status.as_u16(), expected, "{path}: {}", page.text);
            is_clean(&page.text);
            let policy = page.headers["content-security-policy"].to_str().expect("text");
            assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
            assert!(!policy.contains("unsafe"), "{policy}");
            assert_eq!(page.headers["cache-control"], "no-store", "{path}");
        }
        // Nothing was done by looking, and by asking how many there are.
        let operations = t.get("/v1/operations").await.is(200)["operations"].clone();
        assert_eq!(operations.as_array().map(Vec::len), Some(1), "{operations}");
    });
}

#[test]
fn a_viewer_sees_and_cannot_act() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "eve@example.com", Role::Viewer).await;
        let job = dead_letter(t, "email.send").await;
        for path in
            ["", "/jobs", &format!("/jobs/{job}"), "/queues", "/queues/default", "/dead-letters"]
        {
            let page = browser.get(&format!("/console/p/{}{path}", t.id)).await;
            page.says(200, "Overview");
            assert!(!page.text.contains("/do/"), "{path}: {}", page.text);
            assert!(!page.text.contains("audit-log"), "{path}");
        }
        browser.act(t, "jobs_retry", &[("job_id", &job)]).await.says(403, "forbidden");
        browser.act(t, "queues_pause", &[("queue", "default")]).await.says(403, "forbidden");
        let page = format!("/console/p/{}", t.id);
        browser.get(&format!("{page}/keys")).await.says(403, "forbidden");
        browser.post(&format!("{page}/jobs/{job}/replay"), &[]).await.says(403, "forbidden");
        assert_eq!(t.job(&job).await["state"], json!("dead_letter"));
    });
}

#[test]
fn a_project_of_others_is_not_there() {
    run(async |t| {
        let mut browser = Browser::new(t, "mallory@example.com");
        browser.sign_up("mallory@example.com", "Own").await.says(200, "fp_live_");
        let job = t.enqueue(json!({})).await;
        for path in ["", "/jobs", "/keys", &format!("/jobs/{job}"), "/stream"] {
            browser.get(&format!("/console/p/{}{path}", t.id)).await.says(404, "Not found");
        }
        browser.act(t, "jobs_cancel", &[("job_id", &job)]).await.says(404, "Not found");
        // In a project of their own, it is not there either.
        let own = browser.get("/console").await.headers["location"].clone();
        let own = own.to_str().expect("text").to_owned();
        let form = [("job_id", job.as_str())];
        browser.post(&format!("{own}/do/jobs_cancel"), &form).await.says(404, "Not found");
        browser.get("/console/nothing").await.says(404, "Not found");
        browser.act(t, "nothing", &[]).await.says(404, "Not found");
    });
}

#[test]
fn a_member_finds_a_queue_without_workers_and_retries_dead_letters() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Member).await;
        let page = format!("/console/p/{}", t.id);
        let idle = t.enqueue(json!({"queue": "idle"})).await;
        let dead = dead_letter(t, "email.send").await;
        browser.get(&page).await.says(200, "no worker takes them");
        let groups = browser.get(&format!("{page}/dead-letters")).await;
        let at = groups.text.find("fingerprint=").expect("a group") + "fingerprint=".len();
        let fingerprint = groups.text[at..at + 32].to_owned();
        let asked =
            format!("{page}/dead-letters/bulk/dead_letters_bulk_retry?fingerprint={fingerprint}");
        browser.get(&asked).await.says(200, "1 dead letter?");
        let form = [("filter.fingerprint", fingerprint.as_str()), ("rate_per_second", "50")];
        let begun = browser.act(t, "dead_letters_bulk_retry", &form).await;
        assert_eq!(begun.status, 303, "{}", begun.text);
        let place = begun.headers["location"].to_str().expect("text").to_owned();
        assert!(place.starts_with(&format!("{page}/operations/op_")), "{place}");
        browser.get(&place).await.says(200, "Retry dead letters");
        t.job_becomes(&dead, "pending").await;
        // All that match a filter, counted first.
        browser
            .get(&format!("{page}/jobs/bulk/jobs_bulk_cancel?queue=idle"))
            .await
            .says(200, "Cancel 1 job?");
        let form = [("filter.queue", "idle"), ("max", ""), ("rate_per_second", "")];
        assert_eq!(browser.act(t, "jobs_bulk_cancel", &form).await.status, 303);
        t.job_becomes(&idle, "cancelled").await;
        browser
            .act(t, "queues_pause", &[("queue", "default")])
            .await
            .goes(&format!("{page}?done=queues_pause"));
        browser.get(&format!("{page}?done=queues_pause")).await.says(200, "none is claimed");
        let form = [("queue", "default"), ("max_concurrency", "5"), ("retention_days", "3")];
        browser.act(t, "queues_update", &form).await;
        let queue = t.get("/v1/queues/default").await.is(200);
        assert_eq!((&queue["max_concurrency"], &queue["rate_limit"]), (&json!(5), &Value::Null));
        let form = [("queue", "default"), ("rate_limit.count", "many")];
        browser.act(t, "queues_update", &form).await.says(400, "rate_limit.count");
        let form = [("queue", "default"), ("confirm", "other")];
        browser.act(t, "queues_purge", &form).await.says(400, "must be the queue&#39;s name");
    });
}

#[test]
fn a_job_is_replayed_byte_for_byte_or_edited_and_run_now() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Member).await;
        let page = format!("/console/p/{}", t.id);
        let body = r#"{"job_type":"t","queue":"q","payload":{"n": 12345678901234567890.10},"tags":{"a":"b"},"delay_seconds":600}"#;
        let made = t.post_text("/v1/jobs", body).await.is(201);
        let id = made["id"].as_str().expect("an id");
        let copied = browser.post(&format!("{page}/jobs/{id}/replay"), &[]).await;
        assert_eq!(copied.status, 303, "{}", copied.text);
        let place = copied.headers["location"].to_str().expect("text").to_owned();
        let shown = browser.get(&place).await;
        shown.says(200, "This is the new job.");
        shown.says(200, "12345678901234567890.10");
        let copy = place.split(['/', '?']).find(|it| it.starts_with("job_")).expect("an id");
        let raw = t.get(&format!("/v1/jobs/{copy}")).await.text;
        assert!(raw.contains(r#""payload":{"n": 12345678901234567890.10}"#), "{raw}");
        let copy = t.job(copy).await;
        assert_eq!((&copy["tags"], &copy["replay_of"]), (&json!({"a": "b"}), &json!(id)));
        let form = [("payload", "[1.50]"), ("queue", "other")];
        let edited = browser.post(&format!("{page}/jobs/{id}/replay"), &form).await;
        let place = edited.headers["location"].to_str().expect("text").to_owned();
        let edited = place.split(['/', '?']).find(|it| it.starts_with("job_")).expect("an id");
        let raw = t.get(&format!("/v1/jobs/{edited}")).await.text;
        assert!(raw.contains(r#""queue":"other""#) && raw.contains("[1.50]"), "{raw}");
        let form = [("job_id", id), ("delay_seconds", "0")];
        browser.act(t, "jobs_update", &form).await;
        assert_eq!(t.job(id).await["state"], json!("pending"));
    });
}

#[test]
fn a_schedule_is_previewed_made_and_changed_without_losing_what_the_form_does_not_show() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Member).await;
        let page = format!("/console/p/{}", t.id);
        let form = [("cron_expression", "30 2 * * *"), ("timezone", "Europe/Berlin")];
        let preview = browser.post(&format!("{page}/recurring/preview"), &form).await;
        preview.says(200, "02:30:00");
        let form = [("cron_expression", "every day"), ("timezone", "")];
        browser
            .post(&format!("{page}/recurring/preview"), &form)
            .await
            .says(400, "cron_expression");
        let schedule = json!({
            "job_type": "report", "cron_expression": "0 3 * * *", "spread_seconds": 60, "enabled": false,
            "retry": {"strategy": "constant", "initial_seconds": 7}, "payload": {"a": 1},
        });
        t.put("/v1/recurring/nightly", schedule).await.is(200);
        let before = t.get("/v1/recurring/nightly").await.is(200);
        let edit = browser.get(&format!("{page}/recurring/s/nightly/edit")).await.text;
        let form = form_with(&edit, "cron_expression");
        let rest = [("payload", "{\"a\": 1}"), ("overlap", "allow"), ("catch_up", "one")];
        let form: Vec<_> = pairs(&form).into_iter().chain(rest).collect();
        let place = format!("{page}/recurring/s/nightly/edit");
        let there = "/console/p/main/recurring/s/nightly?done=recurring_upsert";
        browser.post(&place, &form).await.goes(there);
        let after = t.get("/v1/recurring/nightly").await.is(200);
        for field in
            ["cron_expression", "spread_seconds", "enabled", "retry", "payload", "max_attempts"]
        {
            assert_eq!(before[field], after[field], "{field}");
        }
        // The form is outdated: it does not overwrite later changes.
        browser.post(&place, &form).await.says(412, "was changed meanwhile");
        t.delete("/v1/recurring/nightly").await.is_empty(204);
        browser.post(&place, &form).await.says(412, "was changed meanwhile");
        let new = [
            ("recurring_id", "weekly"),
            ("job_type", "t"),
            ("cron_expression", "0 3 * * 1"),
            ("if_none_match", "*"),
        ];
        let there = "/console/p/main/recurring/s/weekly?done=recurring_create";
        browser.post(&format!("{page}/recurring/new"), &new).await.goes(there);
        browser.post(&format!("{page}/recurring/new"), &new).await.says(400, "is taken");
        let unnamed = browser.post(&format!("{page}/recurring/new"), &new[1..]).await;
        assert_eq!(unnamed.status, 303, "{}", unnamed.text);
        let all = t.get("/v1/recurring").await.is(200);
        assert_eq!(all["recurring"].as_array().map(Vec::len), Some(2));
    });
}

#[test]
fn a_job_is_found_by_its_id_and_what_it_carries_is_kept_byte_for_byte() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Member).await;
        let body = r#"{"job_type":"t","payload":{"n": 12345678901234567890.10}}"#;
        let id = t.post_text("/v1/jobs", body).await.is(201)["id"].as_str().map(str::to_owned);
        let id = id.expect("an id");
        let found = browser.get(&format!("/console/p/main/jobs?q=+{id}+")).await;
        found.goes(&format!("/console/p/main/jobs/{id}"));
        let at = format!("/console/p/main/jobs/{id}");
        let payload = browser.get(&format!("{at}/payload")).await;
        assert_eq!(payload.text, r#"{"n": 12345678901234567890.10}"#);
        let kept = payload.headers["content-disposition"].to_str().expect("text");
        assert_eq!(kept, format!("attachment; filename=\"{id}-payload.json\""));
        browser.get(&format!("{at}/result")).await.says(404, "Not found");
        let leased = t.lease("w").await;
        t.ack_with(&leased, "w", "succeeded", json!({"result": [1]})).await.is(200);
        assert_eq!(browser.get(&format!("{at}/result")).await.text, "[1]");
        browser.get("/console/p/main/jobs/job_x/payload").await.says(404, "Not found");
        Browser::new(t, "eve@example.com")
            .get(&format!("{at}/payload"))
            .await
            .goes(&format!("/console/login?next=%2Fconsole%2Fp%2Fmain%2Fjobs%2F{id}%2Fpayload"));
    });
}

#[test]
fn the_audit_log_knows_members_by_their_addresses_and_is_kept_as_it_is_shown() {
    run_alone(async |t| {
        let mut ada = Browser::of_member(t, "ada@example.com", Role::Owner).await;
        let mut bob = Browser::of_member(t, "bob@example.com", Role::Owner).await;
        t.enqueue(json!({})).await;
        ada.act(t, "queues_pause", &[("queue", "default")]).await;
        bob.act(t, "queues_resume", &[("queue", "default")]).await;
        let page = ada.get("/console/p/main/audit-log?actor_id=bob%40example.com").await;
        page.says(200, "queue.resumed");
        page.says(200, "bob@example.com");
        assert!(!page.text.contains("<td>queue.paused</td>"), "{}", page.text);
        let (_, link) = page.text.split_once("/console/p/main/audit-log/export").expect("a link");
        let link = link.split('"').next().expect("its end").replace("&#38;", "&");
        let kept = ada.get(&format!("/console/p/main/audit-log/export{link}")).await.text;
        assert!(kept.contains("queue.resumed") && !kept.contains("queue.paused"), "{kept}");
    });
}

#[test]
fn pages_work_when_the_project_has_used_up_its_own_calls() {
    crate::harness::limited(async {
        let server =
            crate::harness::TestServer::start(crate::harness::fresh_database().await).await;
        let t = server.project_with("main", "free", json!({"manage_per_minute": 1})).await;
        let mut browser = Browser::of_member(&t, "ada@example.com", Role::Member).await;
        t.get("/v1/queues").await.is(200);
        t.get("/v1/queues").await.is_error(429, "rate_limit_exceeded");
        for _ in 0..5 {
            browser.get(&format!("/console/p/{}", t.id)).await.says(200, "Overview");
        }
        server.stop().await;
    });
}

#[test]
fn what_happens_is_streamed_to_the_page_that_shows_it() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Viewer).await;
        let cookies: Vec<_> =
            browser.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let stream = t
            .client
            .get(format!("{}/console/p/{}/stream", t.url, t.id))
            .header("cookie", cookies.join("; "))
            .header("sec-fetch-site", "same-origin");
        let mut stream = stream.send().await.expect("an answer");
        assert_eq!(stream.headers()["content-type"], "text/event-stream");
        let job = t.enqueue(json!({})).await;
        let mut heard = String::new();
        while !heard.contains(&job) {
            let chunk = stream.chunk().await.expect("a chunk").expect("it continues");
            heard.push_str(&String::from_utf8_lossy(&chunk));
        }
        browser.get(&format!("/console/p/{}/jobs/{job}", t.id)).await.says(200, "pending");
    });
}

#[test]
fn assets_of_the_console_have_a_hash_in_their_name_and_are_cached_for_good() {
    run(async |t| {
        let page = t.get("/console/login").await.text;
        let addresses = page.split("/console/assets/").skip(1);
        let addresses: Vec<_> =
            addresses.map(|it| it.split('"').next().expect("an address")).collect();
        assert_eq!(addresses.len(), 7);
        for address in addresses {
            let file = t.get(&format!("/console/assets/{address}")).await;
            assert_eq!(file.status, 200, "{address}");
            assert_eq!(file.headers["cache-control"], "public, max-age=31536000, immutable");
        }
        assert_eq!(t.get("/console/assets/000000000000/console.css").await.status, 404);
        assert_eq!(t.get("/console/assets/..%2FCargo.toml").await.status, 404);
        let worker = t.get("/console/examples/worker.py").await;
        assert_eq!(worker.text, include_str!("../../../examples/python/worker.py"));
    });
}

#[test]
fn who_removes_a_member_sees_their_keys_and_keeps_those_in_use_by_default() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Owner).await;
        let vic = Person::sign_up(t, "vic@example.com").await;
        vic.join(t, Role::Admin).await;
        let key = json!({"name": "old worker", "preset": "worker"});
        let path = "/v1/projects/main/keys";
        vic.post(path, key).await.is(201);
        let page = browser.get("/console/p/main/members").await;
        page.says(200, "1 live key created by vic@example.com");
        page.says(200, "old worker (work), last used");
        assert!(!page.text.contains("Some were used within a day"), "{}", page.text);
        t.database
            .execute("update api_keys set last_used_at = now() where name = 'old worker'")
            .await;
        let page = browser.get("/console/p/main/members").await;
        page.says(200, "Some were used within a day");
        let keep = "<option value=\"false\" selected>";
        assert!(page.text.contains(keep), "{}", page.text);
    });
}

#[test]
fn a_viewer_sees_that_payloads_are_hidden() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Viewer).await;
        let id = t.enqueue(json!({"payload": "s3cret-of-a-customer"})).await;
        let page = browser.get(&format!("/console/p/main/jobs/{id}")).await;
        page.says(200, "are shown to members only");
        assert!(!page.text.contains("s3cret"), "{}", page.text);
        let file = browser.get(&format!("/console/p/main/jobs/{id}/payload")).await;
        assert_eq!(file.text, "null");
    });
}
