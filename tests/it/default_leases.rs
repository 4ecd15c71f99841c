//! The length of a lease whose poll does not say it.

use fencepost_domain::{access::Role, limits::MAX_LEASE_SECONDS};
use serde_json::{Value, json};

use crate::{
    harness::{TestProject, run_alone},
    people::Person,
};

/// The length of the lease of a new job of this queue.
async fn lease_seconds(t: &TestProject, queue: &str, asked: Option<i32>) -> Value {
    t.enqueue(json!({ "queue": queue })).await;
    let mut poll = json!({"worker_id": "w", "queues": [queue], "wait_seconds": 0});
    if let Some(asked) = asked {
        poll["lease_seconds"] = json!(asked);
    }
    t.polled(poll).await[0]["lease_seconds"].clone()
}

#[test]
fn a_project_sets_how_long_leases_last_whose_polls_do_not_say_it() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        ada.join(t, Role::Admin).await;
        let set = async |seconds: Value| {
            ada.patch("/v1/projects/main", json!({ "default_lease_seconds": seconds })).await
        };
        t.patch("/v1/queues/slow", json!({"default_lease_seconds": 120})).await.is(200);
        assert_eq!(lease_seconds(t, "q", None).await, 900, "half of the timeout");
        assert_eq!(set(json!(60)).await.is(200)["default_lease_seconds"], 60);
        assert_eq!(lease_seconds(t, "q", None).await, 60);
        assert_eq!(lease_seconds(t, "q", Some(45)).await, 45, "the poll says it");
        assert_eq!(lease_seconds(t, "slow", None).await, 120, "the queue's is a minimum");
        assert_eq!(lease_seconds(t, "slow", Some(45)).await, 45);
        t.enqueue(json!({"queue": "short", "timeout_seconds": 20})).await;
        let short = json!({"worker_id": "w", "queues": ["short"], "wait_seconds": 0});
        assert_eq!(t.polled(short).await[0]["lease_seconds"], 30, "never past timeout and grace");
        for bad in [json!(0), json!(MAX_LEASE_SECONDS + 1), json!("60"), json!(1.5)] {
            set(bad).await.refuses("default_lease_seconds");
        }
        ada.patch("/v1/projects/main", json!({"name": "Main"})).await.is(200);
        assert_eq!(lease_seconds(t, "q", None).await, 60, "what is left out stays");
        let before = ada.get("/v1/projects/main").await.is(200);
        assert_eq!(set(Value::Null).await.is(200)["default_lease_seconds"], Value::Null);
        let after = ada.get("/v1/projects/main").await.is(200);
        assert_ne!(before["etag"], after["etag"], "it is a setting");
        assert_eq!(lease_seconds(t, "q", None).await, 900);
    });
}
