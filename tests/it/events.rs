//! Watching: history, streams, waiting for an end, logs, explanations.

use std::time::Duration;

use crate::harness::{TestProject, TestServer, fresh_database, limited, run, run_alone};
use futures_util::StreamExt;
use reqwest::{Method, Response};
use serde_json::{Value, json};

/// A stream of server-sent events, as a client reads it.
pub struct Stream {
    response: Response,
    text: String,
}

impl Stream {
    pub async fn open(t: &TestProject, path: &str, last: Option<&str>) -> Self {
        let mut request = t.request(Method::GET, path);
        if let Some(last) = last {
            request = request.header("Last-Event-ID", last);
        }
        let response = request.send().await.expect("an answer");
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self { response, text: String::new() }
    }

    /// The next event: its type, its id and its data. None: the end.
    pub async fn next(&mut self) -> Option<(String, String, Value)> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| {
                    let line = event.lines().find_map(|it| it.strip_prefix(name));
                    line.map(|it| it.trim_start_matches(": ").to_owned())
                };
                let data = field("data").map(|it| serde_json::from_str(&it).expect("JSON"));
                let event = field("event").zip(field("id")).zip(data);
                self.text = rest.to_owned();
                if let Some(((kind, id), data)) = event {
                    return Some((kind, id, data));
                }
                continue;
            }
            let bytes = self.response.chunk().await.expect("it continues")?;
            self.text.push_str(std::str::from_utf8(&bytes).expect("text"));
        }
    }

    pub async fn kinds(&mut self, count: usize) -> Vec<String> {
        let mut kinds = Vec::new();
        while kinds.len() < count {
            kinds.push(self.next().await.expect("an event").0);
        }
        kinds
    }
}

fn event(job: &Value, kind: &str) -> Value {
    json!({"job_id": job["id"], "attempt": job["attempt"], "type": kind, "payload": {"n": 1}})
}

fn chunk(job: &Value, sequence: i64, data: &str) -> Value {
    json!({
        "job_id": job["id"], "attempt": job["attempt"], "sequence": sequence, "data": data,
        "timestamp_ms": 1_710_000_001_000_i64 + sequence,
    })
}

#[test]
fn a_history_gives_its_newest_events_and_says_that_there_are_older_ones() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let leased = t.lease("w").await;
        let events =
            json!({"worker_id": "w", "events": [event(&leased, "a"), event(&leased, "b")]});
        t.post("/v1/workers/events", events).await.is(200);
        t.ack(&leased, "w", "succeeded").await.is(200);
        let read = async |query: &str| {
            let history = t.get(&format!("/v1/jobs/{id}/events{query}")).await.is(200);
            let events = history["events"].as_array().expect("events").iter();
            let kinds: Vec<_> =
                events.map(|it| it["type"].as_str().expect("text").to_owned()).collect();
            (kinds, history["has_more"].clone())
        };
        let (all, has_more) = read("").await;
        assert_eq!(
            all,
            ["fencepost.enqueued", "fencepost.claimed", "a", "b", "fencepost.succeeded"]
        );
        assert_eq!(has_more, false);
        for limit in 1..=4 {
            let newest = (all[5 - limit..].to_vec(), json!(true));
            assert_eq!(read(&format!("?limit={limit}")).await, newest);
        }
        assert_eq!(read("?limit=5").await, (all.clone(), json!(false)));
        assert_eq!(read("?limit=1000").await, (all, json!(false)));
        for bad in ["0", "1001", "x", "-1"] {
            t.get(&format!("/v1/jobs/{id}/events?limit={bad}")).await.refuses("limit");
        }
        t.get(&format!("/v1/jobs/{id}/events?most=1")).await.refuses("most");
    });
}

