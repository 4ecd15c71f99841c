//! Extractors like axum's own, but every refusal is an [`Error`] that names the field.

use std::{convert::Infallible, fmt, str::FromStr, sync::LazyLock, thread::available_parallelism};

use axum::{
    extract::{FromRequest, FromRequestParts, RawPathParams, Request},
    http::{Extensions, HeaderMap, header::CONTENT_TYPE, request::Parts},
};
use bytes::Bytes;
use fencepost_domain::{
    error::Error,
    ids::{
        AccountId, BatchId, DeliveryId, EndpointId, IdentityId, IncidentId, InvitationId, JobId,
        KeyId, OperationId, PasskeyId, SessionId, WorkflowId,
    },
    limits,
};
use fencepost_identity::credentials::bodies::BodyRoom;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor},
    forward_to_deserialize_any,
};
use sha2::{Digest, Sha256};
use tokio::{sync::Semaphore, time::timeout};
use utoipa::ToSchema;

pub use super::names::{GroupInPath, NameInPath, refuse_controls};

use crate::{
    auth::{BodyMeter, IgnoresUnknownFields, RoomForChange},
    wire::{
        body::{self, BODY_TIMEOUT},
        bounds, json_words,
        unknown_fields::{KnownFields, Skipped},
    },
};

/// Bytes of a body that take well under a millisecond to parse and to hash.
const MAX_BYTES_BESIDE_OTHERS: usize = 65_536;
/// Turns of larger bodies, for half of the cores: the others are left to all other requests.
static LARGE_BODIES: LazyLock<Semaphore> =
    LazyLock::new(|| Semaphore::new(available_parallelism().map_or(1, |it| it.get().div_ceil(2))));

/// A request body.
pub trait RequestBody: DeserializeOwned + ToSchema {
    /// Its maximum size, in bytes.
    const MAX_BYTES: usize = limits::MAX_BODY_BYTES;
    /// Whether unknown fields are refused from every key: without one, something else would happen.
    const IS_ALWAYS_STRICT: bool = false;
    /// True for calls of workers: a newer library may send fields that this server does not know.
    /// They are skipped, and each is logged once. What looks like a misspelt field is refused.
    const IS_OF_WORKERS: bool = false;
    /// True for a list whose entries fail alone, also for bytes that are no UTF-8.
    const HAS_ENTRIES: bool = false;

    /// Hands its entries the mark that stands for such bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] names a field beside the entries that has one.
    fn mark_entries(&mut self, _mark: char) -> Result<(), Error> {
        Ok(())
    }
}

/// A JSON request body.
#[derive(Debug)]
pub struct Json<T>(pub T);

impl<T: RequestBody, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Error;

    async fn from_request(request: Request, _: &S) -> Result<Self, Error> {
        if !is_json(request.headers()) {
            return Err(Error::UnsupportedMediaType);
        }
        let unknown = UnknownFields::of::<T>(&request);
        let body = read_metered(request, T::MAX_BYTES).await?;
        let (body, mark) =
            if T::HAS_ENTRIES { super::produced::mark_broken(body) } else { (body, None) };
        let mut read: T = parse(&body, unknown).await?;
        if let Some(mark) = mark {
            read.mark_entries(mark)?;
        }
        Ok(Self(read))
    }
}

/// A JSON request body that may be absent.
#[derive(Debug)]
pub struct OptionalJson<T>(pub T);

impl<T: RequestBody + Default, S: Send + Sync> FromRequest<S> for OptionalJson<T> {
    type Rejection = Error;

    async fn from_request(request: Request, _: &S) -> Result<Self, Error> {
        let is_json = is_json(request.headers());
        let unknown = UnknownFields::of::<T>(&request);
        let body = read_metered(request, T::MAX_BYTES).await?;
        if body.is_empty() {
            return Ok(Self(T::default()));
        }
        if !is_json {
            return Err(Error::UnsupportedMediaType);
        }
        parse(&body, unknown).await.map(Self)
    }
}

/// A JSON request body, and its fingerprint: SHA-256 of path and body.
#[derive(Debug)]
pub struct Fingerprinted<T> {
    /// The body, read.
    pub request: T,
    /// See [`Fingerprinted`].
    pub fingerprint: [u8; 32],
}

