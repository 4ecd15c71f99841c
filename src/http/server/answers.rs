//! Large answers under way. What slow readers keep in memory is bounded, for each project and for
//! the node: further large reads and polls are refused until some have been taken.

use std::sync::Arc;

use axum::{
    body::{Body, Bytes, HttpBody},
    http::{HeaderValue, header::CONTENT_LENGTH},
    response::{IntoResponse, Response},
};
use fencepost_domain::{error::Error, ids::ProjectId};
use fencepost_fair::memory::{Memory, Room};
use fencepost_web::wire::poll_answer::MayBeRefused;
use http_body_util::BodyExt;

use crate::server::least_rate::IsLarge;

/// Answers below this many bytes are not counted.
const SMALL_BYTES: u64 = 64 * 1024;
/// KiB of large answers under way, of one project.
pub const MAX_PROJECT_KIB: usize = 32 * 1024;
/// KiB of large answers under way, of one node.
pub const MAX_NODE_KIB: usize = 128 * 1024;

/// The large answers of one node. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Answers(Memory);

impl Default for Answers {
    fn default() -> Self {
        Self(Memory::new(MAX_PROJECT_KIB, MAX_NODE_KIB))
    }
}

/// A large answer, until its last byte is written or the connection ends.
struct Held {
    bytes: Bytes,
    _room: Arc<Room>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

fn is_refusable(response: &Response) -> bool {
    response.extensions().get::<MayBeRefused>().is_some()
}

impl Answers {
    /// Counts a large answer to a read, and one to a poll: its jobs are released if it is refused.
    /// An answer to a write is always sent: what it reports has happened.
    #[must_use]
    pub fn hold(
        &self,
        response: Response,
        is_read: bool,
        project: Option<ProjectId>,
        is_large: Option<&IsLarge>,
    ) -> Response {
        let Some(bytes) = response.body().size_hint().exact().filter(|it| *it > SMALL_BYTES) else {
            return response;
        };
        if let Some(is_large) = is_large {
            is_large.mark();
        }
        match project {
            Some(project) if is_read || is_refusable(&response) => {
                self.keep(response, project, bytes)
            }
            _ => response,
        }
    }

    fn keep(&self, response: Response, project: ProjectId, bytes: u64) -> Response {
        let Some(room) = self.0.try_take(project, bytes) else {
            tracing::warn!(bytes, "too many large answers are under way: one is refused");
            return Error::Overloaded.into_response();
        };
        let room = Arc::new(room);
        let (mut parts, body) = response.into_parts();
        parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes));
        let body = body.map_frame(move |frame| {
            frame.map_data(|bytes| Bytes::from_owner(Held { bytes, _room: Arc::clone(&room) }))
        });
        Response::from_parts(parts, Body::new(body))
    }
}
