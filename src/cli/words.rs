//! Values as people read and type them: words on a terminal, parts of a path, and reasons.

use std::io::IsTerminal;

use serde_json::{Value, json};

/// The body of a request with this reason.
pub(super) fn because(reason: Option<&str>) -> Value {
    reason.map_or_else(|| json!({}), |it| json!({ "reason": it }))
}

/// A value as part of a path or query.
pub(super) fn encoded(text: &str) -> String {
    let plain = |it: u8| it.is_ascii_alphanumeric() || b"_-.~".contains(&it);
    text.bytes()
        .map(|it| if plain(it) { char::from(it).to_string() } else { format!("%{it:02X}") })
        .collect()
}

/// A value in words: a text without its quotes, anything else as JSON.
pub(super) fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The state in twelve columns; coloured on a terminal, unless `NO_COLOR` is set (no-color.org).
pub(super) fn coloured(state: &str) -> String {
    let padded = format!("{state:<12}");
    let is_plain = !std::io::stdout().is_terminal()
        || std::env::var_os("NO_COLOR").is_some_and(|it| !it.is_empty());
    let colour = match state {
        _ if is_plain => return padded,
        "succeeded" => 32,
        "dead_letter" => 31,
        "cancelled" => 90,
        "processing" => 36,
        _ => 33,
    };
    format!("\x1b[{colour}m{padded}\x1b[0m")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_person_types_is_fit_for_a_url() {
        assert_eq!(encoded("a b/c?ä"), "a%20b%2Fc%3F%C3%A4");
    }
}