impl<T: RequestBody, S: Send + Sync> FromRequest<S> for Fingerprinted<T> {
    type Rejection = Error;

    async fn from_request(request: Request, _: &S) -> Result<Self, Error> {
        if !is_json(request.headers()) {
            return Err(Error::UnsupportedMediaType);
        }
        let unknown = UnknownFields::of::<T>(&request);
        let mut hash = Sha256::new_with_prefix(below_project(request.uri().path()));
        let body = read_metered(request, T::MAX_BYTES).await?;
        apart(&body, |body| hash.update(body)).await?;
        let fingerprint = hash.finalize().into();
        parse(&body, unknown).await.map(|request| Self { request, fingerprint })
    }
}

/// The fingerprint of a request without a body: SHA-256 of its path.
#[derive(Debug)]
pub struct BarePath(pub [u8; 32]);

impl<S: Send + Sync> FromRequestParts<S> for BarePath {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Error> {
        Ok(Self(Sha256::digest(below_project(parts.uri.path())).into()))
    }
}

/// The path below `/v1` or `/v1/projects/{project}`, which are two names of one route.
fn below_project(path: &str) -> &str {
    let below = path.strip_prefix("/v1").unwrap_or(path);
    let Some(named) = below.strip_prefix("/projects/") else { return below };
    named.find('/').map_or(below, |at| &named[at..])
}

/// The treatment of a body's fields that this API does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnknownFields {
    /// The request is refused.
    Refused,
    /// The fields are skipped: the key says so.
    Ignored,
    /// The fields are skipped, and each is logged once; a misspelt one is refused.
    Logged,
}

/// Extracts the treatment of entries that workers send in a list.
impl<S: Send + Sync> FromRequestParts<S> for UnknownFields {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::Logged.unless_ignored(&parts.extensions))
    }
}

impl UnknownFields {
    /// As the key of the request says.
    fn of<T: RequestBody>(request: &Request) -> Self {
        let by_default = if T::IS_OF_WORKERS { Self::Logged } else { Self::Refused };
        match T::IS_ALWAYS_STRICT {
            true => by_default,
            false => by_default.unless_ignored(request.extensions()),
        }
    }

    fn unless_ignored(self, extensions: &Extensions) -> Self {
        extensions.get::<IgnoresUnknownFields>().map_or(self, |_| Self::Ignored)
    }
}

/// Whether a body is declared as JSON.
#[must_use]
pub fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(CONTENT_TYPE).and_then(|it| it.to_str().ok()) else {
        return false;
    };
    let essence = value.split(';').next().unwrap_or_default().trim();
    let subtype = essence.get("application/".len()..).unwrap_or_default();
    essence.get(.."application/".len()).is_some_and(|it| it.eq_ignore_ascii_case("application/"))
        && (subtype.eq_ignore_ascii_case("json") || subtype.to_ascii_lowercase().ends_with("+json"))
}

/// A whole body, counted if its size was not known before.
async fn read_metered(mut request: Request, limit_bytes: usize) -> Result<Bytes, Error> {
    let meter = request.extensions_mut().remove::<BodyMeter>();
    let room = request.extensions_mut().remove::<BodyRoom>();
    let change = request.extensions_mut().remove::<RoomForChange>();
    let body = body::read(request, limit_bytes, room).await?;
    if let Some(change) = change {
        change.check(body.len()).await?;
    }
    if let Some(meter) = meter {
        meter.count(body.len() as u64).await?;
    }
    Ok(body)
}

/// A JSON object only: serde's derive also accepts an array of the fields.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(ObjectOnly(deserializer)).map(Self)
    }
}

/// A deserializer, or its visitor, that accepts an object only.
struct ObjectOnly<T>(T);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for ObjectOnly<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_map(ObjectOnly(visitor))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_struct(name, fields, ObjectOnly(visitor))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for ObjectOnly<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.0.visit_map(map)
    }
}