#[test]
fn a_job_is_watched_from_its_beginning_to_its_end() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let path = format!("/v1/jobs/{id}/events/stream");
        let mut stream = Stream::open(t, &path, None).await;
        assert_eq!(stream.kinds(1).await, ["fencepost.enqueued"]);
        let job = t.lease("w").await;
        let (kind, last, claimed) = stream.next().await.expect("an event");
        assert_eq!(kind, "fencepost.claimed");
        assert_eq!((&claimed["worker_id"], &claimed["attempt"]), (&json!("w"), &json!(1)));
        let events = json!({"worker_id": "w", "events": [event(&job, "page.done")]});
        t.post("/v1/workers/events", events).await.is(200);
        let (kind, _, own) = stream.next().await.expect("an event");
        assert_eq!((kind.as_str(), &own["payload"]), ("page.done", &json!({"n": 1})));
        t.ack(&job, "w", "succeeded").await.is(200);
        let (kind, end, _) = stream.next().await.expect("an event");
        assert_eq!(kind, "fencepost.succeeded");
        assert!(stream.next().await.is_none(), "nothing follows a success");
        let mut again = Stream::open(t, &path, Some(&last)).await;
        assert_eq!(again.kinds(2).await, ["page.done", "fencepost.succeeded"]);
        let done = t.request(Method::GET, &path).header("Last-Event-ID", end).send().await;
        assert_eq!(done.expect("an answer").status(), 204);
    });
}

#[test]
fn a_watcher_on_another_node_hears_of_it_too() {
    limited(async {
        let database = fresh_database().await;
        let (server, other) =
            (TestServer::start(database.clone()).await, TestServer::start(database).await);
        let t = server.project("main").await;
        let there = t.through(&other.url);
        let id = t.enqueue(json!({})).await;
        let path = format!("/v1/jobs/{id}");
        let mut stream = Stream::open(&there, &format!("{path}/events/stream"), None).await;
        stream.kinds(1).await;
        let waiting = {
            let there = there.clone();
            let path = format!("{path}?wait_seconds=30");
            tokio::spawn(async move { there.get(&path).await.is(200) })
        };
        let job = t.lease("w").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(stream.kinds(2).await, ["fencepost.claimed", "fencepost.succeeded"]);
        assert_eq!(waiting.await.expect("an answer")["state"], "succeeded");
        server.stop().await;
        other.stop().await;
    });
}

#[test]
fn a_wait_for_a_job_is_answered_at_its_end() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let waiting = {
            let t = t.clone();
            let path = format!("/v1/jobs/{id}?wait_seconds=30");
            tokio::spawn(async move { t.get(&path).await.is(200) })
        };
        let job = t.lease("w").await;
        t.ack_with(&job, "w", "succeeded", json!({"result": 7})).await.is(200);
        assert_eq!(waiting.await.expect("an answer")["result"], 7);
        let other = t.enqueue(json!({})).await;
        let path = |seconds: &str| format!("/v1/jobs/{other}?wait_seconds={seconds}");
        assert_eq!(t.get(&path("0")).await.is(200)["state"], "pending");
        assert_eq!(t.get(&path("1")).await.is(200)["state"], "pending");
        t.get(&path("31")).await.refuses("wait_seconds");
        t.get("/v1/jobs/job_01m7w3ha3aextt8pkwwdmxsmqw?wait_seconds=9")
            .await
            .is_error(404, "job_not_found");
    });
}

#[test]
fn a_project_is_watched_and_a_stream_that_comes_back_misses_nothing() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (t, other) = (server.project("ours").await, server.project("theirs").await);
        let mut stream = Stream::open(&t, "/v1/events/stream", None).await;
        other.enqueue(json!({})).await;
        let id = t.enqueue(json!({"max_attempts": 1})).await;
        let (kind, last, first) = stream.next().await.expect("an event");
        assert_eq!((kind.as_str(), &first["job_id"]), ("fencepost.enqueued", &json!(id)));
        drop(stream);
        let job = t.lease("w").await;
        t.ack(&job, "w", "failed").await.is(200);
        let mut stream = Stream::open(&t, "/v1/events/stream", Some(&last)).await;
        assert_eq!(
            stream.kinds(3).await,
            ["fencepost.claimed", "fencepost.failed", "fencepost.dead_lettered"]
        );
        t.post(&format!("/v1/jobs/{id}/retry"), json!({})).await.is(200);
        t.post(&format!("/v1/jobs/{id}/cancel"), json!({})).await.is(200);
        assert_eq!(stream.kinds(2).await, ["fencepost.retried", "fencepost.cancelled"]);
        let mut lost = Stream::open(&t, "/v1/events/stream", Some("evt_old")).await;
        assert_eq!(lost.kinds(1).await, ["fencepost.gap"]);
        server.stop().await;
    });
}

