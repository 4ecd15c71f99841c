//! Parents, children, workflows.

use crate::harness::{TestProject, run, run_alone, until};
use serde_json::{Value, json};

async fn fail_for_good(t: &TestProject, job: &Value) {
    let more = json!({"retryable": false});
    assert_eq!(t.ack_with(job, "w", "failed", more).await.is(200), json!({"action": "done"}));
}

async fn act(t: &TestProject, id: &str, what: &str) -> Value {
    t.post(&format!("/v1/jobs/{id}/{what}"), json!({})).await.is(200)
}

#[test]
fn an_enqueue_says_what_a_child_waits_for_whose_parents_have_ended() {
    run(async |t| {
        let parent = t.enqueue(json!({})).await;
        let child = json!({"job_type": "t", "depends_on": [parent], "delay_seconds": 3600});
        let made = t.post("/v1/jobs", child.clone()).await.is(201);
        assert_eq!(made["waiting_for"], "parents");
        let job = t.lease("w").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        let made = t.post("/v1/jobs", child).await.is(201);
        assert_eq!(made["waiting_for"], "run_at");
        let read = t.job(made["id"].as_str().expect("an id")).await;
        assert_eq!(read["waiting_for"], "run_at");
    });
}

#[test]
fn a_child_runs_when_all_its_parents_have_succeeded_and_gets_their_results() {
    run(async |t| {
        let (one, two) = (t.enqueue(json!({})).await, t.enqueue(json!({})).await);
        let child = t.enqueue(json!({"depends_on": [two, one], "job_type": "child"})).await;
        let read = t.job(&child).await;
        assert_eq!(
            (&read["state"], &read["waiting_for"]),
            (&json!("scheduled"), &json!("parents"))
        );
        assert_eq!(read["parents"], json!([two, one]));
        let (first, second) = (t.lease("w").await, t.lease("w").await);
        assert!(t.poll("w", 1).await.is_empty());
        let waiting = {
            let t = t.clone();
            tokio::spawn(async move { t.wait_and_lease("w").await })
        };
        let ack = t.ack_with(&first, "w", "succeeded", json!({"result": {"n": 1}})).await.is(200);
        assert_eq!(ack, json!({"action": "done", "children_activated": 0}));
        for _ in 0..2 {
            let ack = t.ack(&second, "w", "succeeded").await.is(200);
            assert_eq!(ack, json!({"action": "done", "children_activated": 1}));
        }
        let job = waiting.await.expect("an answer");
        assert_eq!(job["id"], child);
        assert_eq!(
            job["parent_results"],
            json!([
                {"job_id": two, "key": null, "job_type": "test", "state": "succeeded",
                 "result": null, "error": null, "omitted": false},
                {"job_id": one, "key": null, "job_type": "test", "state": "succeeded",
                 "result": {"n": 1}, "error": null, "omitted": false},
            ])
        );
        let late = t.enqueue(json!({"parent_job_id": one})).await;
        assert_eq!(t.job(&late).await["state"], "pending", "its parent has succeeded already");
        let alone = t.lease("w").await;
        assert_eq!(t.ack(&alone, "w", "succeeded").await.is(200), json!({"action": "done"}));
    });
}

#[test]
fn a_dead_letter_cancels_all_descendants_and_its_retry_retries_them() {
    run(async |t| {
        let root = t.enqueue(json!({"priority": 9})).await;
        let child = t.enqueue(json!({"parent_job_id": root})).await;
        let grandchild = t.enqueue(json!({"depends_on": [child, root]})).await;
        let other = t.enqueue(json!({"delay_seconds": 3600})).await;
        let both = t.enqueue(json!({"depends_on": [root, other]})).await;
        let job = t.lease("w").await;
        fail_for_good(t, &job).await;
        for id in [&child, &grandchild, &both] {
            t.job_becomes(id, "cancelled").await;
        }
        let terminal = json!({"job_type": "t", "parent_job_id": root});
        let error = t.post("/v1/jobs", terminal).await.is_error(409, "parent_terminal");
        assert_eq!(error["details"][0]["field"], "parent_job_id");
        let reply = t.post(&format!("/v1/jobs/{child}/retry"), json!({})).await;
        reply.is_error(409, "parent_terminal");
        act(t, &other, "cancel").await;
        assert_eq!(act(t, &root, "retry").await["state"], "pending");
        for id in [&child, &grandchild] {
            assert_eq!(t.job(id).await["state"], "scheduled", "it came back with its parent");
        }
        assert_eq!(t.job(&both).await["state"], "cancelled", "another parent was cancelled");
        act(t, &other, "retry").await;
        assert_eq!(t.job(&both).await["state"], "scheduled");
        for expected in [&root, &child, &grandchild] {
            let job = t.wait_and_lease("w").await;
            assert_eq!(job["id"], **expected);
            t.ack(&job, "w", "succeeded").await.is(200);
        }
    });
}