/// Works on a body. On a large one, other requests are served by another thread meanwhile; needs a
/// runtime of several threads.
///
/// # Errors
/// [`Error::Overloaded`] after [`BODY_TIMEOUT`].
async fn apart<T>(body: &[u8], work: impl FnOnce(&[u8]) -> T) -> Result<T, Error> {
    if body.len() <= MAX_BYTES_BESIDE_OTHERS {
        return Ok(work(body));
    }
    let turn = timeout(BODY_TIMEOUT, LARGE_BODIES.acquire()).await;
    let _turn = turn.map_err(|_| Error::Overloaded)?;
    Ok(tokio::task::block_in_place(|| work(body)))
}

async fn parse<T: RequestBody>(body: &[u8], unknown: UnknownFields) -> Result<T, Error> {
    apart(body, |body| parse_here(body, unknown)).await?
}

/// Parses once; only what cannot be read so is parsed again: without its unknown fields, with
/// integers that are written as fractions, or to find the field.
pub(super) fn parse_here<T: DeserializeOwned + ToSchema>(
    body: &[u8],
    unknown: UnknownFields,
) -> Result<T, Error> {
    let json = || serde_json::Deserializer::from_slice(body);
    if let Ok(Object(value)) = serde_json::from_slice::<Object<T>>(body) {
        return Ok(value);
    }
    if body.is_empty() {
        return Err(Error::Unreadable("the body is empty: it must be a JSON object".to_owned()));
    }
    if let Err(error) = serde_json::from_slice::<IgnoredAny>(body) {
        return Err(Error::Unreadable(format!("the body is not valid JSON: {error}")));
    }
    let skipped = match unknown {
        UnknownFields::Refused => Skipped::None,
        UnknownFields::Ignored => Skipped::All,
        UnknownFields::Logged => Skipped::AllButMisspelt,
    };
    let read = serde_path_to_error::deserialize::<_, Object<T>>(KnownFields(&mut json(), skipped));
    read.map(|it| it.0).map_err(|error| {
        let message = error.inner().to_string();
        field_error(error.path(), &message, || bounds::of::<T>(error.path()))
    })
}

/// Names the field: the path leads to it, or to the object in which it is unknown or missing.
fn field_error(
    path: &serde_path_to_error::Path,
    message: &str,
    bounds: impl FnOnce() -> Option<bounds::Range>,
) -> Error {
    let message = message.split(" at line ").next().unwrap_or(message);
    let parent = path.to_string();
    let parent = if parent == "." { String::new() } else { parent };
    let named = ["unknown field `", "missing field `", "duplicate field `"]
        .iter()
        .find_map(|it| message.strip_prefix(it)?.split('`').next());
    let field = match named {
        Some(name) if parent.is_empty() => name.to_owned(),
        // The path may end in the unknown field itself.
        Some(name) if parent == name || parent.ends_with(&format!(".{name}")) => parent,
        Some(name) => format!("{parent}.{name}"),
        None if parent.is_empty() => "body".to_owned(),
        None => parent,
    };
    let without = bounds::Range { min: None, max: None };
    let unfit = json_words::unfit_number(message);
    let unfit = unfit.and_then(|it| it.within(&bounds().unwrap_or(without)));
    Error::invalid(field, unfit.unwrap_or_else(|| json_words::rewrite(message)))
}

/// A query string.
#[derive(Debug)]
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let joined = join_repeated(parts.uri.query().unwrap_or_default());
        let read = match joined.and_then(|it| format!("/?{it}").parse().ok()) {
            Some(uri) => axum::extract::Query::<T>::try_from_uri(&uri),
            None => axum::extract::Query::<T>::from_request_parts(parts, state).await,
        };
        match read {
            Ok(axum::extract::Query(query)) => Ok(Self(query)),
            Err(rejection) => {
                let text = rejection.body_text();
                let text =
                    text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
                let (field, message) = text.split_once(": ").unwrap_or(("query", text));
                let named = ["unknown field `", "duplicate field `"]
                    .iter()
                    .find_map(|it| message.strip_prefix(it).or(text.strip_prefix(it)));
                let missing = text.strip_prefix("missing field `");
                if let Some(field) = missing.and_then(|it| it.split('`').next()) {
                    return Err(Error::invalid(field, "is missing"));
                }
                let field = named.and_then(|it| it.split('`').next()).unwrap_or(field);
                Err(Error::invalid(field, json_words::rewrite(message)))
            }
        }
    }
}

