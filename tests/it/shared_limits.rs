//! Limits that several queues keep together.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicI64, Ordering},
};

use chrono::{DateTime, TimeDelta, Utc};
use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::harness::{
    LoneProject, TestProject, TestServer, fresh_database, limited, run, run_alone, until,
};

const PATH: &str = "/v1/shared-limits/stripe";

/// Sets the limit, and has these queues keep it.
async fn share(t: &TestProject, limit: Value, queues: &[&str]) {
    let is_by_group = limit["by"] == "group";
    t.put(PATH, limit).await.is(200);
    for queue in queues {
        let mut change = json!({"shared_limits": ["stripe"]});
        if is_by_group {
            change["groups"] = json!({"fair": true});
        }
        let changed = t.patch(&format!("/v1/queues/{queue}"), change).await.is(200);
        assert_eq!(changed["shared_limits"], json!(["stripe"]));
    }
}

async fn store_many(t: &TestProject, queue: &str, group: Option<&str>, count: usize) {
    let job = json!({"job_type": "t", "queue": queue, "group": group});
    t.post("/v1/jobs/batch", json!({"jobs": vec![job; count]})).await.is(201);
}

async fn poll(t: &TestProject, queue: &str, capacity: usize, wait_seconds: u32) -> Vec<Value> {
    let poll = json!({
        "worker_id": "w", "queues": [queue], "capacity": capacity, "wait_seconds": wait_seconds,
    });
    t.polled(poll).await
}

/// Polls queues in turn until these many jobs run.
async fn leased(t: &TestProject, queues: &[&str], count: usize) -> Vec<Value> {
    let mut jobs = Vec::new();
    until(format!("{count} jobs to be leased"), async || {
        for queue in queues {
            jobs.extend(poll(t, queue, 20, 0).await);
        }
        jobs.len() >= count
    })
    .await;
    jobs
}

/// Why the first waiting job of a queue waits.
async fn explained(t: &TestProject, queue: &str) -> Value {
    let waiting = t.get(&format!("/v1/jobs?state=pending&queue={queue}&limit=1")).await.is(200);
    let id = waiting["jobs"][0]["id"].as_str().expect("one waits").to_owned();
    t.get(&format!("/v1/jobs/{id}/explain")).await.is(200)
}

#[test]
fn queues_keep_a_limit_of_running_jobs_together() {
    run(async |t| {
        share(t, json!({"by": "all", "max_running": 3}), &["a", "b"]).await;
        store_many(t, "a", None, 5).await;
        store_many(t, "b", Some("g"), 5).await;
        let jobs = leased(t, &["a", "b"], 3).await;
        assert_eq!(jobs.len(), 3);
        assert!(poll(t, "b", 20, 0).await.is_empty(), "as many run as may");
        let limit = t.get(PATH).await.is(200);
        assert_eq!((&limit["running"], &limit["queues"]), (&json!(3), &json!(["a", "b"])));
        let why = explained(t, "b").await;
        assert_eq!(why["reason"], "concurrency");
        assert_eq!(why["summary"], "shared limit stripe 3/3 busy");
        let (next, _) = tokio::join!(poll(t, "b", 20, 10), t.ack(&jobs[0], "w", "succeeded"));
        assert_eq!(next.len(), 1, "the end in one queue let a job of the other start");
        t.put(PATH, json!({"by": "all", "max_running": 5})).await.is(200);
        assert_eq!(leased(t, &["a", "b"], 2).await.len(), 2);
        let none = t.patch("/v1/queues/b", json!({"shared_limits": null})).await.is(200);
        assert_eq!(none["shared_limits"], json!([]));
        leased(t, &["b"], 1).await;
    });
}