#[test]
fn parents_must_exist_and_be_named_well() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        let with = async |more: Value| {
            let mut job = json!({"job_type": "t"});
            job.as_object_mut().expect("an object").extend(more.as_object().expect("it").clone());
            t.post("/v1/jobs", job).await
        };
        let missing = "job_01m7w3ha3aextt8pkwwdmxsmqw";
        with(json!({"parent_job_id": missing})).await.refuses("parent_job_id");
        with(json!({"depends_on": [id, id]})).await.refuses("depends_on[1]");
        with(json!({"depends_on": ["x"]})).await.refuses("depends_on[0]");
        with(json!({"depends_on": vec![missing; 101]})).await.refuses("depends_on");
        with(json!({"depends_on": [], "parent_job_id": id})).await.refuses("parent_job_id");
        with(json!({"key": "a"})).await.refuses("key");
        let batch =
            json!({"jobs": [{"job_type": "t"}, {"job_type": "t", "depends_on": [missing]}]});
        t.post("/v1/jobs/batch", batch).await.refuses("jobs[1].depends_on[0]");
        assert_eq!(t.database.number("select count(*) from jobs").await, 1);
    });
}

#[test]
fn a_child_stored_while_its_parent_ends_is_not_lost() {
    run(async |t| {
        for round in 0..20 {
            let parent = t.enqueue(json!({})).await;
            let job = t.lease("w").await;
            let (child, ()) = tokio::join!(t.enqueue(json!({"parent_job_id": parent})), async {
                drop(t.ack(&job, "w", "succeeded").await.is(200));
            });
            let job = t.wait_and_lease("w").await;
            assert_eq!(job["id"], child, "round {round}");
            t.ack(&job, "w", "succeeded").await.is(200);
        }
    });
}

#[test]
fn a_workflow_runs_along_its_graph() {
    run(async |t| {
        let body = json!({"name": "nightly", "jobs": [
            {"key": "end", "job_type": "e", "depends_on": ["left", "right"]},
            {"key": "left", "job_type": "l", "depends_on": ["start"]},
            {"key": "right", "job_type": "r", "depends_on": ["start"]},
            {"key": "start", "job_type": "s", "payload": {"day": 1}},
        ]});
        let reply = t.post("/v1/workflows", body).await;
        let workflow = reply.is(201);
        let path = reply.headers["location"].to_str().expect("text").to_owned();
        assert_eq!(workflow["state"], "running");
        assert_eq!(workflow["jobs"][0]["depends_on"], json!(["left", "right"]));
        assert_eq!(workflow["jobs"][3]["state"], "pending");
        for (round, keys) in [(1, vec!["s"]), (2, vec!["l", "r"]), (3, vec!["e"])] {
            let jobs = t.poll("w", 10).await;
            let mut types: Vec<_> = jobs.iter().map(|it| it["job_type"].clone()).collect();
            types.sort_by_key(ToString::to_string);
            assert_eq!(types, keys, "round {round}");
            for job in &jobs {
                assert_eq!(
                    t.job(job["id"].as_str().expect("an id")).await["workflow_id"],
                    workflow["id"]
                );
                let result = json!({"result": job["job_type"]});
                t.ack_with(job, "w", "succeeded", result).await.is(200);
                if round == 3 {
                    let results = job["parent_results"].as_array().expect("results");
                    let keys: Vec<_> = results.iter().map(|it| it["key"].clone()).collect();
                    assert_eq!(keys, ["left", "right"]);
                    assert_eq!(results[1]["result"], "r");
                }
            }
        }
        assert_eq!(t.get(&path).await.is(200)["state"], "succeeded");
    });
}

