//! Large answers under way. What slow readers keep in memory is bounded, for each project and for
//! the node: further large reads and polls are refused until some have been taken.

use std::sync::Arc;

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{Request, State},
    http::{HeaderValue, header::CONTENT_LENGTH},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::least_rate::IsLarge;
use crate::{
    auth::CallReport, error::Error, ids::ProjectId, store::shares::PerProject,
    wire::delivery::MayBeRefused,
};

/// Answers below this many bytes are not counted.
const SMALL_BYTES: u64 = 64 * 1024;
/// KiB of large answers under way, of one project.
pub const MAX_PROJECT_KIB: usize = 32 * 1024;
/// KiB of large answers under way, of one node.
pub const MAX_NODE_KIB: usize = 128 * 1024;
/// Of these, the last ones are for projects that have no large answer under way.
const RESERVED_KIB: usize = MAX_NODE_KIB / 2;

/// The large answers of one node. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Answers {
    of_project: Arc<PerProject>,
    of_node: Arc<Semaphore>,
}

impl Default for Answers {
    fn default() -> Self {
        Self {
            of_project: Arc::new(PerProject::new(MAX_PROJECT_KIB)),
            of_node: Arc::new(Semaphore::new(MAX_NODE_KIB)),
        }
    }
}

type Permits = (OwnedSemaphorePermit, OwnedSemaphorePermit);

/// A large answer, until its last byte is written or the connection ends.
struct Held {
    bytes: Bytes,
    _permits: Arc<Permits>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Counts large answers to reads, and those to polls: their jobs are released if they are refused.
/// Answers to writes are always sent: what they tell has happened.
pub async fn hold(State(answers): State<Answers>, request: Request, next: Next) -> Response {
    let is_read = request.method().is_safe();
    let report = request.extensions().get::<CallReport>().cloned();
    let is_large = request.extensions().get::<IsLarge>().cloned();
    let response = next.run(request).await;
    let Some(bytes) = response.body().size_hint().exact().filter(|it| *it > SMALL_BYTES) else {
        return response;
    };
    if let Some(is_large) = is_large {
        is_large.mark();
    }
    match report.and_then(|it| it.project()) {
        Some(project) if is_read || is_refusable(&response) => {
            answers.keep(response, project, bytes)
        }
        _ => response,
    }
}

fn is_refusable(response: &Response) -> bool {
    response.extensions().get::<MayBeRefused>().is_some()
}

impl Answers {
    fn keep(&self, response: Response, project: ProjectId, bytes: u64) -> Response {
        let kib = usize::try_from(bytes / 1024).unwrap_or(MAX_PROJECT_KIB).min(MAX_PROJECT_KIB);
        let permits = u32::try_from(kib).unwrap_or(u32::MAX);
        let is_first = self.of_project.is_unused(project);
        let reserved = self.of_node.available_permits() < RESERVED_KIB;
        let of_project =
            self.of_project.try_take(project, permits).filter(|_| is_first || !reserved);
        let of_node = Arc::clone(&self.of_node).try_acquire_many_owned(permits).ok();
        let Some(permits) = of_project.zip(of_node) else {
            tracing::warn!(bytes, "too many large answers are under way: one is refused");
            return Error::Overloaded.into_response();
        };
        let permits = Arc::new(permits);
        let (mut parts, body) = response.into_parts();
        parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes));
        let body = body.map_frame(move |frame| {
            frame
                .map_data(|bytes| Bytes::from_owner(Held { bytes, _permits: Arc::clone(&permits) }))
        });
        Response::from_parts(parts, Body::new(body))
    }
}
