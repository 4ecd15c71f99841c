//! The search line of jobs: in lists, in bulk operations, and on the command line.

use crate::{
    harness::{LoneProject, TestProject, run, run_alone},
    operations::ends,
};
use serde_json::{Value, json};

/// The ids that a search finds.
async fn found(t: &TestProject, line: &str) -> Vec<String> {
    let page = t.get(&format!("/v1/jobs?q={}", urlencoding(line))).await.is(200);
    let jobs = page["jobs"].as_array().expect("jobs");
    jobs.iter().map(|it| it["id"].as_str().expect("an id").to_owned()).collect()
}

fn urlencoding(text: &str) -> String {
    form_urlencoded::byte_serialize(text.as_bytes()).collect()
}

/// A job that failed with this error, and is in the dead letter.
async fn failed(t: &TestProject, queue: &str, error: Value) -> String {
    let id = t.enqueue(json!({"queue": queue, "job_type": "mail", "max_attempts": 1})).await;
    let poll = json!({"worker_id": "w", "queues": [queue], "capacity": 1});
    let leased = t.post("/v1/workers/poll", poll).await.is(200)["jobs"][0].clone();
    t.ack_with(&leased, "w", "failed", json!({"error": error})).await.is(200);
    id
}

#[test]
fn a_search_combines_its_conditions() {
    run_alone(async |t| {
        let old = t.enqueue(json!({"queue": "mail", "tags": {"customer": "3", "eu": "1"}})).await;
        t.database.execute("update jobs set created_at = now() - interval '10 min'").await;
        let new = t.enqueue(json!({"queue": "mail", "tags": {"customer": "3"}})).await;
        let later = json!({"queue": "other", "delay_seconds": 60, "labels": ["gpu", "eu"]});
        let later = t.enqueue(later).await;
        let refused = json!({"type": "SmtpError", "message": "Connection refused: 100%"});
        let dead = failed(t, "broken", refused).await;
        let nothing: [&str; 0] = [];
        assert_eq!(found(t, "").await, [&*dead, &*later, &*new, &*old]);
        assert_eq!(found(t, "queue:mail").await, [&*new, &*old]);
        assert_eq!(found(t, "queue:mail age:>5m").await, [&*old]);
        assert_eq!(found(t, "queue:mail age:<5m").await, [&*new]);
        assert_eq!(found(t, "state:scheduled,dead_letter").await, [&*dead, &*later]);
        assert_eq!(found(t, "tag:customer=3 tag:eu").await, [&*old]);
        assert_eq!(found(t, "tag:customer=4").await, nothing);
        assert_eq!(found(t, "label:gpu label:eu").await, [&*later]);
        assert_eq!(found(t, "label:gpu label:us").await, nothing);
        assert_eq!(found(t, "type:mail error:smtperror").await, [&*dead]);
        assert_eq!(found(t, "error:\"connection refused\"").await, [&*dead]);
        assert_eq!(found(t, "error:100%").await, [&*dead]);
        assert_eq!(found(t, "error:1_0").await, nothing, "no character stands for another");
        let page = t.get("/v1/jobs?queue=mail&q=age:%3E5m").await.is(200);
        assert_eq!(page["jobs"].as_array().expect("jobs").len(), 1, "beside parameters");
    });
}

#[test]
fn the_oldest_jobs_come_first_on_demand() {
    run(async |t| {
        let mut ids = Vec::new();
        for _ in 0..5 {
            ids.push(t.enqueue(json!({"queue": "mail"})).await);
        }
        let (mut seen, mut path) = (Vec::new(), "/v1/jobs?order=oldest&limit=2".to_owned());
        loop {
            let page = t.get(&path).await.is(200);
            let jobs = page["jobs"].as_array().expect("jobs").iter();
            seen.extend(jobs.map(|it| it["id"].as_str().expect("an id").to_owned()));
            let Some(cursor) = page["next_cursor"].as_str() else { break };
            t.get(&format!("/v1/jobs?limit=2&cursor={cursor}")).await.refuses("cursor");
            path = format!("/v1/jobs?order=oldest&limit=2&cursor={cursor}");
        }
        assert_eq!(seen, ids);
        t.get("/v1/jobs?order=random").await.refuses("order");
    });
}