#[test]
fn a_workflow_that_fails_or_is_cancelled_leaves_nothing_to_run() {
    run(async |t| {
        let chain = json!({"jobs": [
            {"key": "a", "job_type": "t"},
            {"key": "b", "job_type": "t", "depends_on": ["a"]},
            {"key": "c", "job_type": "t", "depends_on": ["b"]},
        ]});
        let failed = t.post("/v1/workflows", chain.clone()).await.is(201);
        let path = format!("/v1/workflows/{}", failed["id"].as_str().expect("an id"));
        let job = t.lease("w").await;
        fail_for_good(t, &job).await;
        t.job_becomes(failed["jobs"][2]["id"].as_str().expect("an id"), "cancelled").await;
        assert_eq!(t.get(&path).await.is(200)["state"], "failed");

        let cancelled = t.post("/v1/workflows", chain).await.is(201);
        let path = format!("/v1/workflows/{}", cancelled["id"].as_str().expect("an id"));
        let job = t.lease("w").await;
        let reply = t.post(&format!("{path}/cancel"), json!({})).await.is(200);
        assert_eq!(reply["state"], "running", "its first job's worker must be reported");
        t.ack(&job, "w", "released").await.is(200);
        assert_eq!(t.get(&path).await.is(200)["state"], "cancelled");
        assert!(t.poll("w", 10).await.is_empty());
        let missing = "/v1/workflows/wf_01m7w3ha3aextt8pkwwdmxsmqw";
        t.get(missing).await.is_error(404, "workflow_not_found");
        t.post(&format!("{missing}/cancel"), json!({})).await.is_error(404, "workflow_not_found");
    });
}

#[test]
fn a_graph_that_cannot_run_is_refused_with_the_field_that_is_wrong() {
    run_alone(async |t| {
        let post = async |jobs: Value| t.post("/v1/workflows", json!({"jobs": jobs})).await;
        let job = |key: &str, on: Value| json!({"key": key, "job_type": "t", "depends_on": on});
        let circle = json!([job("a", json!(["b"])), job("b", json!(["a"]))]);
        let message = post(circle).await.refuses("jobs[0].depends_on");
        assert_eq!(message, "waits for itself: a → b → a");
        post(json!([job("a", json!(["x"]))])).await.refuses("jobs[0].depends_on[0]");
        post(json!([job("a", json!([])), job("a", json!([]))])).await.refuses("jobs[1].key");
        post(json!([])).await.refuses("jobs");
        let many: Vec<_> = (0..501).map(|it| job(&it.to_string(), json!([]))).collect();
        post(json!(many)).await.refuses("jobs");
        post(json!([{"key": "a"}])).await.refuses("jobs[0].job_type");
        post(json!([{"job_type": "t"}])).await.refuses("jobs[0].key");
        post(json!([{"key": "a", "job_type": "t", "unique": {"key": "u"}}]))
            .await
            .refuses("jobs[0].unique");
        post(json!([{"key": "a", "job_type": "t", "priority": 500}]))
            .await
            .refuses("jobs[0].priority");
        assert_eq!(t.database.number("select count(*) from jobs").await, 0);
    });
}

