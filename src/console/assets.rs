//! Styles and scripts: our own, and the two libraries in `assets/vendor/`, as published. Their URLs
//! contain a hash of the content, so browsers cache them forever.

use std::{collections::HashMap, sync::LazyLock};

use axum::{
    body::Bytes,
    extract::Path,
    http::{
        HeaderValue,
        header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName},
    },
    response::{IntoResponse, Response},
};
use rust_embed::RustEmbed;
use sha2::{Digest, Sha256};

use fencepost_domain::error::Error;

#[derive(RustEmbed)]
#[folder = "../../assets/"]
#[include = "*.js"]
#[include = "*.css"]
#[include = "*.svg"]
struct Files;

#[derive(RustEmbed)]
#[folder = "../../examples/"]
#[include = "*/worker.py"]
#[include = "*/worker.ts"]
#[include = "*/worker.sh"]
struct Workers;

/// A year: the content of a URL never changes.
const FOR_GOOD: HeaderValue = HeaderValue::from_static("public, max-age=31536000, immutable");
/// Characters of the hash in a URL.
const SHOWN_HASH_CHARS: usize = 12;

struct Asset {
    kind: &'static str,
    body: Bytes,
}

/// By the name in the URL: the file's, and its hash.
static ASSETS: LazyLock<HashMap<String, Asset>> = LazyLock::new(|| {
    let read = |name: std::borrow::Cow<'static, str>| {
        let body = Bytes::from(Files::get(&name)?.data.into_owned());
        Some((hashed(&name, &body), Asset { kind: kind_of(&name), body }))
    };
    Files::iter().filter_map(read).collect()
});

static ADDRESSES: LazyLock<HashMap<String, String>> = LazyLock::new(|| {
    let address = |hashed: &String| {
        let (_, name) = hashed.split_once('/')?;
        Some((name.to_owned(), format!("/console/assets/{hashed}")))
    };
    ASSETS.keys().filter_map(address).collect()
});

fn hashed(name: &str, body: &[u8]) -> String {
    let hash: String = Sha256::digest(body).iter().map(|it| format!("{it:02x}")).collect();
    format!("{}/{name}", &hash[..SHOWN_HASH_CHARS])
}

fn kind_of(name: &str) -> &'static str {
    match name.rsplit_once('.').map_or("", |it| it.1) {
        "js" => "text/javascript; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        _ => "image/svg+xml",
    }
}

/// The URL of a file of `assets/`.
pub fn address(name: &str) -> &'static str {
    ADDRESSES.get(name).map_or("", String::as_str)
}

/// A file of `assets/`.
///
/// # Errors
/// [`Error::NoSuchRoute`].
pub async fn get(Path(name): Path<String>) -> Result<Response, Error> {
    let asset = ASSETS.get(&name).ok_or(Error::NoSuchRoute)?;
    let headers = [(CONTENT_TYPE, HeaderValue::from_static(asset.kind)), (CACHE_CONTROL, FOR_GOOD)];
    Ok((headers, asset.body.clone()).into_response())
}

/// An example worker, as text.
///
/// # Errors
/// [`Error::NoSuchRoute`].
pub async fn worker(Path(name): Path<String>) -> Result<Response, Error> {
    let path = Workers::iter().find(|it| it.ends_with(&format!("/{name}")));
    let file = path.and_then(|it| Workers::get(&it)).ok_or(Error::NoSuchRoute)?;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    let headers: [(HeaderName, HeaderValue); 1] = [(CONTENT_TYPE, plain)];
    Ok((headers, file.data.into_owned()).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vendored_files_are_those_that_were_published() {
        let sums = include_str!("../../assets/vendor/SHA256SUMS");
        let mut checked = 0;
        for line in sums.lines() {
            let (sum, name) = line.split_once("  ").expect("a sum and a name");
            let file = Files::get(&format!("vendor/{name}")).expect("a vendored file");
            let hash: String =
                Sha256::digest(&file.data).iter().map(|it| format!("{it:02x}")).collect();
            assert_eq!(hash, sum, "{name}");
            checked += 1;
        }
        assert_eq!(checked, Files::iter().filter(|it| it.starts_with("vendor/")).count());
    }
}