#[test]
fn streams_end_when_the_server_stops() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        let mut stream = Stream::open(&t, "/v1/events/stream", None).await;
        let stopped = tokio::time::timeout(Duration::from_secs(10), server.stop());
        let (ended, stopped) = tokio::join!(stream.next(), stopped);
        assert!(ended.is_none());
        stopped.expect("a stream does not hold up the end");
    });
}

#[test]
fn only_the_worker_of_a_running_attempt_reports_events_and_logs() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let mut stale = job.clone();
        stale["attempt"] = json!(2);
        for (path, field, report) in [
            ("/v1/workers/events", "events", event as fn(&Value, &str) -> Value),
            ("/v1/workers/logs", "chunks", |job, text| chunk(job, 0, text)),
        ] {
            let post = async |worker: &str, job: &Value| {
                let body = json!({"worker_id": worker, field: [report(job, "x")]});
                t.post(path, body).await
            };
            post("w", &job).await.is(200);
            post("v", &job).await.is_error(409, "worker_mismatch");
            post("w", &stale).await.is_error(409, "stale_lease");
            let mut missing = job.clone();
            missing["id"] = json!("job_01m7w3ha3aextt8pkwwdmxsmqw");
            post("w", &missing).await.is_error(404, "job_not_found");
            t.post(path, json!({"worker_id": "w", field: []})).await.refuses(field);
        }
        let both = json!({"worker_id": "w", "events": [event(&job, "y"), event(&stale, "y")]});
        t.post("/v1/workers/events", both).await.is_error(409, "stale_lease");
        t.ack(&job, "w", "succeeded").await.is(200);
        let late = json!({"worker_id": "w", "events": [event(&job, "late")]});
        t.post("/v1/workers/events", late).await.is_error(409, "invalid_state");
        let history = t.get(&format!("/v1/jobs/{id}/events")).await.is(200);
        let own = history["events"].as_array().expect("events").iter();
        assert_eq!(own.filter(|it| it["type"] == "x").count(), 1);
        assert!(!history.to_string().contains("\"y\""), "all or none");
    });
}

#[test]
fn bad_events_are_refused_by_name() {
    run(async |t| {
        t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let with = async |more: Value| {
            let mut one = event(&job, "fine");
            one.as_object_mut().expect("an object").extend(more.as_object().expect("it").clone());
            let body = json!({"worker_id": "w", "events": [one]});
            t.post("/v1/workers/events", body).await
        };
        with(json!({"type": "fencepost.claimed"})).await.refuses("events[0].type");
        with(json!({"type": "a b"})).await.refuses("events[0].type");
        with(json!({"type": "x".repeat(65)})).await.refuses("events[0].type");
        with(json!({"attempt": 0})).await.refuses("events[0].attempt");
        with(json!({"payload": "x".repeat(17_000)})).await.is_error(413, "payload_too_large");
        let many = vec![event(&job, "x"); 101];
        let body = json!({"worker_id": "w", "events": many});
        t.post("/v1/workers/events", body).await.refuses("events");
    });
}

