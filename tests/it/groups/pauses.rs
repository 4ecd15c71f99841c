//! Groups are seen, paused, and unblocked; a worker that meets a rate limit pauses one.

use serde_json::{Value, json};

use super::order::{enqueue, order, starts};
use crate::harness::{TestProject, run, run_alone, until};

async fn group(t: &TestProject, name: &str) -> Value {
    t.get(&format!("/v1/queues/default/groups/{name}")).await.is(200)
}

async fn listed(t: &TestProject, query: &str) -> Vec<Value> {
    let page = t.get(&format!("/v1/queues/default/groups?{query}")).await.is(200);
    page["groups"].as_array().expect("groups").iter().map(|it| it["group"].clone()).collect()
}

/// Acks that a partner asks for fewer requests.
async fn limited(t: &TestProject, job: &Value, more: Value) -> Value {
    t.ack_with(job, "w", "rate_limited", more).await.is(200)
}

#[test]
fn a_resumed_queue_without_rules_leaves_nothing_to_do() {
    run_alone(async |t| {
        t.enqueue(json!({})).await;
        for action in ["pause", "resume"] {
            t.act(&format!("/v1/queues/default/{action}")).await.is(200);
        }
        let due = "select count(*) from queues where rate_limited_until is not null";
        assert_eq!(t.database.number(due).await, 0);
        // One that an earlier version has left is tidied.
        t.database.execute("update queues set rate_limited_until = now()").await;
        t.database.until(due, 0).await;
    });
}

#[test]
fn rules_of_a_group_may_come_with_a_pause() {
    run(async |t| {
        super::turns::take_turns(t).await;
        let path = "/v1/queues/default/groups/a";
        let id = t.enqueue(json!({})).await;
        let now = t.job(&id).await["created_at"].as_str().expect("a time").to_owned();
        let now: chrono::DateTime<chrono::Utc> = now.parse().expect("a time");
        let in_seconds = |seconds| json!(now + chrono::TimeDelta::seconds(seconds));
        let until = in_seconds(600);
        let put = t.put(path, json!({"weight": 2, "paused_until": until})).await.is(200);
        assert_eq!((&put["state"], &put["rules"]["weight"]), (&json!("paused"), &json!(2)));
        let paused_until = put["paused_until"].clone();
        let earlier = json!({"weight": 3, "paused_until": in_seconds(60)});
        for rules in [earlier, json!({"weight": 3})] {
            let put = t.put(path, rules).await.is(200);
            assert_eq!(put["rules"]["weight"], 3);
            assert_eq!(put["paused_until"], paused_until, "a later end stays");
        }
        t.act(&format!("{path}/reset")).await.is(200);
        assert_eq!(group(t, "a").await["state"], "paused", "rules end, and pauses are resumed");
        for seconds in [-1, 31 * 86_400] {
            let rules = json!({"weight": 9, "paused_until": in_seconds(seconds)});
            t.put(path, rules).await.refuses("paused_until");
        }
        t.put(path, json!({"paused_until": until})).await.refuses("body");
        let resumed = t.act(&format!("{path}/resume")).await.is(200);
        assert_eq!((&resumed["state"], &resumed["rules"]), (&json!("idle"), &Value::Null));
    });
}

#[test]
fn a_paused_group_waits_and_the_others_run() {
    run(async |t| {
        let first = t.enqueue(json!({"group": "a/b"})).await;
        let paused = t.act("/v1/queues/default/groups/a%2Fb/pause").await.is(200);
        assert_eq!(paused["group"], "a/b");
        assert_eq!(paused["state"], "paused");
        assert_eq!(paused["paused_until"], Value::Null, "until it is resumed");
        let second = t.enqueue(json!({"group": "a/b"})).await;
        let other = t.enqueue(json!({"group": "c"})).await;
        let jobs = t.poll("w", 10).await;
        assert_eq!(jobs.len(), 1, "what is not paused");
        assert_eq!(jobs[0]["id"], other.as_str());
        until("the paused ones to be closed", async || {
            t.job(&first).await["waiting_for"] == "group"
        })
        .await;
        let why = t.get(&format!("/v1/jobs/{second}/explain")).await.is(200);
        assert_eq!(why["reason"], "group_held");
        assert_eq!(why["summary"], "its group a/b is paused: resume it");
        assert_eq!(listed(t, "state=paused").await, ["a/b"]);
        assert_eq!(listed(t, "").await, ["a/b", "c"]);
        assert_eq!(group(t, "a%2Fb").await["waiting"], 2);
        let resumed = t.act("/v1/queues/default/groups/a%2Fb/resume").await.is(200);
        assert_eq!(resumed["state"], "waiting");
        let mut left = vec![t.wait_and_lease("w").await["id"].clone()];
        left.push(t.wait_and_lease("w").await["id"].clone());
        assert!(left.contains(&json!(first)) && left.contains(&json!(second)));
        t.get("/v1/queues/default/groups/none").await.is_error(404, "group_not_found");
        t.act("/v1/queues/default/groups/none/resume").await.is_error(404, "group_not_found");
        let pause = "/v1/queues/default/groups/none/pause";
        t.post(pause, json!({"seconds": 0})).await.refuses("seconds");
        t.get("/v1/queues/default/groups?state=odd").await.is_error(400, "invalid_request");
        t.get("/v1/queues/default/groups?limit=101").await.refuses("limit");
    });
}

