//! Compressed answers for files that never change while a node runs: the documentation, the
//! OpenAPI documents and the console's assets. Each is compressed once. Of answers with a tenant's
//! data, only large ones to a GET are compressed: they have no keys or tokens, whose length beside
//! what a stranger sent would reveal something.

use std::{io::Write, sync::LazyLock};

use axum::{
    body::{Body, BodyDataStream, Bytes, HttpBody as _},
    extract::Request,
    http::{
        HeaderMap, HeaderValue, Method, StatusCode,
        header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, ETAG, VARY},
    },
    middleware::Next,
    response::{IntoResponse, Response},
};
use flate2::{Compression, write::GzEncoder};
use futures_util::{StreamExt, stream};
use http_body_util::BodyExt;
use moka::future::Cache;
use percent_encoding::percent_decode_str;
use tokio::sync::Semaphore;

use fencepost_domain::error::Error;

use super::accepted::weight;

/// Files that are remembered: about three times as many as there are.
const MAX_FILES: u64 = 500;
/// Smaller files fit into a packet anyway.
const MIN_BYTES: usize = 1_024;

/// Compressed files by path and content type; pages of the documentation have two.
static FILES: LazyLock<Cache<(String, HeaderValue), Option<Bytes>>> =
    LazyLock::new(|| Cache::new(MAX_FILES));

/// Files that are compressed at the same time: the largest takes some 0.1 s.
static COMPRESSING: Semaphore = Semaphore::const_new(1);

/// Compresses the files of a router for clients that accept gzip.
pub async fn gzip(request: Request, next: Next) -> Response {
    let asked = Asked::by(&request);
    // One name for each file, however it is written: the cache has no other key.
    let path = percent_decode_str(request.uri().path()).decode_utf8_lossy().into_owned();
    let mut response = next.run(request).await;
    if response.headers().contains_key(CONTENT_ENCODING) {
        return response;
    }
    let kind = response.headers().get(CONTENT_TYPE).filter(|it| is_text(it)).cloned();
    let Some(kind) = kind.filter(|_| response.status() == StatusCode::OK) else { return response };
    response.headers_mut().append(VARY, HeaderValue::from_static("accept-encoding"));
    if asked == Asked::Head {
        response.headers_mut().remove(CONTENT_LENGTH);
    }
    if asked != Asked::Gzip {
        return response;
    }
    let (mut head, body) = response.into_parts();
    let Ok(plain) = body.collect().await else {
        return Error::internal(std::io::Error::other("a file could not be read")).into_response();
    };
    let plain = plain.to_bytes();
    let compressed = FILES.get_with((path, kind), compress(plain.clone())).await;
    if compressed.is_some() {
        head.headers.remove(CONTENT_LENGTH);
        head.headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    Response::from_parts(head, Body::from(compressed.unwrap_or(plain)))
}

/// None: it is not worth it.
async fn compress(plain: Bytes) -> Option<Bytes> {
    if plain.len() < MIN_BYTES {
        return None;
    }
    let work = move || {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(&plain).and_then(|()| encoder.finish()).ok()
    };
    let _turn = COMPRESSING.acquire().await;
    tokio::task::spawn_blocking(work).await.ok().flatten().map(Bytes::from)
}

/// Smaller answers cost more than they save.
const MIN_LIST_BYTES: u64 = 16 * 1024;
/// Bytes that are compressed at a time: other requests go on in between.
const PART_BYTES: usize = 64 * 1024;

/// The form of the answer that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// It changes something, or cannot be compressed.
    Never,
    /// It reads, and does not accept gzip.
    Plain,
    /// It asks for the head of an answer that would be compressed.
    Head,
    /// It asks for a compressed answer.
    Gzip,
}

impl Asked {
    /// The answer that this request asks for.
    #[must_use]
    pub fn by(request: &Request) -> Self {
        match *request.method() {
            Method::GET if accepts_gzip(request.headers()) => Self::Gzip,
            Method::HEAD if accepts_gzip(request.headers()) => Self::Head,
            Method::GET | Method::HEAD => Self::Plain,
            _ => Self::Never,
        }
    }

    /// The answer as it was asked for. It must be a large list.
    #[must_use]
    pub fn give(self, mut response: Response) -> Response {
        if self != Self::Never {
            response.headers_mut().append(VARY, HeaderValue::from_static("accept-encoding"));
        }
        match self {
            Self::Never | Self::Plain => response,
            // The length is known once it is compressed.
            Self::Head => {
                response.headers_mut().remove(CONTENT_LENGTH);
                response
            }
            Self::Gzip => compressing(response),
        }
    }
}

/// True if an answer is a list that is worth it, or the head of one. An answer with a tag stays as
/// its bytes are.
#[must_use]
pub fn is_large_list(response: &Response) -> bool {
    let headers = response.headers();
    let declared = headers.get(CONTENT_LENGTH).and_then(|it| it.to_str().ok()?.parse().ok());
    let size = declared.or_else(|| response.body().size_hint().exact());
    let is_json = headers.get(CONTENT_TYPE).is_some_and(|it| it == "application/json");
    is_json
        && size.is_some_and(|it| it >= MIN_LIST_BYTES)
        && !headers.contains_key(CONTENT_ENCODING)
        && !headers.contains_key(ETAG)
}

/// Compresses an answer while it is sent, part by part.
fn compressing(response: Response) -> Response {
    let (mut head, body) = response.into_parts();
    head.headers.remove(CONTENT_LENGTH);
    head.headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    let encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let parts = (body.into_data_stream(), Bytes::new(), Some(encoder));
    Response::from_parts(head, Body::from_stream(stream::try_unfold(parts, compress_part)))
}

type Parts = (BodyDataStream, Bytes, Option<GzEncoder<Vec<u8>>>);

/// The next compressed part; none after the last one.
async fn compress_part(
    (mut body, mut rest, encoder): Parts,
) -> Result<Option<(Bytes, Parts)>, axum::Error> {
    let Some(mut encoder) = encoder else { return Ok(None) };
    loop {
        if rest.is_empty() {
            match body.next().await.transpose()? {
                Some(data) => rest = data,
                None => {
                    let last = encoder.finish().map_err(axum::Error::new)?;
                    return Ok(Some((last.into(), (body, rest, None))));
                }
            }
        }
        let part = rest.split_to(rest.len().min(PART_BYTES));
        encoder.write_all(&part).map_err(axum::Error::new)?;
        let made = std::mem::take(encoder.get_mut());
        if !made.is_empty() {
            return Ok(Some((made.into(), (body, rest, Some(encoder)))));
        }
    }
}

fn is_text(kind: &HeaderValue) -> bool {
    let kind = kind.to_str().unwrap_or_default();
    ["text/", "application/json", "application/javascript", "image/svg+xml"]
        .iter()
        .any(|it| kind.starts_with(it))
}

/// True if a client accepts gzip: named, or else as `*`, and not with the weight 0.
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let mut names = ["gzip", "x-gzip", "*"].into_iter();
    names.find_map(|it| weight(headers, &ACCEPT_ENCODING, it)).is_some_and(|it| it > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_says_whether_it_accepts_gzip() {
        let accepts = |sent: &'static str| {
            accepts_gzip(&[(ACCEPT_ENCODING, HeaderValue::from_static(sent))].into_iter().collect())
        };
        assert!(accepts("GZIP") && accepts("br, gzip;q=0.5") && accepts("*") && accepts("x-gzip"));
        assert!(!accepts("br") && !accepts("gzip;Q=0, *") && !accepts("identity"));
        assert!(!accepts_gzip(&HeaderMap::new()));
    }
}