#[test]
fn logs_are_kept_in_order_duplicates_ignored_and_gaps_shown() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let send = async |chunks: Value| {
            t.post("/v1/workers/logs", json!({"worker_id": "w", "chunks": chunks})).await.is(200)
        };
        let reply =
            send(json!([chunk(&job, 0, "a"), chunk(&job, 1, "b"), chunk(&job, 1, "b")])).await;
        assert_eq!(reply, json!({"accepted": 2, "duplicates": 1, "truncated": false}));
        let mut error = chunk(&job, 0, "oops\u{0}");
        error["stream"] = json!("stderr");
        let reply = send(json!([chunk(&job, 1, "other"), chunk(&job, 5, "f"), error])).await;
        assert_eq!(reply, json!({"accepted": 2, "duplicates": 1, "truncated": false}));
        let page = t.get(&format!("/v1/jobs/{id}/logs")).await.is(200);
        let logs = page["logs"].as_array().expect("logs");
        let data: Vec<_> = logs.iter().map(|it| it["data"].as_str().expect("text")).collect();
        assert_eq!(data, ["oops\u{FFFD}", "a", "b", "f"]);
        assert_eq!(
            page["gaps"],
            json!([{"attempt": 1, "stream": "stdout", "from_sequence": 2, "to_sequence": 4}])
        );
        let mut cursor = String::new();
        let mut seen = Vec::new();
        loop {
            let page = t.get(&format!("/v1/jobs/{id}/logs?limit=1{cursor}")).await.is(200);
            seen.extend(page["logs"].as_array().expect("logs").clone());
            if page["has_more"] == false {
                break;
            }
            cursor = format!("&cursor={}", page["next_cursor"].as_str().expect("a cursor"));
        }
        assert_eq!(&seen, logs);
        t.get(&format!("/v1/jobs/{id}/logs?cursor=x")).await.refuses("cursor");
        let none = t.get(&format!("/v1/jobs/{id}/logs?attempt=2")).await.is(200);
        assert_eq!(none["logs"], json!([]));
    });
}

#[test]
fn an_attempts_logs_are_cut_at_their_bound_and_marked() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let text = "x".repeat(60_000);
        let mut replies = Vec::new();
        for first in [0, 10] {
            let chunks: Vec<_> = (first..first + 10).map(|it| chunk(&job, it, &text)).collect();
            let body = json!({"worker_id": "w", "chunks": chunks});
            replies.push(t.post("/v1/workers/logs", body).await.is(200));
        }
        assert_eq!(replies[0]["truncated"], false);
        assert_eq!((&replies[1]["accepted"], &replies[1]["truncated"]), (&json!(8), &json!(true)));
        let page = t.get(&format!("/v1/jobs/{id}/logs")).await.is(200);
        assert_eq!(page["truncated_attempts"], json!([1]));
        let kept = "select sum(octet_length(data))::bigint from job_logs";
        assert_eq!(t.database.number(kept).await, 1_048_576);
        let large = json!({"worker_id": "w", "chunks": [chunk(&job, 99, &"x".repeat(65_537))]});
        t.post("/v1/workers/logs", large).await.refuses("chunks[0].data");
    });
}

#[test]
fn logs_are_watched_as_they_come() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let send = async |sequence, data: &str| {
            let chunks = [chunk(&job, sequence, data)];
            t.post("/v1/workers/logs", json!({"worker_id": "w", "chunks": chunks})).await.is(200)
        };
        send(0, "first").await;
        let path = format!("/v1/jobs/{id}/logs/stream");
        let mut stream = Stream::open(t, &path, None).await;
        let (kind, last, data) = stream.next().await.expect("a line");
        assert_eq!((kind.as_str(), &data["data"]), ("log", &json!("first")));
        send(1, "second").await;
        assert_eq!(stream.next().await.expect("a line").2["data"], "second");
        t.ack(&job, "w", "succeeded").await.is(200);
        assert!(stream.next().await.is_none());
        let mut again = Stream::open(t, &path, Some(&last)).await;
        assert_eq!(again.next().await.expect("a line").2["data"], "second");
        assert!(again.next().await.is_none());
    });
}