#[test]
fn a_pause_ends_by_itself_and_a_later_end_stays() {
    run(async |t| {
        let id = t.enqueue(json!({"group": "a"})).await;
        let pause = async |seconds: i32| {
            let body = json!({"seconds": seconds});
            t.post("/v1/queues/default/groups/a/pause", body).await.is(200)
        };
        let long = pause(5).await;
        let short = pause(1).await;
        assert_eq!(long["paused_until"], short["paused_until"], "the later end");
        assert_eq!(short["next_change_at"], short["paused_until"]);
        assert!(t.poll("w", 10).await.is_empty());
        starts(t, &id).await;
        until("the pause to be gone", async || group(t, "a").await["paused_at"].is_null()).await;
    });
}

#[test]
fn groups_come_in_pages_with_what_they_wait_for() {
    run(async |t| {
        order(t, "block").await;
        for name in ["a", "b", "c"] {
            enqueue(t, name).await;
            enqueue(t, name).await;
        }
        assert_eq!(listed(t, "limit=2").await, ["a", "b"]);
        let page = t.get("/v1/queues/default/groups?limit=2").await.is(200);
        let cursor = page["next_cursor"].as_str().expect("there is more");
        assert_eq!(listed(t, &format!("limit=2&cursor={cursor}")).await, ["c"]);
        let job = t.wait_and_lease("w").await;
        let name = job["group"].as_str().expect("a group");
        let running = group(t, name).await;
        assert_eq!(running["state"], "running");
        assert_eq!((&running["running"], &running["waiting"]), (&json!(1), &json!(1)));
        assert_eq!(running["head"]["job_id"], job["id"]);
        assert_eq!(running["head"]["state"], "processing");
        t.ack_with(&job, "w", "failed", json!({"retryable": false})).await.is(200);
        assert_eq!(group(t, name).await["state"], "blocked");
        assert_eq!(listed(t, "state=blocked").await, [name]);
        let unblock = format!("/v1/queues/default/groups/{name}/unblock");
        t.post(&unblock, json!({"head": "shoot"})).await.is_error(400, "invalid_request");
        let free = t.post(&unblock, json!({"head": "skip"})).await.is(200);
        assert_eq!(free["state"], "waiting", "the next one");
        t.post(&unblock, json!({"head": "skip"})).await.is_error(409, "group_not_blocked");
        assert_eq!(t.job(job["id"].as_str().expect("an id")).await["state"], "dead_letter");
    });
}

