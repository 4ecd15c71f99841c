//! The page that shows recovery codes, once.

use askama::Template;

#[derive(Template)]
#[template(path = "recovery_codes.html")]
pub struct Codes {
    codes: Vec<String>,
    done: &'static str,
}

impl Codes {
    /// Codes of a first second factor.
    pub fn first(codes: Vec<String>) -> Self {
        Self { codes, done: "From now on, a login needs more than your password." }
    }

    /// Codes that replace earlier ones.
    pub fn others(codes: Vec<String>) -> Self {
        Self { codes, done: "The earlier codes do not work any more." }
    }
}
