//! Cursors of lists. A cursor is signed together with its list, its project and the filters: it
//! cannot be forged, or used for another list or project, or with other filters.

use std::fmt;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use chrono::DateTime;
use fencepost_domain::{error::Error, ids::ProjectId};
use fencepost_store::TimePosition;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use fencepost_web::app::App;

/// Bytes of a cursor's signature.
const SIGNATURE_BYTES: usize = 16;
/// Bytes of an id.
const ID_BYTES: usize = size_of::<Uuid>();

/// Bytes of the hash of filters: a mistake is found, and nothing is kept secret.
const FILTER_BYTES: usize = 8;

/// The list and project of a cursor.
#[derive(Debug, Clone, Copy)]
pub struct List {
    project_id: ProjectId,
    name: &'static str,
    filters: [u8; FILTER_BYTES],
}

impl List {
    /// A list without filters.
    pub fn of(project_id: ProjectId, name: &'static str) -> Self {
        Self { project_id, name, filters: [0; FILTER_BYTES] }
    }

    /// This list, as some filters show it.
    #[must_use]
    pub fn filtered<T: Default + PartialEq + fmt::Debug>(self, filters: &T) -> Self {
        if *filters == T::default() {
            return self;
        }
        let hash = Sha256::digest(format!("{filters:?}"));
        Self { filters: std::array::from_fn(|place| hash[place]), ..self }
    }
}

/// A cursor at an id.
pub fn write_id(app: &App, list: List, id: Uuid) -> String {
    write(app, list, id.as_bytes())
}

/// The id of a cursor, if there is one.
///
/// # Errors
/// [`Error::Invalid`] when it was not made by us.
pub fn read_id(app: &App, list: List, cursor: Option<&str>) -> Result<Option<Uuid>, Error> {
    let Some(cursor) = cursor else { return Ok(None) };
    let bytes = read(app, list, cursor)?;
    Uuid::from_slice(&bytes).map(Some).map_err(|_| invalid())
}

/// A cursor at a position in time.
pub fn write_place(app: &App, list: List, place: TimePosition) -> String {
    let mut bytes = place.id.as_bytes().to_vec();
    bytes.extend(place.at.timestamp_micros().to_be_bytes());
    write(app, list, &bytes)
}

/// The position of a cursor, if there is one.
///
/// # Errors
/// [`Error::Invalid`] when it was not made by us.
pub fn read_place(
    app: &App,
    list: List,
    cursor: Option<&str>,
) -> Result<Option<TimePosition>, Error> {
    let Some(cursor) = cursor else { return Ok(None) };
    let bytes = read(app, list, cursor)?;
    let (id, micros) = bytes.split_at_checked(ID_BYTES).ok_or_else(invalid)?;
    let micros = micros.try_into().map(i64::from_be_bytes).map_err(|_| invalid())?;
    let at = DateTime::from_timestamp_micros(micros).ok_or_else(invalid)?;
    let id = Uuid::from_slice(id).map_err(|_| invalid())?;
    Ok(Some(TimePosition { at, id }))
}

/// A cursor at an id that is a text.
pub fn write_text(app: &App, list: List, id: &str) -> String {
    write(app, list, id.as_bytes())
}

/// The text of a cursor, if there is one.
///
/// # Errors
/// As for [`read_id`].
pub fn read_text(app: &App, list: List, cursor: Option<&str>) -> Result<Option<String>, Error> {
    let Some(cursor) = cursor else { return Ok(None) };
    String::from_utf8(read(app, list, cursor)?).map(Some).map_err(|_| invalid())
}

fn write(app: &App, list: List, place: &[u8]) -> String {
    let mut bytes = place.to_vec();
    bytes.extend(&sign(app, list, place).finalize().into_bytes()[..SIGNATURE_BYTES]);
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

fn read(app: &App, list: List, cursor: &str) -> Result<Vec<u8>, Error> {
    let mut place = BASE64_URL_SAFE_NO_PAD.decode(cursor).map_err(|_| invalid())?;
    let length = place.len().checked_sub(SIGNATURE_BYTES).ok_or_else(invalid)?;
    let signature = place.split_off(length);
    sign(app, list, &place).verify_truncated_left(&signature).map_err(|_| invalid())?;
    Ok(place)
}

fn invalid() -> Error {
    let rule = "must be the next_cursor of an earlier page, with the same filters and order";
    Error::invalid("cursor", rule)
}

fn sign(app: &App, List { project_id, name, filters }: List, place: &[u8]) -> Hmac<Sha256> {
    // HMAC accepts keys of any length.
    let mut mac =
        Hmac::<Sha256>::new_from_slice(&app.cursor_key).unwrap_or_else(|_| unreachable!());
    mac.update(&project_id.0.to_be_bytes());
    mac.update(name.as_bytes());
    mac.update(place);
    if filters != [0; FILTER_BYTES] {
        mac.update(&filters);
    }
    mac
}
