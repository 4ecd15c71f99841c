//! Strict order: jobs of a group run one at a time, as they were stored.

use serde_json::{Value, json};
use sqlx::Connection;

use crate::harness::{TestProject, run, run_alone, until};

/// Gives the queue `default` a strict order.
pub async fn order(t: &TestProject, on_dead: &str) {
    let groups = json!({
        "order": "strict", "on_dead": on_dead, "max_running": null, "rates": [], "fair": false,
    });
    let queue = t.patch("/v1/queues/default", json!({"groups": groups})).await.is(200);
    assert_eq!(queue["groups"], groups);
}

/// Enqueues a job of a group that has two attempts.
pub async fn enqueue(t: &TestProject, group: &str) -> String {
    t.enqueue(json!({"group": group, "max_attempts": 2})).await
}

/// Waits for the next job, which must be this one.
pub async fn starts(t: &TestProject, id: &str) -> Value {
    let job = t.wait_and_lease("w").await;
    assert_eq!(job["id"], id, "the next in line");
    job
}

async fn explained(t: &TestProject, id: &str) -> (Value, String) {
    let why = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
    (why["reason"].clone(), why["summary"].as_str().expect("a summary").to_owned())
}

#[test]
fn jobs_of_a_group_run_one_at_a_time_as_they_were_stored() {
    run(async |t| {
        order(t, "block").await;
        let first = t.enqueue(json!({"group": "a", "priority": 1})).await;
        let second = t.enqueue(json!({"group": "a", "priority": 9})).await;
        let other = t.enqueue(json!({"group": "b"})).await;
        let alone = t.enqueue(json!({})).await;
        let mut seen = Vec::new();
        let mut jobs = Vec::new();
        for _ in 0..3 {
            let job = t.wait_and_lease("w").await;
            seen.push(job["id"].as_str().expect("an id").to_owned());
            jobs.push(job);
        }
        seen.sort();
        let mut wanted = vec![first.clone(), other, alone];
        wanted.sort();
        assert_eq!(seen, wanted, "one of each group, and what has none");
        assert_eq!(t.job(&second).await["waiting_for"], "group");
        let (reason, summary) = explained(t, &second).await;
        assert_eq!(reason, "group");
        assert_eq!(summary, format!("job {first} is ahead in its group and runs"));
        let of_a = jobs.iter().find(|it| it["id"] == first.as_str()).expect("it was leased");
        t.ack(of_a, "w", "succeeded").await.is(200);
        starts(t, &second).await;
    });
}

#[test]
fn the_first_job_of_an_empty_group_is_ready_when_it_is_stored() {
    run(async |t| {
        order(t, "block").await;
        let jobs: Vec<_> =
            ["a", "a", "b"].map(|it| json!({"job_type": "t", "group": it})).into_iter().collect();
        let stored = t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        let states: Vec<_> = (0..3).map(|it| &stored["jobs"][it]["state"]).collect();
        assert_eq!(states, ["pending", "scheduled", "pending"]);
        let after = t.post("/v1/jobs", json!({"job_type": "t", "group": "b"})).await.is(201);
        assert_eq!(after["state"], "scheduled", "one of its group waits for a worker");
        let dead = starts(t, stored["jobs"][0]["id"].as_str().expect("an id")).await;
        t.ack_with(&dead, "w", "failed", json!({"retryable": false})).await.is(200);
        let cancel = format!("/v1/jobs/{}/cancel", stored["jobs"][1]["id"].as_str().expect("one"));
        t.act(&cancel).await.is(200);
        let blocked = t.post("/v1/jobs", json!({"job_type": "t", "group": "a"})).await.is(201);
        assert_eq!(blocked["state"], "scheduled", "a dead letter blocks the group");
    });
}

