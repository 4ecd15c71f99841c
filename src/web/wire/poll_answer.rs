//! The answer to a poll: until the connection takes its bytes, its jobs can still be released.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    http::{HeaderValue, header::CONTENT_TYPE},
    response::Response,
};
use fencepost_domain::error::Error;
use hyper::body::{Frame, SizeHint};
use serde::Serialize;

use fencepost_engine::dispatch::PollAnswer;

/// In the extensions of an answer that may be replaced by a refusal: nothing of it is lost.
#[derive(Debug, Clone, Copy)]
pub struct MayBeRefused;

/// An answer with jobs. If it is dropped before it is sent, they are released without counting
/// failures.
///
/// # Errors
/// [`Error::Internal`] when the reply is not JSON; the jobs are released.
pub fn respond(reply: &impl Serialize, answer: PollAnswer) -> Result<Response, Error> {
    let bytes = serde_json::to_vec(reply).map_err(Error::internal)?;
    let body = PollBody { bytes: Some(bytes.into()), answer: Some(answer) };
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.extensions_mut().insert(MayBeRefused);
    Ok(response)
}

/// The bytes of the answer. Until the connection takes them the jobs can still be released: a
/// client that has disconnected never gets them.
struct PollBody {
    bytes: Option<Bytes>,
    answer: Option<PollAnswer>,
}

impl HttpBody for PollBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(answer) = self.answer.take() {
            answer.delivered();
        }
        Poll::Ready(self.bytes.take().map(|it| Ok(Frame::data(it))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |it| it.len() as u64))
    }
}
