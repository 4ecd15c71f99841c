//! Cursors of lists. A cursor is signed together with its list and project: it cannot be forged, or
//! used for another list or project.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use chrono::DateTime;
use fencepost_domain::{error::Error, ids::ProjectId};
use fencepost_store::TimePosition;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use uuid::Uuid;

use fencepost_web::app::App;

/// Bytes of a cursor's signature.
const SIGNATURE_BYTES: usize = 16;
/// Bytes of an id.
const ID_BYTES: usize = size_of::<Uuid>();

/// The list and project of a cursor.
#[derive(Debug, Clone, Copy)]
pub struct List(pub ProjectId, pub &'static str);

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
    Error::invalid("cursor", "must be the next_cursor of an earlier page")
}

fn sign(app: &App, List(project_id, name): List, place: &[u8]) -> Hmac<Sha256> {
    // HMAC accepts keys of any length.
    let mut mac =
        Hmac::<Sha256>::new_from_slice(&app.cursor_key).unwrap_or_else(|_| unreachable!());
    mac.update(&project_id.0.to_be_bytes());
    mac.update(name.as_bytes());
    mac.update(place);
    mac
}