#[test]
fn a_child_that_is_stored_while_its_parents_ack_waits_for_the_lock_is_let_go() {
    run_alone(async |t| {
        let parent = t.enqueue(json!({"job_type": "parent"})).await;
        let child = t.enqueue(json!({"delay_seconds": 3600})).await;
        let other = t.enqueue(json!({"job_type": "other"})).await;
        let leased = t.poll("w", 2).await;
        let succeeds = |job: &Value| json!({"job_id": job["id"], "attempt": job["attempt"], "worker_id": "w", "status": "succeeded"});
        let mut storing = t.database.connect().await;
        for sql in ["begin", "select from jobs where job_type = 'parent' for update"] {
            sqlx::query(sql).execute(&mut storing).await.expect("it runs");
        }
        let acking = {
            let acks: Vec<_> = leased.iter().map(succeeds).collect();
            let (t, acks) = (t.clone(), json!({"acks": acks}));
            tokio::spawn(async move { t.post("/v1/workers/ack/batch", acks).await.is(200) })
        };
        // Both are tried in one transaction, which also reads why the parent was left alone.
        t.job_becomes(&other, "succeeded").await;
        // What storing a child does, once it has the parent's lock.
        for sql in [
            "update jobs set children = 1 where state = 'processing'",
            "update jobs set unfinished_parents = 1, run_at = now() where state = 'scheduled'",
            "insert into job_edges (project_id, parent_id, child_id, ordinal)
             select parent.project_id, parent.id, child.id, 0
             from jobs parent, jobs child
             where parent.state = 'processing' and child.state = 'scheduled'",
            "commit",
        ] {
            sqlx::query(sql).execute(&mut storing).await.expect("it runs");
        }
        let reply = acking.await.expect("an answer");
        let of_parent = leased.iter().position(|it| it["id"] == parent).expect("the parent");
        let activated = &reply["results"][of_parent]["children_activated"];
        assert_eq!(*activated, json!(1), "{reply}");
        assert_eq!(t.job(&parent).await["state"], "succeeded");
        assert_eq!(t.lease("w").await["id"], child);
    });
}

#[test]
fn a_child_does_not_run_while_a_deleted_parent_never_succeeded() {
    run(async |t| {
        let job = json!({"max_attempts": 1});
        let (first, second) = (t.enqueue(job.clone()).await, t.enqueue(job).await);
        let child = t.enqueue(json!({"depends_on": [first, second]})).await;
        for leased in t.poll("w", 2).await {
            t.ack(&leased, "w", "failed").await.is(200);
        }
        t.job_becomes(&child, "cancelled").await;
        t.delete(&format!("/v1/dead-letters/{second}")).await.is_empty(204);
        act(t, &first, "retry").await;
        let leased = t.wait_and_lease("w").await;
        assert_eq!(leased["id"], first);
        t.ack(&leased, "w", "succeeded").await.is(200);
        assert_eq!(t.job(&child).await["state"], "cancelled", "its second parent failed");
        let reply = t.post(&format!("/v1/jobs/{child}/retry"), json!({})).await;
        reply.is_error(409, "parent_terminal");
        assert!(t.poll("w", 1).await.is_empty());
    });
}

#[test]
fn workflows_are_listed_newest_first_with_how_far_they_are() {
    run(async |t| {
        let two = json!([{"key": "a", "job_type": "t"}, {"key": "b", "job_type": "t", "depends_on": ["a"]}]);
        for name in ["first", "second", "third"] {
            t.post("/v1/workflows", json!({"name": name, "jobs": two})).await.is(201);
        }
        let job = t.lease("w").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        let page = t.get("/v1/workflows?limit=2").await.is(200);
        let names: Vec<_> = page["workflows"].as_array().expect("a list").iter().collect();
        assert_eq!((&names[0]["name"], &names[1]["name"]), (&json!("third"), &json!("second")));
        assert_eq!(page["has_more"], json!(true));
        let cursor = page["next_cursor"].as_str().expect("a cursor");
        let last = t.get(&format!("/v1/workflows?limit=2&cursor={cursor}")).await.is(200);
        assert_eq!((&last["has_more"], &last["next_cursor"]), (&json!(false), &json!(null)));
        let first = &last["workflows"][0];
        assert_eq!((&first["name"], &first["state"]), (&json!("first"), &json!("running")));
        assert_eq!((&first["total_jobs"], &first["succeeded_jobs"]), (&json!(2), &json!(1)));
        t.get("/v1/workflows?limit=51").await.refuses("limit");
        t.get("/v1/workflows?cursor=junk").await.refuses("cursor");
    });
}

/// Stores jobs that wait for others, each for one.
async fn children_of(t: &TestProject, parents: &[String], more: Value) -> Vec<String> {
    let mut ids = Vec::new();
    for some in parents.chunks(500) {
        let job = |parent: &String| {
            let mut job = json!({"job_type": "child", "depends_on": [parent]});
            let more = more.as_object().expect("an object").clone();
            job.as_object_mut().expect("an object").extend(more);
            job
        };
        let jobs: Vec<_> = some.iter().map(job).collect();
        let stored = t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        let jobs = stored["jobs"].as_array().expect("jobs");
        ids.extend(jobs.iter().map(|it| it["id"].as_str().expect("an id").to_owned()));
    }
    ids
}

