//! What callers see who may not read payloads: the same objects, with `redacted` set, and without
//! payloads, results, error messages and logs.

use serde_json::value::RawValue;

use fencepost_web::auth::Who;

/// An object of the API of which a part is shown only to callers that may read payloads.
pub trait Redact {
    /// Takes that part away.
    fn redact(&mut self);
}

impl<T: Redact> Redact for Vec<T> {
    fn redact(&mut self) {
        self.iter_mut().for_each(T::redact);
    }
}

impl<T: Redact> Redact for Option<T> {
    fn redact(&mut self) {
        self.iter_mut().for_each(T::redact);
    }
}

/// The object as this caller may see it.
#[must_use]
pub fn shown<T: Redact>(who: &Who, mut view: T) -> T {
    if !who.may_read_payloads() {
        view.redact();
    }
    view
}

/// A payload that is not shown.
#[must_use]
pub fn hidden() -> Box<RawValue> {
    RawValue::NULL.to_owned()
}