#[test]
fn a_blocked_group_is_unblocked_by_a_retry_or_a_deletion() {
    run(async |t| {
        order(t, "block").await;
        let (first, second) = (enqueue(t, "a").await, enqueue(t, "a").await);
        let fail = async |id: &str| {
            let job = starts(t, id).await;
            t.ack_with(&job, "w", "failed", json!({"retryable": false})).await.is(200);
        };
        fail(&first).await;
        let unblock = "/v1/queues/default/groups/a/unblock";
        t.post(unblock, json!({"head": "retry"})).await.is(200);
        fail(&first).await;
        t.post(unblock, json!({"head": "delete"})).await.is(200);
        fail(&second).await;
        assert_eq!(t.post(unblock, json!({"head": "delete"})).await.is(200)["state"], "idle");
        let log = t.get("/v1/audit-log?action=group.unblocked").await.is(200).to_string();
        assert!(log.contains(r#""head":"retry""#), "{log}");
    });
}

#[test]
fn a_rate_limit_pauses_the_group_without_a_failure() {
    run(async |t| {
        let first = t.enqueue(json!({"group": "a"})).await;
        let second = t.enqueue(json!({"group": "a"})).await;
        let other = t.enqueue(json!({"group": "b"})).await;
        let job = starts(t, &first).await;
        let reply = limited(t, &job, json!({"retry_after_seconds": 4})).await;
        assert_eq!(reply["action"], "retry");
        assert!(reply["retry_at"].is_string());
        assert_eq!(limited(t, &job, json!({"retry_after_seconds": 4})).await, reply, "repeated");
        let jobs = t.poll("w", 10).await;
        assert_eq!(jobs.len(), 1, "the group is paused");
        assert_eq!(jobs[0]["id"], other.as_str());
        let job = t.job(&first).await;
        assert_eq!(job["failures"], 0);
        assert_eq!(job["attempts"][0]["outcome"], "released");
        assert_eq!(job["attempts"][0]["error"]["type"], "rate_limited");
        let mut ids = vec![t.wait_and_lease("w").await["id"].clone()];
        ids.push(t.wait_and_lease("w").await["id"].clone());
        assert!(ids.contains(&json!(first)) && ids.contains(&json!(second)));
        let log = t.get("/v1/audit-log?action=job.rate_limited").await.is(200);
        assert_eq!(log["entries"].as_array().expect("entries").len(), 1, "one pause began: {log}");
    });
}

#[test]
fn a_rate_limit_of_a_queue_pauses_all_of_it() {
    run(async |t| {
        let first = t.enqueue(json!({})).await;
        let job = starts(t, &first).await;
        let second = t.enqueue(json!({"group": "a"})).await;
        t.ack(&job, "w", "released").await.is(200);
        t.ack(&job, "w", "rate_limited").await.is_error(409, "invalid_state");
        let job = t.wait_and_lease("w").await;
        assert_eq!(job["id"], json!(first));
        let wrong = |more: Value| t.ack_with(&job, "w", "rate_limited", more);
        wrong(json!({"scope": "group"})).await.refuses("scope");
        let ack = json!({"job_id": first, "worker_id": "w", "status": "rate_limited",
            "attempt": job["attempt"], "scope": "group"});
        let acked = t.post("/v1/workers/ack/batch", json!({"acks": [ack]})).await.is(200);
        assert_eq!(acked["results"][0]["error"]["details"][0]["field"], "acks[0].scope");
        wrong(json!({"retry_after_seconds": 0})).await.refuses("retry_after_seconds");
        wrong(json!({"retry_after_seconds": 86_401})).await.refuses("retry_after_seconds");
        wrong(json!({"retryable": false})).await.refuses("retryable");
        t.ack_with(&job, "w", "failed", json!({"scope": "queue"})).await.refuses("scope");
        limited(t, &job, json!({"retry_after_seconds": 4})).await;
        assert!(t.poll("w", 10).await.is_empty(), "nothing of the queue starts");
        let why = t.get(&format!("/v1/jobs/{second}/explain")).await.is(200);
        assert_eq!(why["reason"], "rate_limit");
        assert_eq!(t.job(&second).await["waiting_for"], "rate_limit");
        let mut ids = vec![t.wait_and_lease("w").await["id"].clone()];
        ids.push(t.wait_and_lease("w").await["id"].clone());
        assert!(ids.contains(&json!(first)) && ids.contains(&json!(second)));
    });
}

#[test]
fn a_rate_limited_job_stays_the_first_of_its_group() {
    run(async |t| {
        order(t, "block").await;
        let (first, second) = (enqueue(t, "a").await, enqueue(t, "a").await);
        for _ in 0..3 {
            let job = starts(t, &first).await;
            limited(t, &job, json!({"retry_after_seconds": 1})).await;
        }
        let job = starts(t, &first).await;
        assert_eq!(job["attempt"], 4);
        t.ack(&job, "w", "succeeded").await.is(200);
        starts(t, &second).await;
    });
}

#[test]
fn the_end_of_a_rate_limit_leaves_nothing_to_do() {
    run_alone(async |t| {
        order(t, "block").await;
        let first = enqueue(t, "a").await;
        let job = starts(t, &first).await;
        limited(t, &job, json!({"retry_after_seconds": 1, "scope": "queue"})).await;
        let job = starts(t, &first).await;
        let has_ended =
            "select (count(*) = 0)::text from queues where rate_limited_until is not null";
        until("the limit to have ended", async || t.database.text(has_ended).await == "true").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        t.patch("/v1/queues/default", json!({"groups": null})).await.is(200);
        t.act("/v1/queues/default/groups/b/pause").await.is(200);
        t.act("/v1/queues/default/groups/b/resume").await.is(200);
        let is_open = "select (count(*) = 0)::text from queues where has_gate";
        until("claims to be as before", async || t.database.text(is_open).await == "true").await;
    });
}

#[test]
fn a_person_ends_the_pause_that_a_worker_asked_for() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = starts(t, &id).await;
        let second = t.enqueue(json!({})).await;
        limited(t, &job, json!({"retry_after_seconds": 86_400})).await;
        assert!(t.poll("w", 10).await.is_empty());
        t.act("/v1/queues/default/resume").await.is(200);
        starts(t, &second).await;
    });
}

#[test]
fn dead_letters_of_a_paused_group_that_are_retried_wait_for_it() {
    run(async |t| {
        let id = t.enqueue(json!({"group": "a", "max_attempts": 1})).await;
        let job = starts(t, &id).await;
        t.act("/v1/queues/default/groups/a/pause").await.is(200);
        t.ack_with(&job, "w", "failed", json!({"retryable": false})).await.is(200);
        t.act(&format!("/v1/jobs/{id}/retry")).await.is(200);
        assert_eq!(t.job(&id).await["waiting_for"], "group");
        assert!(t.poll("w", 10).await.is_empty());
        t.act("/v1/queues/default/groups/a/resume").await.is(200);
        starts(t, &id).await;
    });
}
