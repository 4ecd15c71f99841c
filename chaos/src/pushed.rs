//! A queue whose jobs are sent to a URL. It answers as a worker ends attempts: mostly well, and now
//! and then too late, or with 202, after which it works on.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Bytes,
    extract::{Path, State},
    http::{HeaderMap, StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use rand::seq::IndexedRandom;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    clients::{Client, World, owner_of},
    history::{Answer, End, Event, Held, now},
};

/// The queue.
pub const QUEUE: &str = "pushed";
/// How long its URL may take.
pub const TIMEOUT_SECONDS: u64 = 3;
/// An attempt that ends within this time after its answer was sent had it in time: a node that is
/// frozen meanwhile may find both the answer and the end of its time.
pub const IN_TIME_MS: i64 = TIMEOUT_SECONDS.cast_signed() * 1_000 - 1_000;
/// The lease of a request lasts longer than its URL may take: the server adds this time for the
/// ack.
const ACK_SECONDS: u64 = 20;
pub const LEASE_SECONDS: u64 = TIMEOUT_SECONDS + ACK_SECONDS;
/// Jobs that one node sends at a time.
const MAX_IN_FLIGHT: u64 = 8;
/// How the names of its workers begin: they are the nodes that send.
const WORKER_PREFIX: &str = "fencepost-push-";
/// How much longer it takes than it may.
const LATE: Duration = Duration::from_millis(500);
/// How long it works on after 202.
const WORK: Duration = Duration::from_millis(800);

/// How a request is answered.
#[derive(Debug, Clone, Copy)]
enum Reply {
    /// 200.
    Done,
    /// 500.
    Refused,
    /// 503: the job goes back, and comes again in a second.
    Busy,
    /// None in time.
    Late,
    /// 202: it works on, and sends a heartbeat and the ack itself.
    Taken,
}

/// Each with its part of a hundred.
const REPLIES: [(Reply, u32); 5] = [
    (Reply::Done, 76),
    (Reply::Refused, 14),
    (Reply::Busy, 2),
    (Reply::Late, 2),
    (Reply::Taken, 6),
];

/// What a tenant asks for: its jobs are sent to this URL.
pub fn settings(url: &str) -> Value {
    json!({"url": url, "timeout_seconds": TIMEOUT_SECONDS, "max_in_flight": MAX_IN_FLIGHT})
}

/// Whether the answer to a request is the ack: whether it came is not known then.
pub fn is_pushed(held: &Held) -> bool {
    held.worker.starts_with(WORKER_PREFIX)
}

/// Answers one request.
pub async fn take(
    State(world): State<Arc<World>>,
    Path(tenant): Path<usize>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let payload: Value = serde_json::from_slice(&body).unwrap_or_default();
    let text = |name: &str| {
        let value = headers.get(name).and_then(|it| it.to_str().ok());
        value.unwrap_or_default().to_owned()
    };
    let held = Held {
        job: text("fencepost-job-id"),
        attempt: text("fencepost-attempt").parse().unwrap_or_default(),
        lease: text("fencepost-lease-id"),
        worker: text("fencepost-worker-id"),
    };
    let owner = owner_of(&payload);
    world.history.note(Event::Leased { tenant, held: held.clone(), owner, is_first: true });
    let mut client = Client::new(&world, tenant, rand::random());
    let any = REPLIES.choose_weighted(&mut client.rng, |it| it.1).map_or(Reply::Done, |it| it.0);
    let reply = if client.is_healing() { Reply::Done } else { any };
    let end = match reply {
        Reply::Done | Reply::Late => End::Succeeded,
        Reply::Refused => End::Failed,
        Reply::Busy => End::Released,
        Reply::Taken => {
            tokio::spawn(work_on(client, held));
            return StatusCode::ACCEPTED.into_response();
        }
    };
    // The node ends a request that takes too long, and this function with it: what it will answer
    // is noted before.
    let pause = match reply {
        Reply::Late => Duration::from_secs(TIMEOUT_SECONDS) + LATE,
        _ => Duration::ZERO,
    };
    let sent = now() + i64::try_from(pause.as_millis()).unwrap_or_default();
    let answer = Answer::Unknown;
    world.history.note(Event::Acked { tenant, held, end, answer, sent });
    sleep(pause).await;
    match reply {
        Reply::Busy => (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")]).into_response(),
        Reply::Refused => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        _ => StatusCode::OK.into_response(),
    }
}

async fn work_on(mut client: Client, held: Held) {
    sleep(WORK / 2).await;
    client.beat(&held).await;
    sleep(WORK / 2).await;
    client.ack(&held, End::Succeeded).await;
}