#[test]
fn queues_keep_rates_together_until_they_are_reset() {
    run(async |t| {
        let rates = json!([{"count": 4, "per_seconds": 3600}, {"count": 3, "per_seconds": 2}]);
        share(t, json!({"by": "all", "rates": rates}), &["a", "b"]).await;
        store_many(t, "a", None, 5).await;
        store_many(t, "b", None, 5).await;
        let jobs = leased(t, &["a", "b"], 4).await;
        assert_eq!(jobs.len(), 4, "three at first, one after two seconds");
        let limit = t.get(PATH).await.is(200);
        assert_eq!(limit["started"][0], 4);
        assert!(limit["next_at"].is_string(), "{limit}");
        let why = explained(t, "a").await;
        assert_eq!(
            (&why["reason"], &why["next_change_at"]),
            (&json!("rate_limit"), &limit["next_at"])
        );
        let summary = why["summary"].as_str().expect("a summary");
        assert!(summary.starts_with("shared limit stripe has used its rate until"), "{summary}");
        assert!(poll(t, "a", 20, 0).await.is_empty());
        let reset = t.act(&format!("{PATH}/reset")).await.is(200);
        assert_eq!((&reset["started"], &reset["next_at"]), (&json!([0, 0]), &Value::Null));
        assert_eq!(leased(t, &["a", "b"], 3).await.len(), 3);
    });
}

#[test]
fn each_group_has_a_limit_in_all_queues_together() {
    run(async |t| {
        share(t, json!({"by": "group", "max_running": 1}), &["a", "b"]).await;
        for queue in ["a", "b"] {
            store_many(t, queue, Some("g"), 3).await;
            store_many(t, queue, Some("h"), 1).await;
            store_many(t, queue, None, 2).await;
        }
        let jobs = leased(t, &["a", "b"], 6).await;
        let of = |group: Value| jobs.iter().filter(|it| it["group"] == group).count();
        assert_eq!([of(json!("g")), of(json!("h")), of(Value::Null)], [1, 1, 4]);
        let of_g = jobs.iter().find(|it| it["group"] == "g").expect("one of g");
        let other = if of_g["queue"] == "a" { "b" } else { "a" };
        assert!(poll(t, other, 20, 0).await.is_empty());
        let why = explained(t, other).await;
        assert_eq!(why["reason"], "concurrency");
        // Sooner than it would be looked at without a note.
        let (next, _) = tokio::join!(poll(t, other, 20, 3), t.ack(of_g, "w", "succeeded"));
        assert_eq!(next.len(), 1);
        assert_eq!((&next[0]["group"], &next[0]["queue"]), (&json!("g"), &json!(other)));
        // One of its own, until it is reset.
        let own = t.put(&format!("{PATH}/groups/g"), json!({"max_running": 3})).await.is(200);
        let rules = json!({"max_running": 3, "rates": null, "expires_at": null});
        assert_eq!((&own["rules"], &own["running"]), (&rules, &json!(1)));
        assert_eq!(leased(t, &["a", "b"], 2).await.len(), 2);
        assert_eq!(t.get(&format!("{PATH}/groups/g")).await.is(200)["running"], 3);
        assert_eq!(t.get(&format!("{PATH}/groups/none")).await.is(200)["running"], 0);
        let page = t.get(&format!("{PATH}/groups")).await.is(200);
        let groups = page["groups"].as_array().expect("groups");
        let names: Vec<_> = groups.iter().map(|it| it["group"].clone()).collect();
        assert_eq!(names, ["g", "h"]);
        let reset = t.act(&format!("{PATH}/groups/g/reset")).await.is(200);
        assert_eq!((&reset["rules"], &reset["running"]), (&Value::Null, &json!(3)));
        assert!(poll(t, "a", 20, 0).await.is_empty());
    });
}

#[test]
fn each_group_has_rates_in_all_queues_together() {
    run(async |t| {
        let rates = json!([{"count": 2, "per_seconds": 3600}]);
        share(t, json!({"by": "group", "rates": rates}), &["a", "b"]).await;
        for queue in ["a", "b"] {
            store_many(t, queue, Some("g"), 5).await;
            store_many(t, queue, Some("h"), 5).await;
        }
        let jobs = leased(t, &["a", "b"], 4).await;
        let of = |group: &str| jobs.iter().filter(|it| it["group"] == group).count();
        assert_eq!([of("g"), of("h")], [2, 2]);
        assert!(poll(t, "a", 20, 0).await.is_empty() && poll(t, "b", 20, 0).await.is_empty());
        let page = t.get(&format!("{PATH}/groups")).await.is(200);
        assert_eq!(page["groups"][0]["started"], json!([2]));
        assert!(page["groups"][0]["next_at"].is_string(), "{page}");
        t.act(&format!("{PATH}/groups/h/reset")).await.is(200);
        let next = leased(t, &["a", "b"], 2).await;
        assert!(next.iter().all(|it| it["group"] == "h"), "{next:?}");
    });
}