#[test]
fn a_list_says_which_jobs_no_worker_can_take() {
    run(async |t| {
        let unpolled = t.enqueue(json!({"queue": "unpolled"})).await;
        let labelled = t.enqueue(json!({"queue": "mail", "labels": ["gpu"]})).await;
        let poll = json!({"worker_id": "w", "queues": ["mail"], "capacity": 1});
        t.post("/v1/workers/poll", poll).await.is(200);
        let plain = t.enqueue(json!({"queue": "mail"})).await;
        let later = t.enqueue(json!({"queue": "unpolled", "delay_seconds": 60})).await;
        let page = t.get("/v1/jobs").await.is(200);
        let reason = |id: &str| {
            let jobs = page["jobs"].as_array().expect("jobs");
            jobs.iter().find(|it| it["id"] == id).expect("the job")["waiting_reason"].clone()
        };
        assert_eq!(reason(&unpolled), "no_workers");
        assert_eq!(reason(&labelled), "labels");
        assert_eq!(reason(&plain), Value::Null, "a worker can take it");
        assert_eq!(reason(&later), Value::Null, "it waits for its time");
    });
}

#[test]
fn a_list_looks_up_the_workers_of_a_bounded_number_of_queues() {
    run(async |t| {
        for at in 0..21 {
            t.enqueue(json!({"queue": format!("q{at:02}")})).await;
        }
        let page = t.get("/v1/jobs").await.is(200);
        let jobs = page["jobs"].as_array().expect("jobs").iter();
        let unknown = jobs.filter(|it| it["waiting_reason"].is_null());
        let unknown: Vec<_> = unknown.map(|it| it["queue"].as_str().expect("a queue")).collect();
        assert_eq!(unknown, ["q20"], "the last one by name, whenever the list is read");
    });
}

#[test]
fn a_job_is_found_by_its_id_its_start_and_its_end() {
    run(async |t| {
        let [first, second] = [t.enqueue(json!({})).await, t.enqueue(json!({})).await];
        let leased = t.lease("w").await;
        t.ack(&leased, "w", "succeeded").await.is(200);
        let end = &first[first.len() - 8..];
        assert_eq!(found(t, &first).await, [&*first]);
        assert_eq!(found(t, &format!("id:{first}")).await, [&*first]);
        assert_eq!(found(t, end).await, [&*first], "of a job that has ended");
        assert_eq!(found(t, &format!("…{end}")).await, [&*first]);
        assert_eq!(found(t, &first[..first.len() - 1]).await, [&*first]);
        assert_eq!(found(t, &first[..8]).await, [&*second, &*first]);
        assert_eq!(found(t, &format!("{end} state:pending")).await, [""; 0]);
    });
}

#[test]
fn a_line_that_cannot_be_read_is_refused_by_name() {
    run(async |t| {
        let refused = async |line: &str, reported: &str| {
            let reply = t.get(&format!("/v1/jobs?q={}", urlencoding(line))).await;
            let message = reply.refuses("q");
            assert!(message.contains(reported), "{line}: {message}");
        };
        refused("colour:red", "is not a condition").await;
        refused("state:ready", "is not a state").await;
        refused("smtp!", "error:smtp!").await;
        refused(&"x".repeat(1_001), "at most 1000").await;
        t.get("/v1/jobs?queue=a&q=queue:b").await.refuses("q");
        let filter = json!({"filter": {"q": "state:succeeded"}});
        t.post("/v1/jobs/retry", filter).await.refuses("filter.q");
        for ids in [json!([]), json!(vec!["job_01m7w3ha3aextt8pkwwdmxsmqw"; 201])] {
            t.post("/v1/jobs/cancel", json!({"filter": {"ids": ids}})).await.refuses("filter.ids");
        }
        let bad = json!({"filter": {"ids": ["job_5"]}});
        t.post("/v1/jobs/cancel", bad).await.refuses("filter.ids");
    });
}

