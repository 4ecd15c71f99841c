//! Reading a whole body: in time, within its bounds, decompressed.

use std::time::Duration;

use axum::{
    body::{Body, HttpBody as _},
    extract::Request,
    http::header::EXPECT,
};
use bytes::{Bytes, BytesMut};
use fencepost_domain::error::Error;
use fencepost_identity::credentials::bodies::BodyRoom;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::time::{sleep, timeout};

use super::{
    Closing,
    coding::{self, Decoder},
};

/// The whole body must arrive within this time.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Compressed bytes that are decompressed before room for their content is asked for. They hold at
/// most a thousand times as many.
const MAX_DECODED_AT_ONCE: usize = 256;

/// The rest of a body must arrive within this time once its node stops.
pub const LAST_BODY_TIMEOUT: Duration = Duration::from_secs(1);

/// A whole body, in the room that it needs.
///
/// # Errors
/// [`Error::BodyTimeout`], [`Error::BodyTooLarge`]; [`Error::Unreadable`] when it ends early;
/// [`Error::Overloaded`] without room; [`Error::UnsupportedCoding`]; [`Error::NotReady`] when the
/// node stops meanwhile.
pub async fn read(
    mut request: Request,
    limit_bytes: usize,
    room: Option<BodyRoom>,
) -> Result<Bytes, Error> {
    let closing = request.extensions_mut().remove::<Closing>();
    let decoder = coding::decoder(request.headers(), limit_bytes)?;
    // Who asks whether to send a body is answered before it is sent.
    let is_too_large = request.body().size_hint().lower() > limit_bytes as u64;
    if is_too_large && request.headers().contains_key(EXPECT) {
        return Err(Error::BodyTooLarge { limit_bytes });
    }
    let body = Limited::new(request.into_body(), limit_bytes);
    let collected = async {
        match decoder {
            None => collect(body, limit_bytes, room).await,
            Some(decoder) => collect_coded(body, limit_bytes, room, decoder).await,
        }
    };
    let stopped = async {
        match closing {
            Some(Closing(closing)) => closing.cancelled().await,
            None => std::future::pending().await,
        }
        sleep(LAST_BODY_TIMEOUT).await;
    };
    tokio::select! {
        biased;
        body = timeout(BODY_TIMEOUT, collected) => body.unwrap_or(Err(Error::BodyTimeout)),
        () = stopped => Err(Error::NotReady("the node is stopping")),
    }
}

async fn collect(
    mut body: Limited<Body>,
    limit_bytes: usize,
    room: Option<BodyRoom>,
) -> Result<Bytes, Error> {
    // A single frame is the body, without a copy.
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(part) = next_part(&mut body, limit_bytes).await? {
        if first.is_empty() && rest.is_empty() {
            first = part;
        } else {
            if rest.is_empty() {
                rest.extend_from_slice(&std::mem::take(&mut first));
            }
            rest.extend_from_slice(&part);
        }
        if let Some(room) = &room {
            room.grow((first.len() + rest.len()) as u64).await?;
        }
    }
    Ok(if rest.is_empty() { first } else { rest.freeze() })
}

/// The content of a compressed body.
async fn collect_coded(
    mut body: Limited<Body>,
    limit_bytes: usize,
    room: Option<BodyRoom>,
    mut decoder: Decoder,
) -> Result<Bytes, Error> {
    let mut is_empty = true;
    while let Some(part) = next_part(&mut body, limit_bytes).await? {
        is_empty &= part.is_empty();
        for piece in part.chunks(MAX_DECODED_AT_ONCE) {
            decoder.add(piece)?;
            if let Some(room) = &room {
                room.grow(decoder.len() as u64).await?;
            }
        }
    }
    if is_empty { Ok(Bytes::new()) } else { decoder.finish() }
}

/// The next bytes of a body; none: it has ended.
async fn next_part(body: &mut Limited<Body>, limit_bytes: usize) -> Result<Option<Bytes>, Error> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
            true => Error::BodyTooLarge { limit_bytes },
            false => Error::Unreadable("the body ended early".to_owned()),
        })?;
        if let Ok(part) = frame.into_data() {
            return Ok(Some(part));
        }
    }
    Ok(None)
}