#[test]
fn a_rate_limit_that_a_worker_meets_pauses_what_shares_the_limit() {
    run(async |t| {
        let none = json!({"scope": "shared_limit:stripe", "retry_after_seconds": 3600});
        t.enqueue(json!({"queue": "alone"})).await;
        let job = leased(t, &["alone"], 1).await.remove(0);
        t.ack_with(&job, "w", "rate_limited", none.clone()).await.is(200);
        let other = t.enqueue(json!({"queue": "alone"})).await;
        let why = t.get(&format!("/v1/jobs/{other}/explain")).await.is(200);
        let summary = why["summary"].as_str().expect("a summary");
        assert!(summary.starts_with("a worker of queue alone has met a rate limit"), "{summary}");

        share(t, json!({"by": "all", "max_running": 10}), &["a", "b"]).await;
        store_many(t, "a", Some("g"), 3).await;
        store_many(t, "b", None, 3).await;
        let job = poll(t, "a", 1, 10).await.remove(0);
        for wrong in ["", "job", "shared_limit:", "Group"] {
            let more = json!({"scope": wrong});
            t.ack_with(&job, "w", "rate_limited", more).await.refuses("scope");
        }
        t.ack_with(&job, "w", "rate_limited", none.clone()).await.is(200);
        assert!(poll(t, "b", 20, 0).await.is_empty(), "the other queue rests as well");
        let why = explained(t, "b").await;
        assert_eq!(why["reason"], "rate_limit");
        let summary = why["summary"].as_str().expect("a summary");
        assert!(summary.starts_with("shared limit stripe is paused until"), "{summary}");
        let limit = t.get(PATH).await.is(200);
        assert!(limit["paused_until"].is_string(), "{limit}");
        assert_eq!(limit["next_at"], limit["paused_until"]);
        t.act(&format!("{PATH}/reset")).await.is(200);
        leased(t, &["b"], 3).await;

        t.put("/v1/shared-limits/per", json!({"by": "group", "max_running": 9})).await.is(200);
        for queue in ["c", "d"] {
            let change = json!({"groups": {"fair": true}, "shared_limits": ["per"]});
            t.patch(&format!("/v1/queues/{queue}"), change).await.is(200);
            store_many(t, queue, Some("g"), 2).await;
            store_many(t, queue, Some("h"), 2).await;
        }
        let job = leased(t, &["c"], 4).await.into_iter().find(|it| it["group"] == "g");
        let per = json!({"scope": "shared_limit:per", "retry_after_seconds": 3600});
        t.ack_with(&job.expect("one of g"), "w", "rate_limited", per).await.is(200);
        let next = leased(t, &["d"], 2).await;
        assert!(next.iter().all(|it| it["group"] == "h"), "{next:?}");
        let page = t.get("/v1/shared-limits/per/groups").await.is(200);
        assert!(page["groups"][0]["paused_until"].is_string(), "{page}");
        t.act("/v1/shared-limits/per/groups/g/reset").await.is(200);
        assert_eq!(leased(t, &["d"], 2).await.len(), 2);
    });
}

