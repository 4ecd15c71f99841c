//! The service `externalscaler.ExternalScaler`, as KEDA calls it:
//! <https://keda.sh/docs/latest/concepts/external-scalers/>.

use std::{collections::HashMap, future::Future};

use axum::{Router, extract::Request as Call, response::Response as Answer, routing::post};
use futures_util::{Stream, StreamExt};
use prost::Message;
use tonic::{Code, Request, Response, Status, body::Body, server::Grpc};
use tonic_prost::ProstCodec;
use tower::service_fn;

use super::trigger::Trigger;
use crate::client::{Client, Failure};

/// A trigger's metadata is a few lines of a manifest.
const MAX_MESSAGE_BYTES: usize = 64 * 1_024;
/// The only metric of a trigger.
const METRIC: &str = "backlog";

/// The trigger that is asked for.
#[derive(Clone, PartialEq, Message)]
struct ScaledObjectRef {
    #[prost(map = "string, string", tag = "3")]
    scaler_metadata: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct GetMetricsRequest {
    #[prost(message, optional, tag = "1")]
    scaled_object_ref: Option<ScaledObjectRef>,
}

/// True while a queue of the trigger has work.
#[derive(Clone, PartialEq, Message)]
struct IsActiveResponse {
    #[prost(bool, tag = "1")]
    result: bool,
}

#[derive(Clone, PartialEq, Message)]
struct GetMetricSpecResponse {
    #[prost(message, repeated, tag = "1")]
    metric_specs: Vec<MetricSpec>,
}

/// The part of a metric that one worker handles.
#[derive(Clone, PartialEq, Message)]
struct MetricSpec {
    #[prost(string, tag = "1")]
    metric_name: String,
    /// For versions of KEDA that do not read `target_size_float`.
    #[prost(int64, tag = "2")]
    target_size: i64,
    #[prost(double, tag = "3")]
    target_size_float: f64,
}

#[derive(Clone, PartialEq, Message)]
struct GetMetricsResponse {
    #[prost(message, repeated, tag = "1")]
    metric_values: Vec<MetricValue>,
}

#[derive(Clone, PartialEq, Message)]
struct MetricValue {
    #[prost(string, tag = "1")]
    metric_name: String,
    #[prost(int64, tag = "2")]
    metric_value: i64,
}

/// The methods; KEDA takes `unimplemented` for those that are missing.
pub(super) fn routes(client: Client) -> Router {
    let path = |method: &str| format!("/externalscaler.ExternalScaler/{method}");
    let (active, stream, values) = (client.clone(), client.clone(), client);
    Router::new()
        .route(
            &path("IsActive"),
            post(move |call: Call| unary(call, move |it| is_active(active.clone(), it))),
        )
        .route(
            &path("StreamIsActive"),
            post(move |call: Call| async move {
                let follow = service_fn(move |it| stream_is_active(stream.clone(), it));
                grpc::<ScaledObjectRef, IsActiveResponse>().server_streaming(follow, call).await
            }),
        )
        .route(&path("GetMetricSpec"), post(|call: Call| unary(call, metric_spec)))
        .route(
            &path("GetMetrics"),
            post(move |call: Call| unary(call, move |it| metrics(values.clone(), it))),
        )
        .fallback(async || Status::unimplemented("there is no such method").into_http::<Body>())
}

fn grpc<Q, A>() -> Grpc<ProstCodec<A, Q>>
where
    Q: Message + Default + 'static,
    A: Message + 'static,
{
    Grpc::new(ProstCodec::default()).max_decoding_message_size(MAX_MESSAGE_BYTES)
}

/// Answers a method with one message.
async fn unary<Q, A, F>(call: Call, answer: impl FnMut(Request<Q>) -> F) -> Answer<Body>
where
    Q: Message + Default + 'static,
    A: Message + 'static,
    F: Future<Output = Result<Response<A>, Status>>,
{
    grpc::<Q, A>().unary(service_fn(answer), call).await
}

async fn is_active(
    client: Client,
    request: Request<ScaledObjectRef>,
) -> Result<Response<IsActiveResponse>, Status> {
    let trigger = Trigger::of(&request.into_inner().scaler_metadata)?;
    let backlog = trigger.backlog(&client).await.map_err(status)?;
    Ok(Response::new(IsActiveResponse { result: backlog > 0 }))
}

async fn stream_is_active(
    client: Client,
    request: Request<ScaledObjectRef>,
) -> Result<Response<impl Stream<Item = Result<IsActiveResponse, Status>>>, Status> {
    let trigger = Trigger::of(&request.into_inner().scaler_metadata)?;
    let changes = trigger.changes(client);
    Ok(Response::new(
        changes
            .map(|is_active| is_active.map(|result| IsActiveResponse { result }).map_err(status)),
    ))
}

async fn metric_spec(
    request: Request<ScaledObjectRef>,
) -> Result<Response<GetMetricSpecResponse>, Status> {
    let trigger = Trigger::of(&request.into_inner().scaler_metadata)?;
    let target = trigger.jobs_per_worker;
    let spec = MetricSpec {
        metric_name: METRIC.to_owned(),
        target_size: target.into(),
        target_size_float: target.into(),
    };
    Ok(Response::new(GetMetricSpecResponse { metric_specs: vec![spec] }))
}

async fn metrics(
    client: Client,
    request: Request<GetMetricsRequest>,
) -> Result<Response<GetMetricsResponse>, Status> {
    let asked = request.into_inner().scaled_object_ref.unwrap_or_default();
    let trigger = Trigger::of(&asked.scaler_metadata)?;
    let metric_value = trigger.backlog(&client).await.map_err(status)?;
    let value = MetricValue { metric_name: METRIC.to_owned(), metric_value };
    Ok(Response::new(GetMetricsResponse { metric_values: vec![value] }))
}

/// A failed call of the server, as gRPC says it.
fn status(failure: Failure) -> Status {
    let code = match &failure {
        Failure::Refused { status, .. } if !failure.is_transient() => match status.as_u16() {
            401 => Code::Unauthenticated,
            403 => Code::PermissionDenied,
            _ => Code::InvalidArgument,
        },
        _ => Code::Unavailable,
    };
    Status::new(code, failure.to_string())
}
