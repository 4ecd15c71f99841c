//! Conditional writes of settings, so that two people do not overwrite each other: their `ETag`,
//! `If-Match` and `If-None-Match` (RFC 9110, section 13.1).

use std::collections::BTreeMap;

use axum::{
    Json,
    extract::FromRequestParts,
    http::{
        HeaderValue,
        header::{ETAG, IF_MATCH, IF_NONE_MATCH},
        request::Parts,
    },
    response::{IntoResponse, Response},
};
use fencepost_domain::{error::Error, ids::ProjectId};
use fencepost_engine::settings::in_turn;
use fencepost_web::app::App;
use serde::Serialize;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use utoipa::IntoParams;

use crate::tags::Tags;

/// Bytes of a tag: two settings never have the same by chance.
const TAG_BYTES: usize = 12;

/// A view of something that users change by writing its settings.
pub trait Settings: Serialize {
    /// The fields that users write. The server changes the others.
    const FIELDS: &'static [&'static str];

    /// The field of the view that has the tag.
    fn etag(&mut self) -> &mut String;

    /// The view with its tag, which depends on the settings only.
    #[must_use]
    fn tagged(mut self) -> Self
    where
        Self: Sized,
    {
        let tag = tag(&self, Self::FIELDS);
        *self.etag() = tag;
        self
    }
}

fn tag(view: &impl Serialize, names: &[&str]) -> String {
    let text = serde_json::to_string(view).unwrap_or_default();
    let fields: BTreeMap<String, Box<RawValue>> = serde_json::from_str(&text).unwrap_or_default();
    let mut hash = Sha256::new();
    for name in names {
        let value = fields.get(*name).map_or("", |it| it.get());
        hash.update(format!("{name}:{}:{value}", value.len()));
    }
    let hash = hash.finalize();
    let digits: String = hash.iter().take(TAG_BYTES).map(|it| format!("{it:02x}")).collect();
    format!("\"{digits}\"")
}

/// An answer with the tag of its settings, also as the header `ETag`.
#[derive(Debug)]
pub struct Tagged<T>(pub T);

impl<T: Settings> IntoResponse for Tagged<T> {
    fn into_response(mut self) -> Response {
        let tag = HeaderValue::from_str(self.0.etag());
        let mut response = Json(self.0).into_response();
        if let Ok(tag) = tag {
            response.headers_mut().insert(ETAG, tag);
        }
        response
    }
}

/// The headers of a conditional write.
#[derive(Debug, IntoParams)]
#[expect(dead_code, reason = "it describes the headers in the OpenAPI document")]
#[into_params(parameter_in = Header)]
pub struct Header {
    /// Changes or deletes only settings that have this `etag`; otherwise 412. `*`: any, if they
    /// exist.
    #[param(rename = "If-Match", max_length = 200)]
    if_match: Option<String>,
    /// `*`: 412 if the settings exist, so that a write only creates.
    #[param(rename = "If-None-Match", max_length = 200)]
    if_none_match: Option<String>,
}

/// The conditions of a write.
#[derive(Debug, Clone, Default)]
pub struct Preconditions {
    if_match: Option<Tags>,
    if_none_match: Option<Tags>,
}

impl<S: Sync> FromRequestParts<S> for Preconditions {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Error> {
        let read = |name| Tags::read(&parts.headers, &name);
        Ok(Self { if_match: read(IF_MATCH)?, if_none_match: read(IF_NONE_MATCH)? })
    }
}

impl Preconditions {
    /// Writes settings if the conditions hold. Those who write the same ones under conditions take
    /// turns, also on other nodes; a write without a condition does not wait for them.
    ///
    /// # Errors
    /// [`Error::PreconditionFailed`]; those of reading and writing.
    pub async fn write<T: Settings, Written>(
        &self,
        app: &App,
        (project_id, what): (ProjectId, String),
        read: impl Future<Output = Result<Option<T>, Error>>,
        write: impl Future<Output = Result<Written, Error>>,
    ) -> Result<Written, Error> {
        if self.if_match.is_none() && self.if_none_match.is_none() {
            return write.await;
        }
        let turn = async {
            self.check(read.await?)?;
            write.await
        };
        in_turn(&app.engine, project_id, &what, turn).await
    }

    /// True if they ask whether there are settings at all, whatever these are.
    #[must_use]
    pub fn are_about_existence(&self) -> bool {
        [&self.if_match, &self.if_none_match].iter().any(|it| **it == Some(Tags::Any))
    }

    fn check(&self, current: Option<impl Settings>) -> Result<(), Error> {
        let current = current.map(|mut it| std::mem::take(it.etag()));
        let passes = match (&self.if_match, &self.if_none_match, &current) {
            (Some(_), _, None) => false,
            (if_match, if_none_match, Some(current)) => {
                if_match.as_ref().is_none_or(|it| it.match_strongly(current))
                    && if_none_match.as_ref().is_none_or(|it| !it.match_weakly(current))
            }
            (None, _, None) => true,
        };
        if passes { Ok(()) } else { Err(Error::PreconditionFailed) }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    #[derive(Serialize)]
    struct Lamp {
        colour: &'static str,
        watts: u8,
        hours: u32,
        etag: String,
    }

    impl Settings for Lamp {
        const FIELDS: &'static [&'static str] = &["colour", "watts"];

        fn etag(&mut self) -> &mut String {
            &mut self.etag
        }
    }

    fn lamp(colour: &'static str, watts: u8, hours: u32) -> Lamp {
        Lamp { colour, watts, hours, etag: String::new() }.tagged()
    }

    async fn conditions(name: &str, value: &str) -> Result<Preconditions, Error> {
        let request = Request::builder().header(name, value).body(()).expect("a request");
        Preconditions::from_request_parts(&mut request.into_parts().0, &()).await
    }

    #[test]
    fn a_tag_changes_with_the_settings_and_with_nothing_else() {
        let tag = lamp("red", 5, 1).etag;
        assert_eq!(tag, lamp("red", 5, 2).etag);
        assert_ne!(tag, lamp("red", 6, 1).etag);
        assert_ne!(tag, lamp("blue", 5, 1).etag);
        assert!(tag.starts_with('"') && tag.ends_with('"') && tag.len() == 2 + 2 * TAG_BYTES);
    }

    #[tokio::test]
    async fn conditions_hold_as_the_standard_says() {
        let tag = lamp("red", 5, 1).etag;
        let passes = async |name: &str, value: &str, lamp: Option<Lamp>| {
            conditions(name, value).await.expect("a condition").check(lamp).is_ok()
        };
        let some = || Some(lamp("red", 5, 9));
        for (value, for_some, for_none) in [
            ("*", true, false),
            (&*tag, true, false),
            (&*format!("\"x\", {tag}"), true, false),
            ("\"x\"", false, false),
            // A weak tag is not strong enough for a write.
            (&*format!("W/{tag}"), false, false),
        ] {
            assert_eq!(passes("if-match", value, some()).await, for_some, "{value}");
            assert_eq!(passes("if-match", value, None).await, for_none, "{value}");
        }
        for (value, for_some) in [("*", false), (&*tag, false), ("\"x\"", true)] {
            assert_eq!(passes("if-none-match", value, some()).await, for_some, "{value}");
            assert!(passes("if-none-match", value, None).await, "{value}");
        }
        assert!(conditions("if-match", "x").await.is_err());
    }
}