#[test]
fn bad_limits_and_names_are_refused_by_name() {
    run(async |t| {
        for (wrong, field) in [
            (json!({}), "body"),
            (json!({"by": "all"}), "body"),
            (json!({"by": "queue", "max_running": 1}), "by"),
            (json!({"by": "all", "max_running": 0}), "max_running"),
            (json!({"by": "all", "max_running": 100_001}), "max_running"),
            (json!({"by": "all", "rates": [{"count": 0, "per_seconds": 1}]}), "rates[0].count"),
            (json!({"by": "all", "max_running": 1, "name": "x"}), "name"),
        ] {
            t.put(PATH, wrong).await.refuses(field);
        }
        let five = vec![json!({"count": 1, "per_seconds": 1}); 5];
        t.put(PATH, json!({"by": "all", "rates": five})).await.refuses("rates");
        let odd = format!("/v1/shared-limits/{}", "x".repeat(201));
        t.put(&odd, json!({"by": "all", "max_running": 1})).await.refuses("shared_limit");
        t.get(PATH).await.is_error(404, "shared_limit_not_found");
        t.delete(PATH).await.is_error(404, "shared_limit_not_found");
        t.act(&format!("{PATH}/reset")).await.is_error(404, "shared_limit_not_found");

        t.put(PATH, json!({"by": "group", "max_running": 1})).await.is(200);
        t.put(PATH, json!({"by": "all", "max_running": 1})).await.refuses("by");
        assert_eq!(t.put(PATH, json!({"max_running": 1})).await.is(200)["by"], "group");
        t.act(&format!("{PATH}/reset")).await.refuses("shared_limit");
        let name = |names: Value| json!({"shared_limits": names});
        t.patch("/v1/queues/a", name(json!(["other"]))).await.refuses("shared_limits");
        let message =
            t.patch("/v1/queues/a", name(json!(["stripe"]))).await.refuses("shared_limits");
        assert!(message.contains("`groups.fair` must be true"), "{message}");
        let four = name(json!(["b", "c", "d", "e"]));
        t.patch("/v1/queues/a", four).await.refuses("shared_limits");
        t.patch("/v1/queues/a", name(json!(["stripe", "stripe"])))
            .await
            .refuses("shared_limits[1]");
        let fair = json!({"groups": {"fair": true}, "shared_limits": ["stripe"]});
        t.patch("/v1/queues/a", fair).await.is(200);
        let unfair = json!({"groups": {"fair": false}});
        t.patch("/v1/queues/a", unfair).await.refuses("shared_limits");
        let strict = json!({"groups": {"order": "strict"}});
        t.patch("/v1/queues/a", strict).await.refuses("shared_limits");
        assert_eq!(t.get("/v1/queues/a").await.is(200)["groups"]["fair"], true);
        t.delete(PATH).await.is_error(409, "shared_limit_in_use");

        let own = format!("{PATH}/groups/g");
        for (wrong, field) in [
            (json!({}), "body"),
            (json!({"max_running": 0}), "max_running"),
            (json!({"max_running": 1, "expires_at": "2020-01-01T00:00:00Z"}), "expires_at"),
            (json!({"max_running": 1, "expires_at": "soon"}), "expires_at"),
        ] {
            t.put(&own, wrong).await.refuses(field);
        }
        t.patch("/v1/queues/a", json!({"shared_limits": []})).await.is(200);
        t.put(&own, json!({"max_running": 1})).await.is(200);
        t.delete(PATH).await.is_empty(204);
        t.put(PATH, json!({"by": "all", "max_running": 1})).await.is(200);
        t.put(&own, json!({"max_running": 1})).await.refuses("shared_limit");
        t.get(&format!("{PATH}/groups")).await.refuses("shared_limit");
        let listed = t.get("/v1/shared-limits?limit=1").await.is(200);
        assert_eq!(listed["shared_limits"][0]["name"], "stripe");
    });
}

#[test]
fn a_limit_is_named_by_a_number_of_queues_at_most_and_is_of_one_project() {
    run_alone(async |t| {
        t.put(PATH, json!({"by": "all", "max_running": 1})).await.is(200);
        for number in 0..20 {
            let path = format!("/v1/queues/q{number}");
            t.patch(&path, json!({"shared_limits": ["stripe"]})).await.is(200);
        }
        let more = t.patch("/v1/queues/more", json!({"shared_limits": ["stripe"]})).await;
        let message = more.refuses("shared_limits");
        assert!(message.contains("20 queues"), "{message}");
        t.get("/v1/queues/more").await.is_error(404, "queue_not_found");
        let other = LoneProject::at(&t.url, &t.database, "other").await;
        other.get(PATH).await.is_error(404, "shared_limit_not_found");
        let foreign = json!({"shared_limits": ["stripe"]});
        other.patch("/v1/queues/q", foreign).await.refuses("shared_limits");
    });
}