#[test]
fn a_retry_a_release_and_a_lost_lease_keep_the_place() {
    run_alone(async |t| {
        order(t, "block").await;
        let (first, second) = (enqueue(t, "a").await, enqueue(t, "a").await);
        let job = starts(t, &first).await;
        t.ack(&job, "w", "released").await.is(200);
        let job = starts(t, &first).await;
        let later = json!({"retry_after_seconds": 60});
        t.ack_with(&job, "w", "failed", later).await.is(200);
        assert!(t.poll("w", 10).await.is_empty(), "the second waits for the retry of the first");
        let (_, summary) = explained(t, &second).await;
        assert!(summary.starts_with(&format!("job {first} is ahead in its group and retries at")));
        let now = json!({"delay_seconds": 0});
        t.patch(&format!("/v1/jobs/{first}"), now).await.is(200);
        starts(t, &first).await;
        t.expire_leases().await;
        let job = starts(t, &first).await;
        t.ack(&job, "w", "failed").await.is(200);
        t.job_becomes(&first, "dead_letter").await;
        let (reason, summary) = explained(t, &second).await;
        assert_eq!(reason, "group_held");
        assert!(summary.contains("dead-lettered: unblock the group"), "{summary}");
        assert!(t.poll("w", 10).await.is_empty(), "a dead letter blocks its group");
        t.act(&format!("/v1/jobs/{first}/retry")).await.is(200);
        let job = starts(t, &first).await;
        t.ack(&job, "w", "succeeded").await.is(200);
        starts(t, &second).await;
    });
}

#[test]
fn what_leaves_the_line_lets_the_next_one_run() {
    run(async |t| {
        order(t, "skip").await;
        let (first, second) = (enqueue(t, "a").await, enqueue(t, "a").await);
        let (third, fourth) = (enqueue(t, "a").await, enqueue(t, "a").await);
        t.act(&format!("/v1/jobs/{first}/cancel")).await.is(200);
        let job = starts(t, &second).await;
        t.ack_with(&job, "w", "failed", json!({"retryable": false})).await.is(200);
        let job = starts(t, &third).await;
        t.act(&format!("/v1/jobs/{second}/retry")).await.is(200);
        t.act(&format!("/v1/jobs/{first}/retry")).await.is(200);
        for next in [&fourth, &second, &first] {
            let (_, summary) = explained(t, next).await;
            assert!(summary.starts_with(&format!("job {third} is ahead")), "{summary}");
        }
        t.ack(&job, "w", "succeeded").await.is(200);
        for next in [&fourth, &second, &first] {
            let job = starts(t, next).await;
            t.ack(&job, "w", "succeeded").await.is(200);
        }
    });
}

#[test]
fn a_delayed_job_holds_up_later_jobs_of_its_group() {
    run(async |t| {
        order(t, "block").await;
        let first = t.enqueue(json!({"group": "a", "delay_seconds": 3600})).await;
        let second = enqueue(t, "a").await;
        assert!(t.poll("w", 10).await.is_empty());
        let (_, summary) = explained(t, &second).await;
        assert!(summary.starts_with(&format!("job {first} is ahead in its group and runs at")));
        let move_it = json!({"queue": "other"});
        t.patch(&format!("/v1/jobs/{second}"), move_it).await.is_error(409, "group_ordered");
        t.patch(&format!("/v1/jobs/{first}"), json!({"delay_seconds": 0})).await.is(200);
        let job = starts(t, &first).await;
        t.ack(&job, "w", "succeeded").await.is(200);
        starts(t, &second).await;
    });
}

#[test]
fn the_order_begins_and_ends_while_jobs_wait_and_run() {
    run(async |t| {
        let mut ids = Vec::new();
        for _ in 0..5 {
            ids.push(enqueue(t, "a").await);
        }
        let running = t.poll("w", 2).await;
        assert_eq!(running.len(), 2, "without an order they run at the same time");
        order(t, "block").await;
        until("the others to be closed", async || t.job(&ids[2]).await["waiting_for"] == "group")
            .await;
        assert!(t.poll("w", 10).await.is_empty(), "running ones end first");
        t.ack(&running[0], "w", "succeeded").await.is(200);
        assert!(t.poll("w", 10).await.is_empty(), "the second runs still");
        t.ack(&running[1], "w", "succeeded").await.is(200);
        let job = starts(t, &ids[2]).await;
        assert!(t.poll("w", 10).await.is_empty());
        t.patch("/v1/queues/default", json!({"groups": null})).await.is(200);
        let mut left = Vec::new();
        while left.len() < 2 {
            let jobs =
                json!({"worker_id": "w", "queues": ["default"], "capacity": 9, "wait_seconds": 5});
            left.extend(t.polled(jobs).await);
        }
        t.ack(&job, "w", "succeeded").await.is(200);
    });
}