#[test]
fn a_job_is_explained_gate_by_gate() {
    run(async |t| {
        let explain = async |id: &str| t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        let id = t.enqueue(json!({})).await;
        let reported = explain(&id).await;
        assert_eq!(reported["summary"], "no live worker polls queue default for test");
        assert_eq!(
            (&reported["state"], &reported["waiting_for"]),
            (&json!("pending"), &json!("worker"))
        );
        let gates: Vec<_> =
            reported["gates"].as_array().expect("gates").iter().map(|it| &it["gate"]).collect();
        assert_eq!(gates, ["parents", "run_at", "queue_paused", "worker"]);
        let mut worker = json!({"worker_id": "w", "queues": ["default"], "job_types": ["test"]});
        worker["concurrency"] = json!(1);
        t.post("/v1/workers/register", worker).await.is(200);
        let second = t.enqueue(json!({})).await;
        assert_eq!(explain(&second).await["summary"], "1 live worker; 1 job before it");
        let later = t.enqueue(json!({"delay_seconds": 100})).await;
        let reported = explain(&later).await;
        assert!(
            reported["summary"].as_str().expect("text").starts_with("its run_at is "),
            "{reported}"
        );
        assert_eq!(reported["next_change_at"], t.job(&later).await["run_at"]);
        let child = t.enqueue(json!({"parent_job_id": later})).await;
        assert_eq!(explain(&child).await["summary"], "it waits for the end of 1 parent");
        let labelled = t.enqueue(json!({"labels": ["gpu"]})).await;
        let summary = "none of 1 live worker of queue default has the labels gpu";
        assert_eq!(explain(&labelled).await["summary"], summary);
        let job = t.lease("w").await;
        let running = explain(&id).await;
        assert_eq!(running["summary"], "worker w runs it");
        assert_eq!(running["gates"], json!([]));
        let busy = "all workers are busy: 1 of 1 slot in use; 0 jobs before it";
        assert_eq!(explain(&second).await["summary"], busy);
        t.ack(&job, "w", "failed").await.is(200);
        let reported = explain(&id).await;
        assert!(
            reported["summary"].as_str().expect("text").starts_with("failure 1 of 3: retried in")
        );
        assert_eq!(reported["waiting_for"], "backoff");
    });
}

#[test]
fn a_trace_goes_from_the_producer_to_the_worker() {
    run(async |t| {
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        for (sent, kept) in [(trace, json!(trace)), ("nonsense", Value::Null)] {
            let request = t.request(Method::POST, "/v1/jobs").header("traceparent", sent);
            let reply = request.json(&json!({"job_type": "t"})).send().await.expect("an answer");
            assert_eq!(reply.status(), 201);
            assert_eq!(t.lease("w").await["traceparent"], kept);
        }
    });
}

#[test]
fn an_event_stream_reports_a_gap_to_a_slow_listener_and_delays_no_other() {
    run(async |t| {
        let response = t.request(Method::GET, "/v1/events/stream").send().await.expect("an answer");
        let jobs = vec![json!({"job_type": "t"}); 500];
        // More than the sockets' buffers hold.
        for _ in 0..80 {
            t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        }
        let mut bytes = response.bytes_stream();
        let mut tail = Vec::new();
        loop {
            tail.extend(bytes.next().await.expect("it continues").expect("bytes"));
            if String::from_utf8_lossy(&tail).contains("event: fencepost.gap") {
                break;
            }
            tail.drain(..tail.len().saturating_sub(100));
        }
    });
}

#[test]
fn log_chunks_of_an_ended_attempt_hold_up_no_ack() {
    run(async |t| {
        t.enqueue(json!({})).await;
        t.enqueue(json!({})).await;
        let (lost, kept) = (t.lease("w").await, t.lease("w").await);
        t.ack(&lost, "w", "succeeded").await.is(200);
        let late = (0..40).map(|index| {
            let body = json!({"worker_id": "w", "chunks": [chunk(&lost, index, "late")]});
            t.post("/v1/workers/logs", body)
        });
        let acked = t.ack(&kept, "w", "succeeded");
        let (late, acked) = tokio::join!(futures_util::future::join_all(late), acked);
        acked.is(200);
        for reply in late {
            reply.is_error(409, "invalid_state");
        }
    });
}

#[test]
fn a_log_stream_that_comes_back_misses_no_line_of_any_stream() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let send = async |stream: &str, sequence, data: &str| {
            let mut line = chunk(&job, sequence, data);
            line["stream"] = json!(stream);
            t.post("/v1/workers/logs", json!({"worker_id": "w", "chunks": [line]})).await.is(200)
        };
        send("stdout", 0, "out").await;
        let path = format!("/v1/jobs/{id}/logs/stream");
        let mut stream = Stream::open(t, &path, None).await;
        let (_, last, _) = stream.next().await.expect("a line");
        drop(stream);
        send("stderr", 0, "err").await;
        let mut again = Stream::open(t, &path, Some(&last)).await;
        assert_eq!(again.next().await.expect("a line").2["data"], "err");
    });
}
