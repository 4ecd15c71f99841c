//! `POST /v1/workers/ack/batch`.

use std::collections::HashMap;

use axum::{Extension, Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, ids::JobId, limits};
use fencepost_engine::settle::{self, Acked};
use fencepost_web::{
    app::App,
    auth::{Bound, Caller, Cost, Settling},
    wire::{
        RequestId,
        entries::Entry,
        extract::{Json, RequestBody, UnknownFields},
    },
};
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ack::{AckAction, AckReply, AckRequest, read_reach, settle_one};
use crate::error::{self, ApiError};

/// Acks to process together.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"acks": [{"job_id": "job_01m7w3ha3aextt8pkwwdmxsmqw", "worker_id": "worker-1", "status": "succeeded", "attempt": 1}]}))]
pub struct AckBatchRequest {
    /// 1 to 500 acks. Each succeeds or fails on its own, also one that cannot be read.
    #[schema(min_items = 1, max_items = 500, value_type = Vec<AckRequest>)]
    acks: Vec<Entry<AckRequest>>,
}

impl RequestBody for AckBatchRequest {
    const IS_OF_WORKERS: bool = true;
    const MAX_BYTES: usize = limits::MAX_BATCH_BODY_BYTES;
    const HAS_ENTRIES: bool = true;

    fn mark_entries(&mut self, mark: char) -> Result<(), Error> {
        self.acks.iter_mut().for_each(|it| it.set_mark(mark));
        Ok(())
    }
}

/// Results of a batch of acks.
#[derive(Debug, Serialize, ToSchema)]
pub struct AckBatchReply {
    /// Results, in the order in which the acks were sent.
    pub results: Vec<AckBatchResult>,
}

/// Result of one ack: an action, or an error.
#[derive(Debug, Serialize, ToSchema)]
pub struct AckBatchResult {
    /// Id of the job; empty if it cannot be read.
    pub job_id: String,
    /// Status that this ack alone would have had.
    #[schema(example = 200)]
    pub status: u16,
    /// `done` if the job has ended, `retry` if it runs again.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub action: Option<AckAction>,
    /// Time of the next attempt; only with `retry`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub retry_at: Option<DateTime<Utc>>,
    /// Number of children that may run now; only if the job has children.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub children_activated: Option<i32>,
    /// Why nothing was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub error: Option<ApiError>,
}

/// Ack many attempts.
///
/// Each ack has its own result, in the order in which they were sent. Of several acks of one
/// attempt the first counts: one with the same status returns its answer, another is refused, as
/// is a further one that shows neither attempt nor lease. A release with a delay and one without
/// are two statuses.
#[utoipa::path(
    post, path = "/workers/ack/batch", tag = "workers", operation_id = "workers_ack_batch",
    security(("api_key" = ["work"]), ("session" = ["member"])),
    request_body = AckBatchRequest,
    responses(
        (status = 200, description = "A result for each ack.", body = AckBatchReply),
    ),
)]
pub async fn ack_batch(
    caller: Caller<Bound<Settling>>,
    State(app): State<App>,
    Extension(RequestId(request_id)): Extension<RequestId>,
    unknown: UnknownFields,
    Json(request): Json<AckBatchRequest>,
) -> Result<Reply<AckBatchReply>, Error> {
    let sent = request.acks.len();
    let max = limits::MAX_ACK_BATCH;
    if !(1..=max).contains(&sent) {
        let message = format!("must have between 1 and {max} entries, has {sent}");
        return Err(Error::invalid("acks", message));
    }
    // Before it is charged: what is refused here must cost nothing.
    let _turn = settle::take_turn(&app.engine, caller.project_id, sent).await?;
    caller.charge(&app, "acks", Cost::Items(sent)).await?;
    let entries = request.acks.iter().enumerate();
    let acks: Vec<_> =
        entries.map(|(index, it)| it.read(unknown, &format!("acks[{index}]"))).collect();
    let reach = read_reach(&caller, &app, acks.iter().flatten()).await?;
    let mut by_job: HashMap<String, Vec<_>> = HashMap::new();
    for (index, (read, entry)) in acks.into_iter().zip(&request.acks).enumerate() {
        let job_id = read.as_ref().map_or_else(|_| entry.job_id(), |it| it.job_id.clone());
        let key = job_id.parse::<JobId>().map_or_else(|_| job_id.clone(), |it| it.to_string());
        by_job.entry(key).or_default().push((index, job_id, read));
    }
    // Those of one job in their order: the first one counts.
    let settling = by_job.into_values().map(async |acks| {
        let mut results = Vec::with_capacity(acks.len());
        for (index, job_id, read) in acks {
            let path = format!("acks[{index}].");
            let settled = match read {
                Ok(ack) => settle_one(&caller, &app, &reach, ack, &path).await,
                Err(error) => Err(error),
            };
            let shown = |error| error::info(&error, &request_id).at(&app.accounts.public_url);
            results.push((index, AckBatchResult::new(job_id, settled, shown)));
        }
        results
    });
    let mut results: Vec<_> = join_all(settling).await.into_iter().flatten().collect();
    results.sort_by_key(|(index, _)| *index);
    Ok(Reply(AckBatchReply { results: results.into_iter().map(|it| it.1).collect() }))
}

impl AckBatchResult {
    fn new(
        job_id: String,
        settled: Result<Acked, Error>,
        shown: impl FnOnce(Error) -> ApiError,
    ) -> Self {
        match settled {
            Ok(acked) => {
                let AckReply { action, retry_at, children_activated, .. } = acked.into();
                let (status, action) = (200, Some(action));
                Self { job_id, status, action, retry_at, children_activated, error: None }
            }
            Err(error) => Self {
                job_id,
                status: error::status(&error).as_u16(),
                action: None,
                retry_at: None,
                children_activated: None,
                error: Some(shown(error)),
            },
        }
    }
}