#[test]
fn a_large_family_is_retried_step_by_step() {
    const CHILDREN: usize = 700;
    run_alone(async |t| {
        let root = t.enqueue(json!({"max_attempts": 1})).await;
        let children = children_of(t, &vec![root.clone(); CHILDREN], json!({})).await;
        children_of(t, &children, json!({"queue": "grandchildren"})).await;
        let taken = json!({"unique": {"key": "taken"}, "depends_on": [root]});
        let taken = t.enqueue(taken).await;
        let count = async |condition: &str| {
            t.database.number(&format!("select count(*) from {condition}")).await as usize
        };
        let until = async |condition: &str, number: usize| {
            until(format!("{number} jobs {condition}"), async || count(condition).await == number)
                .await;
        };
        let job = t.lease("w").await;
        t.ack(&job, "w", "failed").await.is(200);
        until("finished_jobs where state = 'cancelled'", 2 * CHILDREN + 1).await;
        // One of them cannot come back: another job has its key now.
        t.enqueue(json!({"unique": {"key": "taken"}, "queue": "other"})).await;
        t.act(&format!("/v1/jobs/{root}/retry")).await.is(200);
        until("jobs where state = 'scheduled'", 2 * CHILDREN).await;
        until("revived_parents", 0).await;
        assert_eq!(t.job(&taken).await["state"], "cancelled");
        assert_eq!(count("job_events where type = 'fencepost.revived'").await, 2 * CHILDREN);
        let job = t.lease("w").await;
        assert_eq!(job["id"], json!(root));
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(count("jobs where state = 'pending' and queue = 'default'").await, CHILDREN);
    });
}

#[test]
fn a_workflow_is_cancelled_wholly_or_not_at_all() {
    run_alone(async |t| {
        let job = |key: &str| json!({"key": key, "job_type": key});
        let graph = json!({"jobs": [job("a"), job("b"), job("c")]});
        let workflow = t.post("/v1/workflows", graph).await.is(201);
        let cancel = format!("/v1/workflows/{}/cancel", workflow["id"].as_str().expect("an id"));
        t.database
            .execute(
                "create function refuse() returns trigger language plpgsql as $$
                 begin raise 'refused' using errcode = '23514'; end $$;
                 create trigger refuse before delete on jobs for each row
                 when (old.job_type = 'b') execute function refuse()",
            )
            .await;
        assert!(t.act(&cancel).await.status.is_server_error());
        let waiting = "select count(*) from jobs where state = 'pending'";
        assert_eq!(t.database.number(waiting).await, 3);
        let cancelled = "select count(*) from workflows where cancelled_at is not null";
        assert_eq!(t.database.number(cancelled).await, 0);
        t.database.execute("drop trigger refuse on jobs").await;
        t.act(&cancel).await;
        assert_eq!(t.database.number(waiting).await, 0);
        let cancelled = "select count(*) from finished_jobs where state = 'cancelled'";
        assert_eq!(t.database.number(cancelled).await, 3);
    });
}

#[test]
fn a_retried_job_of_a_held_workflow_waits_for_its_start() {
    run(async |t| {
        let job = json!({"id": "a", "command": "true", "depends_on": [], "required_labels": []});
        let graph = json!({"name": "held", "jobs": [job]});
        let made = t.post("/workflow-graph/api/workflows", graph).await.is(201);
        let listed = t.get("/v1/jobs").await.is(200);
        let id = listed["jobs"][0]["id"].as_str().expect("an id").to_owned();
        t.act(&format!("/v1/jobs/{id}/cancel")).await;
        assert_eq!(t.job(&id).await["state"], "cancelled");
        t.act(&format!("/v1/jobs/{id}/retry")).await.is(200);
        assert_eq!(t.job(&id).await["state"], "scheduled");
        let workflow = made["id"].as_str().expect("an id");
        let run = t.act(&format!("/workflow-graph/api/workflows/{workflow}/run")).await;
        assert_eq!(run.status, 202);
        assert_eq!(t.job(&id).await["state"], "pending");
    });
}