/// Parameters that may be repeated: clients write lists in either way.
const LISTS: [&str; 2] = ["state", "states"];

/// Joins repeated lists of a query: each is sent once, with commas between its values. None: no
/// list is repeated.
fn join_repeated(query: &str) -> Option<String> {
    let pairs = || form_urlencoded::parse(query.as_bytes());
    let of = |list: &str| pairs().filter(|(name, _)| name == list).map(|it| it.1).collect();
    let lists = LISTS.map(|list| (list, of(list)));
    if lists.iter().all(|(_, values): &(_, Vec<_>)| values.len() <= 1) {
        return None;
    }
    let others = pairs().filter(|(name, _)| !LISTS.contains(&name.as_ref()));
    let mut joined = form_urlencoded::Serializer::new(String::new());
    joined.extend_pairs(others);
    joined
        .extend_pairs(lists.iter().filter(|it| !it.1.is_empty()).map(|it| (it.0, it.1.join(","))));
    Some(joined.finish())
}

/// An id in a path.
trait PathId: FromStr {
    /// The name of the parameter.
    const PARAMETER: &'static str;

    /// A malformed id is answered like an unknown one.
    fn missing() -> Error;
}

macro_rules! path_ids {
    ($($(#[$doc:meta])* $extractor:ident($id:ty): $parameter:literal, $missing:ident;)*) => {
        $(
            impl PathId for $id {
                const PARAMETER: &'static str = $parameter;

                fn missing() -> Error {
                    Error::$missing
                }
            }

            $(#[$doc])*
            #[derive(Debug, Clone, Copy)]
            pub struct $extractor(pub $id);

            impl<S: Send + Sync> FromRequestParts<S> for $extractor {
                type Rejection = Error;

                async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
                    id_in_path(parts, state).await.map(Self)
                }
            }
        )*
    };
}

path_ids! {
    /// The job that the path names.
    JobInPath(JobId): "job_id", JobNotFound;
    /// The workflow that the path names.
    WorkflowInPath(WorkflowId): "workflow_id", WorkflowNotFound;
    /// The batch that the path names.
    BatchInPath(BatchId): "batch_id", BatchNotFound;
    /// The operation that the path names.
    OperationInPath(OperationId): "operation_id", OperationNotFound;
    /// The endpoint that the path names.
    EndpointInPath(EndpointId): "endpoint_id", EndpointNotFound;
    /// The delivery that the path names.
    DeliveryInPath(DeliveryId): "delivery_id", DeliveryNotFound;
    /// The incident that the path names.
    IncidentInPath(IncidentId): "incident_id", AlarmNotFound;
    /// The key that the path names.
    KeyInPath(KeyId): "key_id", KeyNotFound;
    /// The member that the path names.
    AccountInPath(AccountId): "account_id", MemberNotFound;
    /// The invitation that the path names.
    InvitationInPath(InvitationId): "invitation_id", InvitationNotFound;
    /// The session that the path names.
    SessionInPath(SessionId): "session_id", SessionNotFound;
    /// The identity that the path names.
    IdentityInPath(IdentityId): "identity_id", IdentityNotFound;
    /// The passkey that the path names.
    PasskeyInPath(PasskeyId): "passkey_id", PasskeyNotFound;
}

async fn id_in_path<Id: PathId, S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<Id, Error> {
    let params =
        RawPathParams::from_request_parts(parts, state).await.map_err(|_| Id::missing())?;
    let id = params.iter().find(|(name, _)| *name == Id::PARAMETER).map(|(_, value)| value);
    let id = id.ok_or_else(Id::missing)?;
    id.parse().map_err(|_| Id::missing().naming(id))
}

/// Reads a field that was sent, though it may be null. Name it in `deserialize_with`, beside
/// `default`.
pub fn sent<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

#[cfg(test)]
mod tests {
    use super::below_project;

    #[test]
    fn both_names_of_a_route_are_one_path() {
        let check = |path: &str, expected: &str| assert_eq!(below_project(path), expected);
        check("/v1/jobs", "/jobs");
        check("/v1/projects/acme/jobs", "/jobs");
        check("/v1/projects/jobs/queues/a/purge", "/queues/a/purge");
        check("/v1/queues/jobs/purge", "/queues/jobs/purge");
    }
}
