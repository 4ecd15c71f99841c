//! Compressed request bodies: `Content-Encoding: gzip`.

use std::io::{self, Write};

use axum::http::{HeaderMap, header::CONTENT_ENCODING};
use bytes::Bytes;
use fencepost_domain::error::Error;
use flate2::write::MultiGzDecoder;

/// The decoder of a body; none: it is sent as it is.
///
/// # Errors
/// [`Error::UnsupportedCoding`] for other codings than gzip.
pub(super) fn decoder(headers: &HeaderMap, limit_bytes: usize) -> Result<Option<Decoder>, Error> {
    let lines = headers.get_all(CONTENT_ENCODING).iter();
    let named = lines.flat_map(|it| it.as_bytes().split(|it| *it == b','));
    let is_one_of = |coding: &[u8], names: [&str; 2]| {
        names.iter().any(|it| coding.trim_ascii().eq_ignore_ascii_case(it.as_bytes()))
    };
    let mut codings = named.filter(|it| !is_one_of(it, ["identity"; 2]));
    match (codings.next(), codings.next()) {
        (None, _) => Ok(None),
        (Some(only), None) if is_one_of(only, ["gzip", "x-gzip"]) => {
            Ok(Some(Decoder(MultiGzDecoder::new(Bounded { bytes: Vec::new(), limit_bytes }))))
        }
        _ => Err(Error::UnsupportedCoding),
    }
}

/// Decompresses a body part by part, up to its limit: a small body may hold a thousand times as
/// much.
pub(super) struct Decoder(MultiGzDecoder<Bounded>);

struct Bounded {
    bytes: Vec<u8>,
    limit_bytes: usize,
}

impl Write for Bounded {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + part.len() > self.limit_bytes {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Decoder {
    /// Adds a part.
    ///
    /// # Errors
    /// [`Error::BodyTooLarge`], and [`Error::Unreadable`] when it is not gzip.
    pub fn add(&mut self, part: &[u8]) -> Result<(), Error> {
        let limit_bytes = self.0.get_ref().limit_bytes;
        self.0.write_all(part).map_err(|error| refused(&error, limit_bytes))
    }

    /// Number of bytes of the content so far.
    pub fn len(&self) -> usize {
        self.0.get_ref().bytes.len()
    }

    /// The whole content.
    ///
    /// # Errors
    /// As for [`Self::add`].
    pub fn finish(self) -> Result<Bytes, Error> {
        let limit_bytes = self.0.get_ref().limit_bytes;
        let content = self.0.finish().map_err(|error| refused(&error, limit_bytes))?;
        Ok(content.bytes.into())
    }
}

fn refused(error: &io::Error, limit_bytes: usize) -> Error {
    match error.kind() {
        io::ErrorKind::FileTooLarge => Error::BodyTooLarge { limit_bytes },
        _ => Error::Unreadable("the body is not valid gzip".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use flate2::{Compression, write::GzEncoder};

    use super::*;

    const LIMIT: usize = 1_000_000;

    fn headers(coding: &'static str) -> HeaderMap {
        [(CONTENT_ENCODING, HeaderValue::from_static(coding))].into_iter().collect()
    }

    fn gzip(content: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(content).expect("it is compressed");
        encoder.finish().expect("it is compressed")
    }

    fn decoded(body: &[u8]) -> Result<Bytes, Error> {
        let mut decoder = decoder(&headers("GZIP"), LIMIT).expect("a coding").expect("gzip");
        body.chunks(7).try_for_each(|it| decoder.add(it))?;
        decoder.finish()
    }

    #[test]
    fn a_body_is_decompressed_up_to_its_limit() {
        let content = b"{\"job_type\": \"t\"}".repeat(100);
        assert_eq!(decoded(&gzip(&content)).expect("its content"), content);
        assert_eq!(decoded(&gzip(&vec![0; LIMIT])).expect("its content").len(), LIMIT);
        let bomb = decoded(&gzip(&vec![0; LIMIT + 1]));
        assert!(matches!(bomb, Err(Error::BodyTooLarge { limit_bytes: LIMIT })));
        let cut = &gzip(&content)[..20];
        for wrong in [&content[..], cut] {
            assert!(matches!(decoded(wrong), Err(Error::Unreadable(_))));
        }
    }

    #[test]
    fn other_codings_are_refused() {
        assert!(decoder(&HeaderMap::new(), LIMIT).is_ok_and(|it| it.is_none()));
        for coding in ["identity", "Identity, identity"] {
            assert!(decoder(&headers(coding), LIMIT).is_ok_and(|it| it.is_none()));
        }
        for coding in ["gzip, identity", "X-GZIP"] {
            assert!(decoder(&headers(coding), LIMIT).is_ok_and(|it| it.is_some()));
        }
        for coding in ["br", "deflate", "gzip, gzip", ""] {
            assert!(matches!(decoder(&headers(coding), LIMIT), Err(Error::UnsupportedCoding)));
        }
    }
}