#[test]
fn a_parent_is_ahead_of_its_child_whatever_the_order_of_the_request() {
    run(async |t| {
        order(t, "block").await;
        let job = |key: &str| json!({"key": key, "job_type": key, "group": "a"});
        let mut last = job("last");
        last["depends_on"] = json!(["first"]);
        let workflow = json!({"jobs": [last, job("first")]});
        t.post("/v1/workflows", workflow).await.is(201);
        for key in ["first", "last"] {
            let job = t.wait_and_lease("w").await;
            assert_eq!(job["job_type"], key);
            t.ack(&job, "w", "succeeded").await.is(200);
        }
    });
}

#[test]
fn a_parent_in_another_group_changes_no_order() {
    run(async |t| {
        order(t, "block").await;
        let job = |key: &str, group: &str| json!({"key": key, "job_type": key, "group": group});
        let mut second = job("second", "a");
        second["depends_on"] = json!(["elsewhere"]);
        let jobs = [job("first", "a"), second, job("third", "a"), job("elsewhere", "b")];
        t.post("/v1/workflows", json!({"jobs": jobs})).await.is(201);
        let mut of_a = Vec::new();
        for _ in 0..4 {
            let job = t.wait_and_lease("w").await;
            if job["group"] == "a" {
                of_a.push(job["job_type"].clone());
            }
            t.ack(&job, "w", "succeeded").await.is(200);
        }
        assert_eq!(of_a, ["first", "second", "third"]);
    });
}

#[test]
fn a_parent_may_end_while_admission_opens_its_child() {
    run_alone(async |t| {
        order(t, "block").await;
        let job = |key: &str, group: &str| json!({"key": key, "job_type": key, "group": group});
        let mut second = job("second", "a");
        second["depends_on"] = json!(["elsewhere"]);
        let jobs = json!({"jobs": [job("first", "a"), second, job("elsewhere", "b")]});
        t.post("/v1/workflows", jobs).await.is(201);
        let (one, other) = (t.wait_and_lease("w").await, t.wait_and_lease("w").await);
        let parent = if one["group"] == "b" { one } else { other };
        let mut conn = t.database.connect().await;
        let mut opening = conn.begin().await.expect("a transaction");
        sqlx::query(
            "update jobs set waits_for_group = false, unfinished_parents = unfinished_parents - 1
             where job_type = 'second'",
        )
        .execute(&mut *opening)
        .await
        .expect("it is opened");
        let project = t.clone();
        let acking = tokio::spawn(async move { project.ack(&parent, "w", "succeeded").await });
        let waits = "select count(*) from pg_stat_activity
                     where wait_event_type = 'Lock' and datname = current_database()";
        t.database.until_at_least(waits, 1).await;
        opening.commit().await.expect("a commit");
        let acked = acking.await.expect("it does not panic").is(200);
        assert_eq!(acked["children_activated"], 1);
    });
}

#[test]
fn an_order_that_comes_back_lets_nothing_run_beside_what_runs() {
    run(async |t| {
        order(t, "block").await;
        let (first, second) = (enqueue(t, "a").await, enqueue(t, "a").await);
        let running = starts(t, &first).await;
        t.patch("/v1/queues/default", json!({"groups": null})).await.is(200);
        let beside = starts(t, &second).await;
        order(t, "block").await;
        t.ack(&running, "w", "released").await.is(200);
        assert!(t.poll("w", 10).await.is_empty(), "the second runs");
        t.ack(&beside, "w", "succeeded").await.is(200);
        starts(t, &first).await;
    });
}