#[test]
fn the_end_of_a_job_lets_the_next_of_its_group_start_where_one_queue_has_the_limit() {
    run(async |t| {
        share(t, json!({"by": "group", "max_running": 1}), &["a"]).await;
        store_many(t, "a", Some("g"), 4).await;
        let mut job = leased(t, &["a"], 1).await.remove(0);
        for _ in 0..3 {
            assert!(poll(t, "a", 20, 0).await.is_empty(), "one runs");
            let (mut next, _) = tokio::join!(poll(t, "a", 20, 3), t.ack(&job, "w", "succeeded"));
            assert_eq!(next.len(), 1);
            job = next.remove(0);
        }
    });
}

#[test]
fn a_group_that_waits_for_room_comes_back_when_a_pause_or_its_own_numbers_end() {
    run(async |t| {
        share(t, json!({"by": "group", "max_running": 1}), &["a", "b"]).await;
        store_many(t, "a", Some("g"), 2).await;
        store_many(t, "b", Some("g"), 2).await;
        let job = leased(t, &["a"], 1).await.remove(0);
        assert!(poll(t, "b", 20, 0).await.is_empty(), "one runs");
        let paused = json!({"scope": "shared_limit:stripe", "retry_after_seconds": 1});
        t.ack_with(&job, "w", "rate_limited", paused).await.is(200);
        let next = poll(t, "b", 20, 4).await;
        assert_eq!(next.len(), 1, "sooner than groups without room are looked at again");
        t.ack(&next[0], "w", "succeeded").await.is(200);
        leased(t, &["a", "b"], 1).await;

        let stored = t.enqueue(json!({"queue": "b", "group": "h"})).await;
        store_many(t, "b", Some("h"), 2).await;
        t.put(PATH, json!({"by": "group", "max_running": 9})).await.is(200);
        let now = t.job(&stored).await["created_at"].as_str().expect("a time").to_owned();
        let now: DateTime<Utc> = now.parse().expect("a time");
        let own = json!({"max_running": 1, "expires_at": now + TimeDelta::seconds(3)});
        t.put(&format!("{PATH}/groups/h"), own).await.is(200);
        let of_h = async |wait_seconds| {
            let jobs = poll(t, "b", 20, wait_seconds).await;
            jobs.iter().filter(|it| it["group"] == "h").count()
        };
        until("a job of the other group", async || of_h(1).await == 1).await;
        until("the others, when its numbers have ended", async || of_h(4).await == 2).await;
    });
}

#[test]
fn several_limits_of_a_queue_hold_beside_its_own_and_short_windows_show() {
    run(async |t| {
        let each = json!({"by": "group", "rates": [{"count": 2, "per_seconds": 50}]});
        t.put("/v1/shared-limits/each", each).await.is(200);
        t.put(PATH, json!({"by": "all", "max_running": 5})).await.is(200);
        let named = json!({
            "groups": {"fair": true, "max_running": 3}, "shared_limits": ["stripe", "each"],
        });
        t.patch("/v1/queues/a", named).await.is(200);
        for group in ["g", "h", "i"] {
            store_many(t, "a", Some(group), 4).await;
        }
        let jobs = leased(t, &["a"], 5).await;
        assert_eq!(jobs.len(), 5, "as many as may run of all");
        for job in &jobs {
            t.ack(job, "w", "succeeded").await.is(200);
        }
        assert_eq!(leased(t, &["a"], 1).await.len(), 1, "each group has started two");
        assert!(poll(t, "a", 20, 0).await.is_empty());
        let page = t.get("/v1/shared-limits/each/groups").await.is(200);
        let started: Vec<_> =
            page["groups"].as_array().expect("groups").iter().map(|it| &it["started"]).collect();
        assert_eq!(started, [&json!([2]), &json!([2]), &json!([2])]);
        let why = explained(t, "a").await;
        let summary = why["summary"].as_str().expect("a summary");
        assert!(summary.contains("under shared limit each has used its rate until"), "{summary}");
        // Numbers of its own, and what has ended counts again.
        let own = "/v1/shared-limits/each/groups/g";
        t.put(own, json!({"rates": []})).await.is(200);
        let more = leased(t, &["a"], 2).await;
        assert!(more.iter().all(|it| it["group"] == "g"), "{more:?}");
        t.put(own, json!({"max_running": 9})).await.is(200);
        let page = t.get("/v1/shared-limits/each/groups").await.is(200);
        assert_eq!(page["groups"][0]["started"], json!([4]));
    });
}

