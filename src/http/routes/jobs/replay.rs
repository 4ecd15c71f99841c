//! `POST /v1/jobs/{job_id}/replay`: a new job with the work of an earlier one.

use axum::{
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use chrono::{DateTime, Utc};
use fencepost_domain::{actor::MAX_REASON_CHARS, error::Error, formats, limits};
use fencepost_engine::jobs::replay::{self, Changes};
use fencepost_web::{
    app::App,
    auth::{Caller, Replay},
    wire::{
        extract::{JobInPath, RequestBody},
        openapi::{chars, items, range},
        validate::Check,
    },
};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{
    Job,
    request::{start, traceparent},
};
use crate::{
    change::check_reason,
    error::ErrorBody,
    idempotency::{self, Answer, Ids, Once},
};

/// Changes to the earlier job's work. Everything is optional.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"payload": {"to": "ada@example.com"}}))]
pub struct ReplayRequest {
    /// Any JSON of at most 256 KiB. Default: the payload of the earlier job.
    #[serde(default, deserialize_with = "sent")]
    #[schema(value_type = serde_json::Value, required = false)]
    payload: Option<Box<RawValue>>,
    /// Job type. Default: that of the earlier job.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_JOB_TYPE_CHARS)))))]
    job_type: Option<String>,
    /// Queue. Default: that of the earlier job.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_QUEUE_CHARS)))))]
    queue: Option<String>,
    /// Labels that its worker must have, at most 16. Default: those of the earlier job.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_LABELS)))))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    labels: Option<Vec<String>>,
    /// Priority; higher runs first. Default: that of the earlier job.
    #[schema(extensions(("bounds" = json!(range(limits::MIN_PRIORITY, limits::MAX_PRIORITY)))))]
    priority: Option<i16>,
    /// Earliest time of its first attempt, at most 100 years ahead. Default: immediately.
    #[serde(default, deserialize_with = "formats::optional_time")]
    run_at: Option<DateTime<Utc>>,
    /// Reason for the replay, shown in the new job's history. One line.
    #[schema(extensions(("bounds" = json!(chars(1, MAX_REASON_CHARS)))))]
    reason: Option<String>,
}

impl RequestBody for ReplayRequest {}

/// A payload that is present: null is one, too.
fn sent<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(from).map(Some)
}

/// Replay a job.
///
/// Enqueues a new job with the type, payload, queue, priority, tags, labels, group, concurrency
/// key, timeout and retry policy of an earlier one, in whatever state that is. The earlier job
/// stays as it is; `replay_of` of the new one names it. Parents, workflow, unique key,
/// `expires_at`, batch and callbacks are not copied. A key without the scope `payload:read` may
/// name another queue only with another payload.
#[utoipa::path(
    post, path = "/jobs/{job_id}/replay", tag = "jobs", operation_id = "jobs_replay",
    security(("api_key" = ["produce", "read"]), ("session" = ["member"])),
    request_body = ReplayRequest,
    params(
        ("job_id" = String, Path, description = "The earlier job.", example = "job_01m7w3ha3aextt8pkwwdmxsmqw"),
        idempotency::Header,
        ("traceparent" = Option<String>, Header, description = "W3C trace context; the worker gets it."),
    ),
    responses(
        (status = 201, description = "The new job.", body = Job,
         headers(("Location" = String, description = "The new job's path."))),
        (status = 404, description = "The project has no such job.", body = ErrorBody),
    ),
)]
pub async fn replay(
    caller: Caller<Replay>,
    State(app): State<App>,
    JobInPath(of): JobInPath,
    headers: HeaderMap,
    Once { request, repeat }: Once<ReplayRequest>,
) -> Result<Response, Error> {
    // Who works on another queue would see a payload that is not shown to it here.
    let moves_payload = request.queue.is_some() && request.payload.is_none();
    if moves_payload && !caller.who.may_read_payloads() {
        return Err(Error::Forbidden { needs: "the scope `payload:read`, to name a queue" });
    }
    let trace = traceparent(&headers).map(str::to_owned);
    let (running, tenant, origin) = (app.clone(), caller.tenant(), caller.origin());
    let by = caller.who.changed_by();
    repeat
        .once(&app, &caller, async move |ids: Ids| {
            let by = by.because(request.reason.clone());
            let changes = request.accept(tenant.limits.max_payload_bytes(), trace)?;
            let ids = (of, ids.job(0));
            let row = replay::replay(&running.engine, tenant, origin, ids, changes, by).await?;
            Ok(Answer::job(StatusCode::CREATED, Job::read(row)?))
        })
        .await
}

impl ReplayRequest {
    fn accept(
        self,
        max_payload_bytes: usize,
        traceparent: Option<String>,
    ) -> Result<Changes, Error> {
        let mut check = Check::default();
        check_reason(&mut check, self.reason.as_deref());
        check.optional_name("job_type", self.job_type.as_deref(), limits::MAX_JOB_TYPE_CHARS);
        check.optional_name("queue", self.queue.as_deref(), limits::MAX_QUEUE_CHARS);
        if let Some(priority) = self.priority {
            check.range("priority", priority, limits::MIN_PRIORITY, limits::MAX_PRIORITY);
        }
        let labels = self.labels.map(|mut labels| {
            check.names("labels", &labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
            labels.sort();
            labels.dedup();
            labels
        });
        if let Some(payload) = &self.payload {
            check.size("payload", payload, max_payload_bytes)?;
            check.depth("payload", payload);
        }
        let start = start(self.run_at, None, &mut check);
        check.finish()?;
        Ok(Changes {
            payload: self.payload.map(|it| Box::<str>::from(it).into_string()),
            job_type: self.job_type,
            queue: self.queue,
            labels,
            rank: self.priority.map(i16::saturating_neg),
            start,
            traceparent,
        })
    }
}