#[test]
fn a_change_of_the_rules_blocks_no_group_by_earlier_dead_letters() {
    run(async |t| {
        let die = async |id: &str| {
            let job = starts(t, id).await;
            t.ack_with(&job, "w", "failed", json!({"retryable": false})).await.is(200);
        };
        let before = enqueue(t, "a").await;
        die(&before).await;
        order(t, "skip").await;
        let passed = enqueue(t, "a").await;
        die(&passed).await;
        // A field that is left out stays.
        let block = json!({"groups": {"on_dead": "block"}});
        let queue = t.patch("/v1/queues/default", block).await.is(200);
        let is = json!({
            "order": "strict", "on_dead": "block", "max_running": null, "rates": [], "fair": false,
        });
        assert_eq!(queue["groups"], is);
        let next = enqueue(t, "a").await;
        t.act(&format!("/v1/jobs/{passed}/retry")).await.is(200);
        for id in [&next, &passed] {
            let job = starts(t, id).await;
            t.ack(&job, "w", "succeeded").await.is(200);
        }
        // One that has blocked its group until the rules changed, too.
        for between in [json!(null), json!({"on_dead": "skip"})] {
            let blocks = enqueue(t, "a").await;
            die(&blocks).await;
            t.patch("/v1/queues/default", json!({"groups": between})).await.is(200);
            order(t, "block").await;
            let next = enqueue(t, "a").await;
            let job = starts(t, &next).await;
            t.ack(&job, "w", "succeeded").await.is(200);
        }
    });
}

#[test]
fn a_dead_letter_says_that_it_blocks_its_group_and_only_the_named_one_is_moved() {
    run(async |t| {
        order(t, "block").await;
        let ids = [enqueue(t, "a").await, enqueue(t, "a").await, enqueue(t, "a").await];
        let unblock = async |job_id: &str| {
            let body = json!({"head": "skip", "job_id": job_id});
            t.post("/v1/queues/default/groups/a/unblock", body).await
        };
        for id in &ids[..2] {
            let job = starts(t, id).await;
            t.ack_with(&job, "w", "failed", json!({"retryable": false})).await.is(200);
            let (_, summary) = explained(t, id).await;
            assert!(summary.contains("it blocks its group a"), "{summary}");
            unblock(id).await.is(200);
            let (_, summary) = explained(t, id).await;
            assert!(summary.ends_with("retry it manually"), "{summary}");
            unblock(id).await.is_error(409, "group_not_blocked");
        }
        starts(t, &ids[2]).await;
    });
}

#[test]
fn a_purge_empties_groups_and_unblocks_them() {
    run(async |t| {
        order(t, "block").await;
        let (first, second) = (enqueue(t, "a").await, enqueue(t, "a").await);
        let job = starts(t, &first).await;
        t.ack_with(&job, "w", "failed", json!({"retryable": false})).await.is(200);
        t.post("/v1/queues/default/purge", json!({"confirm": "default"})).await.is(202);
        t.job_becomes(&second, "cancelled").await;
        assert_eq!(t.job(&first).await["state"], "dead_letter");
        let next = enqueue(t, "a").await;
        let job = starts(t, &next).await;
        t.ack(&job, "w", "succeeded").await.is(200);
    });
}

#[test]
fn what_keeps_the_head_keeps_its_group() {
    run(async |t| {
        order(t, "block").await;
        let labelled = t.enqueue(json!({"group": "a", "labels": ["gpu"]})).await;
        let paused = t.enqueue(json!({"group": "b", "job_type": "slow"})).await;
        let behind = [enqueue(t, "a").await, enqueue(t, "b").await];
        t.post("/v1/queues/default/pause", json!({"job_type": "slow"})).await.is(200);
        assert!(t.poll("w", 10).await.is_empty(), "no worker has the label, the type is paused");
        for (behind, ahead) in behind.iter().zip([&labelled, &paused]) {
            let (_, summary) = explained(t, behind).await;
            assert!(summary.starts_with(&format!("job {ahead} is ahead")), "{summary}");
        }
        t.post("/v1/queues/default/resume", json!({"job_type": "slow"})).await.is(200);
        starts(t, &paused).await;
        t.act(&format!("/v1/jobs/{labelled}/cancel")).await.is(200);
        starts(t, &behind[0]).await;
    });
}
