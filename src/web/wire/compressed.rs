//! Compressed answers for files that never change while a node runs: the documentation, the
//! OpenAPI documents and the console's assets. Each is compressed once. What a tenant's data is in
//! is never compressed: its length would reveal something of a secret beside what a stranger sent.

use std::{io::Write, sync::LazyLock};

use axum::{
    body::{Body, Bytes},
    extract::Request,
    http::{
        HeaderMap, HeaderValue, Method, StatusCode,
        header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, VARY},
    },
    middleware::Next,
    response::{IntoResponse, Response},
};
use flate2::{Compression, write::GzEncoder};
use http_body_util::BodyExt;
use moka::future::Cache;
use percent_encoding::percent_decode_str;
use tokio::sync::Semaphore;

use fencepost_domain::error::Error;

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
    let is_wanted = request.method() == Method::GET && accepts_gzip(request.headers());
    // One name for each file, however it is written: the cache has no other key.
    let path = percent_decode_str(request.uri().path()).decode_utf8_lossy().into_owned();
    let mut response = next.run(request).await;
    if response.headers().contains_key(CONTENT_ENCODING) {
        return response;
    }
    let kind = response.headers().get(CONTENT_TYPE).filter(|it| is_text(it)).cloned();
    let Some(kind) = kind.filter(|_| response.status() == StatusCode::OK) else { return response };
    response.headers_mut().append(VARY, HeaderValue::from_static("accept-encoding"));
    if !is_wanted {
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

fn is_text(kind: &HeaderValue) -> bool {
    let kind = kind.to_str().unwrap_or_default();
    ["text/", "application/json", "application/javascript", "image/svg+xml"]
        .iter()
        .any(|it| kind.starts_with(it))
}

/// Whether a client accepts gzip: named, or else as `*`, and not with the weight 0.
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let lists = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|it| it.to_str().ok());
    let codings: Vec<_> = lists.flat_map(|it| it.split(',')).map(read_coding).collect();
    let is_accepted = |name: &str| codings.iter().find(|it| it.0 == name).map(|it| it.1);
    is_accepted("gzip").or_else(|| is_accepted("*")).unwrap_or(false)
}

/// The name of a coding, and whether its weight is more than 0.
fn read_coding(text: &str) -> (String, bool) {
    let text = text.to_ascii_lowercase();
    let (name, weight) = text.split_once(';').unwrap_or((&text, ""));
    let weight = weight.trim().strip_prefix("q=").and_then(|it| it.trim().parse().ok());
    (name.trim().to_owned(), weight.is_none_or(|it: f32| it > 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_says_whether_it_accepts_gzip() {
        let accepts = |sent: &'static str| {
            accepts_gzip(&[(ACCEPT_ENCODING, HeaderValue::from_static(sent))].into_iter().collect())
        };
        assert!(accepts("GZIP") && accepts("br, gzip;q=0.5") && accepts("*"));
        assert!(!accepts("br") && !accepts("gzip;Q=0, *") && !accepts("identity"));
        assert!(!accepts_gzip(&HeaderMap::new()));
    }
}