#[test]
fn those_who_change_a_limit_and_who_name_it_at_the_same_time_do_not_meet() {
    run(async |t| {
        let name = async |number: usize, names: Value| {
            let change = json!({"groups": {"fair": true}, "shared_limits": names});
            t.patch(&format!("/v1/queues/q{number}"), change).await
        };
        for round in 1..=8 {
            t.put(PATH, json!({"by": "group", "max_running": round})).await.is(200);
            name(0, json!(["stripe"])).await.is(200);
            let (named, put) = tokio::join!(
                name(1, json!(["stripe"])),
                t.put(PATH, json!({"by": "group", "max_running": 50 + round})),
            );
            named.is(200);
            put.is(200);
            name(0, json!([])).await.is(200);
            name(1, json!([])).await.is(200);
            // Either it is named and stays, or it is gone and cannot be named.
            let (named, deleted) = tokio::join!(name(1, json!(["stripe"])), t.delete(PATH));
            match deleted.status.as_u16() {
                204 => _ = named.refuses("shared_limits"),
                _ => {
                    deleted.is_error(409, "shared_limit_in_use");
                    named.is(200);
                    name(1, json!([])).await.is(200);
                    t.delete(PATH).await.is_empty(204);
                }
            }
        }
        t.put(PATH, json!({"by": "group", "max_running": 1})).await.is(200);
        let names = (0..24).map(|number| name(number, json!(["stripe"])));
        let replies = join_all(names).await;
        let named = replies.iter().filter(|it| it.status == 200).count();
        assert_eq!(named, 20, "as many as may");
    });
}

/// How many jobs run now, and the most at any time.
#[derive(Default)]
struct Running {
    now: AtomicI64,
    most: Mutex<i64>,
    /// The queues of the first jobs.
    first: Mutex<Vec<&'static str>>,
}

/// Jobs whose queues are remembered, while all queues have more.
const FIRST_JOBS: usize = 150;

impl Running {
    fn starts(&self, queue: &'static str, jobs: usize) {
        let mut first = self.first.lock().expect("no panic");
        first.extend(std::iter::repeat_n(queue, jobs));
        first.truncate(FIRST_JOBS);
        let now = self.now.fetch_add(jobs as i64, Ordering::SeqCst) + jobs as i64;
        let mut most = self.most.lock().expect("no panic");
        *most = now.max(*most);
    }
}

async fn work(t: TestProject, queue: &'static str, running: Arc<Running>, done: Arc<AtomicI64>) {
    while done.load(Ordering::SeqCst) > 0 {
        let jobs = poll(&t, queue, 3, 1).await;
        running.starts(queue, jobs.len());
        for job in jobs {
            running.now.fetch_sub(1, Ordering::SeqCst);
            t.ack(&job, "w", "succeeded").await.is(200);
            done.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[test]
fn no_more_jobs_run_than_may_on_two_nodes_and_no_queue_is_left_behind() {
    limited(async {
        let database = fresh_database().await;
        let (one, two) =
            (TestServer::start(database.clone()).await, TestServer::start(database).await);
        let t = one.project("shared").await;
        share(&t, json!({"by": "all", "max_running": 4}), &["a", "b", "c"]).await;
        for queue in ["a", "b", "c"] {
            store_many(&t, queue, None, 100).await;
        }
        let (running, left) = (Arc::new(Running::default()), Arc::new(AtomicI64::new(300)));
        let mut workers = JoinSet::new();
        for queue in ["a", "b", "c"] {
            for node in [&one, &two] {
                let through = t.project.through(&node.url);
                workers.spawn(work(through, queue, Arc::clone(&running), Arc::clone(&left)));
            }
        }
        while let Some(ended) = workers.join_next().await {
            ended.expect("no panic");
        }
        let most = *running.most.lock().expect("no panic");
        assert!((2..=4).contains(&most), "{most} ran at the same time");
        let first = std::mem::take(&mut *running.first.lock().expect("no panic"));
        for queue in ["a", "b", "c"] {
            let of_queue = first.iter().filter(|it| **it == queue).count();
            assert!(of_queue >= 5, "{queue} started {of_queue} of the first {}", first.len());
        }
        assert_eq!(running.now.load(Ordering::SeqCst), 0);
        two.stop().await;
        one.stop().await;
    });
}
