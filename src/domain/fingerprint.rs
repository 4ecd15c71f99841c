//! Fingerprints that group similar dead letters: the job type, the error type, and the message
//! without the parts that differ from job to job.

use sha2::{Digest, Sha256};
use uuid::Uuid;

/// Characters of a message, without its numbers, that count.
const MAX_CHARS: usize = 500;

/// The fingerprint of a failure.
///
/// ```
/// # use fencepost_domain::fingerprint::fingerprint;
/// let of = |message| fingerprint("mail.send", Some("Timeout"), Some(message));
/// assert_eq!(of("no answer from 10.0.0.7 after 30 s"), of("no answer from 10.0.0.12 after 5 s"));
/// assert_ne!(of("no answer"), of("no route"));
/// assert_ne!(of("no answer"), fingerprint("mail.send", Some("Refused"), Some("no answer")));
/// assert_ne!(of("no answer"), fingerprint("mail.read", Some("Timeout"), Some("no answer")));
/// ```
#[must_use]
pub fn fingerprint(job_type: &str, error_type: Option<&str>, message: Option<&str>) -> Uuid {
    let mut hash = Sha256::new();
    for part in [job_type, error_type.unwrap_or_default(), &normalise(message.unwrap_or_default())]
    {
        hash.update(part.len().to_be_bytes());
        hash.update(part.as_bytes());
    }
    let bytes = hash.finalize().first_chunk::<16>().copied().unwrap_or_default();
    Uuid::from_bytes(bytes)
}

/// The message without numbers, ids, quoted values, and differences of case and space.
///
/// ```
/// # use fencepost_domain::fingerprint::normalise;
/// assert_eq!(normalise("User 42 not  found"), "user # not found");
/// assert_eq!(normalise("key \"acme-7\" is taken"), "key \"\" is taken");
/// assert_eq!(normalise("object 0f8fad5b-d9cb-469f-a165-70867728950e"), "object #");
/// assert_eq!(normalise("at 0x7ffe12ab: dead"), "at #: dead");
/// assert_eq!(normalise("no template mail_v30"), "no template mail_#");
/// assert_eq!(normalise("550 mailbox user12@example.com unavailable"), "# mailbox # unavailable");
/// assert_eq!(normalise("can't read 'a' or 'b'"), "can't read '' or ''");
/// ```
#[must_use]
pub fn normalise(message: &str) -> String {
    let unquoted = without_quoted(&message.to_lowercase());
    let words = unquoted.split_whitespace().map(without_numbers).collect::<Vec<_>>();
    words.join(" ").chars().take(MAX_CHARS).collect()
}

/// Text between two quotes of one kind is a value. An apostrophe within a word is no quote.
fn without_quoted(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut before = ' ';
    let mut rest = text.chars();
    while let Some(char) = rest.next() {
        kept.push(char);
        let opens = matches!(char, '"' | '\'' | '`') && !before.is_alphanumeric();
        before = char;
        if !opens {
            continue;
        }
        if let Some(length) = rest.as_str().find(char) {
            rest = rest.as_str()[length..].chars();
            kept.extend(rest.next());
        }
    }
    kept
}

/// A word with each number or id in it replaced by `#`.
fn without_numbers(word: &str) -> String {
    let is_part = |it: char| it.is_ascii_alphanumeric();
    if is_address(word) {
        return "#".to_owned();
    }
    let mut kept = String::with_capacity(word.len());
    let mut rest = word;
    while let Some(first) = rest.chars().next() {
        if !is_part(first) {
            kept.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let end = rest.find(|it| !is_part(it)).unwrap_or(rest.len());
        let (part, after) = rest.split_at(end);
        kept.push_str(if is_number(part) { "#" } else { part });
        rest = after;
    }
    // A date, address or id is one number, however many parts it has.
    let mut joined = kept;
    for separator in ["#-#", "#.#", "#:#", "#/#"] {
        while joined.contains(separator) {
            joined = joined.replace(separator, "#");
        }
    }
    joined
}

/// 30, 250ms, v30, user12, an id. A name such as sha256 is one, too: each message has it.
fn is_number(part: &str) -> bool {
    part.bytes().any(|it| it.is_ascii_digit())
}

/// Whether it is an e-mail address, in whatever brackets.
fn is_address(word: &str) -> bool {
    let inner = word.trim_matches(|it: char| !it.is_alphanumeric());
    inner.split_once('@').is_some_and(|(name, host)| !name.is_empty() && host.contains('.'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_message_has_a_fingerprint_and_numbers_do_not_matter(
            message in ".{0,600}", one in 0_u32.., other in 0_u32..
        ) {
            let of = |number: u32| normalise(&format!("{number} {message}"));
            prop_assert_eq!(of(one), of(other));
        }
    }
}