#[test]
fn a_bulk_operation_takes_a_search_or_chosen_jobs() {
    run(async |t| {
        let mut jobs = Vec::new();
        for number in 0..4 {
            jobs.push(t.enqueue(json!({"queue": "mail", "tags": {"n": number.to_string()}})).await);
        }
        let foreign = t.enqueue(json!({"queue": "other"})).await;
        let chosen = json!({"filter": {"ids": [jobs[0], jobs[2]], "queue": "mail"}});
        let begun = t.post("/v1/jobs/cancel", chosen).await.is(202);
        assert_eq!(begun["count"], 2);
        assert_eq!(ends(t, &begun["operation"]).await["done"], 2);
        let states = async |t: &TestProject| {
            let mut states = Vec::new();
            for id in &jobs {
                states.push(t.job(id).await["state"].as_str().expect("a state").to_owned());
            }
            states
        };
        assert_eq!(states(t).await, ["cancelled", "pending", "cancelled", "pending"]);
        let line = json!({"filter": {"q": "queue:mail tag:n=3 age:<1h"}});
        let begun = t.post("/v1/jobs/cancel", line).await.is(202);
        assert_eq!(begun["operation"]["filter"]["q"], "queue:mail tag:n=3 age:<1h");
        assert_eq!(ends(t, &begun["operation"]).await["done"], 1);
        assert_eq!(states(t).await, ["cancelled", "pending", "cancelled", "cancelled"]);
        assert_eq!(t.job(&foreign).await["state"], "pending");
    });
}

#[test]
fn who_may_not_read_errors_may_not_search_them_either() {
    run(async |t| {
        let dead = failed(t, "q", json!({"type": "E", "message": "the secret is 42"})).await;
        let key = json!({"name": "reader", "scopes": ["read", "manage"]});
        let key =
            t.post("/v1/keys", key).await.is(201)["secret"].as_str().expect("a secret").to_owned();
        let reader = t.with_key(key);
        assert_eq!(found(&reader, "queue:q").await, [&*dead]);
        reader.get("/v1/jobs?q=error:secret").await.is_error(403, "forbidden");
        let bulk = json!({"filter": {"q": "error:secret"}, "dry_run": true});
        reader.post("/v1/jobs/retry", bulk.clone()).await.is_error(403, "forbidden");
        assert_eq!(t.post("/v1/jobs/retry", bulk).await.is(200)["count"], 1);
    });
}

#[test]
fn an_empty_line_selects_nothing_in_bulk_and_a_tag_has_one_value() {
    run(async |t| {
        t.enqueue(json!({"tags": {"env": "prod"}})).await;
        for line in ["", "   "] {
            let all = json!({"filter": {"q": line}, "dry_run": true});
            t.post("/v1/jobs/cancel", all).await.refuses("filter.q");
        }
        let both = json!({"filter": {"tag": "env:staging", "q": "tag:env=prod"}, "dry_run": true});
        t.post("/v1/jobs/cancel", both).await.refuses("filter.q");
        t.get("/v1/jobs?q=tag:env=a%20tag:env=b").await.refuses("q");
    });
}

#[test]
fn a_dead_letter_is_found_behind_any_number_of_newer_jobs() {
    run_alone(async |t| {
        let dead = failed(t, "q", json!({"message": "refused"})).await;
        t.database
            .execute(
                "insert into jobs (project_id, id, queue, job_type, state, rank, run_at,
                                   max_attempts, timeout_seconds)
                 select project_id, ('ffffffff-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid,
                        queue, 'common', 'pending', rank, run_at, max_attempts, timeout_seconds
                 from jobs, generate_series(1, 30000) n",
            )
            .await;
        assert_eq!(found(t, "state:dead_letter").await, [&*dead]);
        let bulk = json!({"filter": {"q": "state:dead_letter error:refused"}});
        let begun = t.post("/v1/jobs/retry", bulk).await.is(202);
        assert_eq!((&begun["count"], &begun["is_capped"]), (&json!(1), &json!(false)));
        assert_eq!(ends(t, &begun["operation"]).await["done"], 1);
    });
}

#[test]
fn another_projects_jobs_are_never_found() {
    run_alone(async |t| {
        let theirs = LoneProject::at(&t.url, &t.database, "theirs").await;
        let id = theirs.enqueue(json!({"tags": {"a": "1"}})).await;
        assert_eq!(found(t, &id).await, [""; 0]);
        assert_eq!(found(t, &id[id.len() - 8..]).await, [""; 0]);
        let chosen = json!({"filter": {"ids": [id]}, "dry_run": true});
        assert_eq!(t.post("/v1/jobs/cancel", chosen).await.is(200)["count"], 0);
    });
}
