//! The poll that an ack may carry: a worker then needs one request less for each job.

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use fencepost_domain::{error::Error, ids::PollId, limits, worker::WorkerState};
use fencepost_engine::dispatch::Poll;
use fencepost_web::{
    app::App,
    auth::{Bound, Caller, Polling, Settling},
    wire::{
        RequestId,
        openapi::{items, range},
        poll_answer,
        validate::Check,
    },
};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;

use super::poll::{PollReply, PollRequest, PolledJob, poll_for};
use crate::error::{self, ApiError};

/// Why an ack without a fence may not be followed by a poll: repeating it could settle another
/// attempt.
const NEEDS_A_FENCE: &str = "needs attempt or lease_id in the ack";

/// A poll that follows an ack, for the same worker.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ThenPollRequest {
    /// Makes the whole request repeatable: while the leases run, the same id returns the same jobs.
    #[schema(value_type = uuid::Uuid, required)]
    poll_id: Option<PollId>,
    /// Queues to claim from, in this order: while there is capacity, the next one follows.
    #[schema(extensions(("bounds" = json!(items(1, limits::MAX_POLL_QUEUES)))))]
    queues: Vec<String>,
    /// Maximum number of jobs to return. Default: 1.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_POLL_CAPACITY)))))]
    capacity: Option<u32>,
    /// Only jobs of these types. Default: any.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_POLL_JOB_TYPES)))))]
    job_types: Option<Vec<String>>,
    /// Labels of this worker. Default: the registered ones.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_LABELS)))))]
    labels: Option<Vec<String>>,
    /// Seconds to wait for the first job. Default: 30.
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_POLL_WAIT_SECONDS)))))]
    wait_seconds: Option<u32>,
    /// Length of the leases in seconds. Default: that of the project, or half of the job's timeout,
    /// at least 30; and no less than the default of the queue.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_LEASE_SECONDS)))))]
    lease_seconds: Option<i32>,
}

/// Answer to the poll that followed an ack.
#[derive(Debug, Serialize, ToSchema)]
pub struct ThenPollReply {
    /// Leased jobs, as in the answer to a poll.
    pub jobs: Vec<PolledJob>,
    /// Directive; present only if the worker should take no more jobs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub state: Option<WorkerState>,
    /// Never sent: the header `Fencepost-Advice` says `unknown-queue`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false, deprecated)]
    pub warnings: Vec<String>,
    /// Why there was no poll. The ack counts all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub error: Option<ApiError>,
}

impl ThenPollRequest {
    /// Reads the poll, before the ack is written: a wrong one must not be acked half.
    pub fn accept(
        self,
        caller: &Caller<Bound<Settling>>,
        worker_id: &str,
        has_fence: bool,
    ) -> Result<Poll, Error> {
        let mut check = Check::below("then_poll.");
        if self.poll_id.is_none() {
            check.refuse("poll_id", "is missing");
        } else if !has_fence {
            check.refuse("poll_id", NEEDS_A_FENCE);
        }
        let request = PollRequest {
            worker_id: worker_id.to_owned(),
            queues: self.queues,
            capacity: self.capacity,
            job_types: self.job_types,
            labels: self.labels,
            wait_seconds: self.wait_seconds,
            lease_seconds: self.lease_seconds,
            poll_id: self.poll_id,
        };
        let poll = request.accept(caller.project_id, check)?;
        super::poll::of_caller(poll, &caller.who)
    }
}

/// Polls after an ack that is written: whatever happens to the poll, the ack counts. `answered`
/// makes the answer to both.
pub async fn answer<Reply: Serialize>(
    app: &App,
    caller: &Caller<Bound<Settling>>,
    poll: Poll,
    (gone, request_id): (&CancellationToken, &RequestId),
    answered: impl FnOnce(ThenPollReply) -> Reply,
) -> Result<Response, Error> {
    let queues = poll.queues.clone();
    let polled = async {
        let caller: Caller<Bound<Polling>> = caller.polling(app).await?;
        poll_for(app, &caller, poll, gone).await
    };
    match polled.await {
        Ok((PollReply { jobs, state, warnings }, answer)) => {
            let is_empty = jobs.is_empty();
            let reply = answered(ThenPollReply { jobs, state, warnings, error: None });
            let mut response = poll_answer::respond(&reply, answer)?;
            if is_empty {
                super::advise(app, caller.project_id, &queues, &mut response).await;
            }
            Ok(response)
        }
        Err(failure) => {
            let error = error::info(&failure, &request_id.0).at(&app.accounts.public_url);
            let (jobs, warnings) = (Vec::new(), Vec::new());
            let reply = answered(ThenPollReply { jobs, state: None, warnings, error: Some(error) });
            Ok(Json(reply).into_response())
        }
    }
}
