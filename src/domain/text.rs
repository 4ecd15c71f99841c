//! Rules for texts before they are stored: no NUL, no control characters, a bounded length; and how
//! long ones are cut. Payloads are opaque and never pass through here, except that their depth is
//! counted.

use unicode_properties::{GeneralCategory, UnicodeGeneralCategory};

use super::limits;

/// Why a name cannot be accepted. The message is meant for the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidText {
    /// An empty string where a name is needed.
    #[error("must not be empty")]
    Empty,
    /// More characters than the bound.
    #[error("must be at most {max} characters, has {actual}")]
    TooLong {
        /// The bound, in characters.
        max: usize,
        /// The actual length, in characters.
        actual: usize,
    },
    /// U+0000 or another control character.
    #[error("must not contain control characters")]
    ControlCharacter,
    /// A web address, or a character that changes how the text around it reads.
    #[error(
        "must not contain `://`, or characters that change the direction or the line of a text"
    )]
    Misleading,
    /// A character that changes the direction or the line of a text.
    #[error("must not contain characters that change the direction or the line of a text")]
    NotOneLine,
}

/// Checks a name: 1 to `max_chars` characters, none of them a control character.
///
/// # Errors
/// [`InvalidText`] says which rule was broken.
pub fn check_name(text: &str, max_chars: usize) -> Result<(), InvalidText> {
    if text.is_empty() {
        return Err(InvalidText::Empty);
    }
    check_text(text, max_chars)
}

/// Checks a name that is shown to strangers, such as a project's in an invitation: as
/// [`check_name`], and neither a link nor characters that hide what it is.
///
/// # Errors
/// [`InvalidText`] says which rule was broken.
///
/// ```
/// # use fencepost_domain::text::{InvalidText::Misleading, check_public_name};
/// assert_eq!(check_public_name("Ärzte & Co. 🚀", 100), Ok(()));
/// assert_eq!(check_public_name("locked: https://evil.example", 100), Err(Misleading));
/// assert_eq!(check_public_name("a\u{202e}b", 100), Err(Misleading));
/// ```
pub fn check_public_name(text: &str, max_chars: usize) -> Result<(), InvalidText> {
    check_name(text, max_chars)?;
    if text.contains("://") || text.chars().any(misleads) {
        return Err(InvalidText::Misleading);
    }
    Ok(())
}

/// A name as mails show it: mail programs make a link of what looks like a host of the internet, so
/// its dots are in brackets.
///
/// ```
/// # use fencepost_domain::text::unlinked;
/// assert_eq!(unlinked("go to (www.evil.com/login)!"), "go to (www[.]evil[.]com/login)!");
/// assert_eq!(unlinked("a@evil.COM:8443, evil.io."), "a@evil[.]COM:8443, evil[.]io.");
/// for name in ["St.Gallen GmbH", "Node.js 2.0", "e.g. ...", "acme", "v1.2", "And so on."] {
///     assert_eq!(unlinked(name), name);
/// }
/// ```
#[must_use]
pub fn unlinked(name: &str) -> String {
    let is_of_host = |it: char| it.is_alphanumeric() || it == '-' || it == '.';
    let (mut shown, mut rest) = (String::new(), name);
    while !rest.is_empty() {
        let end = rest.find(|it| !is_of_host(it)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        let host = word.trim_end_matches('.');
        let last = host.rsplit_once('.').map(|it| it.1.to_ascii_lowercase());
        if last.is_some_and(|it| tld::exist(&it)) {
            shown += &host.replace('.', "[.]");
            shown += &word[host.len()..];
        } else {
            shown += word;
        }
        let end = after.find(is_of_host).unwrap_or(after.len());
        shown += &after[..end];
        rest = &after[end..];
    }
    shown
}

/// Checks a sentence that is shown in one line: as [`check_name`], with something to read, and
/// without characters that change how the line reads.
///
/// # Errors
/// [`InvalidText`] says which rule was broken.
///
/// ```
/// # use fencepost_domain::text::{InvalidText::{Empty, NotOneLine}, check_line};
/// assert_eq!(check_line("...", 100), Ok(()));
/// assert_eq!(check_line("see https://status.example/7 🚀", 100), Ok(()));
/// assert_eq!(check_line(" \u{200b}", 100), Err(Empty));
/// assert_eq!(check_line("a\u{2028}b", 100), Err(NotOneLine));
/// assert_eq!(check_line("a\u{61c}b", 100), Err(NotOneLine));
/// ```
pub fn check_line(text: &str, max_chars: usize) -> Result<(), InvalidText> {
    let is_hidden = |it: char| it != '.' && misleading_char(it.encode_utf8(&mut [0; 4])).is_some();
    let is_blank = |it: char| it.is_whitespace() || is_hidden(it);
    check_name(text, max_chars)?;
    match text {
        text if text.chars().any(misleads) => Err(InvalidText::NotOneLine),
        text if text.chars().all(is_blank) => Err(InvalidText::Empty),
        _ => Ok(()),
    }
}

/// Marks, embeddings, overrides and isolates of direction; separators of lines and paragraphs.
const fn misleads(it: char) -> bool {
    matches!(
        it,
        '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}'
    )
}

/// Letters and marks that are shown as nothing, or as a space: the joiner of graphemes, the fillers
/// of Hangul, and the empty pattern of Braille.
const BLANKS: [char; 6] = ['\u{34f}', '\u{115f}', '\u{1160}', '\u{2800}', '\u{3164}', '\u{ffa0}'];

/// A character of a name that makes it look like another one, or `.` for a step of a path: white
/// space at an end, and else the first that is not shown, such as those of zero width and those
/// that change the direction.
///
/// ```
/// # use fencepost_domain::text::misleading_char;
/// assert_eq!(misleading_char("mail out"), None);
/// assert_eq!(misleading_char("Ärzte 🚀"), None);
/// assert_eq!(misleading_char(" "), Some(' '));
/// assert_eq!((misleading_char(".."), misleading_char("a.b")), (Some('.'), None));
/// assert_eq!(misleading_char("mail\u{a0}"), Some('\u{a0}'));
/// assert_eq!(misleading_char("ma\u{200b}il"), Some('\u{200b}'));
/// assert_eq!(misleading_char("a\u{202e}b"), Some('\u{202e}'));
/// assert_eq!(misleading_char("a\u{3164}b"), Some('\u{3164}'));
/// assert_eq!(misleading_char("a\u{a0}b"), Some('\u{a0}'));
/// ```
#[must_use]
pub fn misleading_char(name: &str) -> Option<char> {
    if is_path_step(name) {
        return Some('.');
    }
    let (first, last) = (name.chars().next()?, name.chars().next_back()?);
    let is_hidden = |it: &char| {
        use GeneralCategory::{Format, LineSeparator, ParagraphSeparator};
        let is_blank = it.is_whitespace() || BLANKS.contains(it);
        let category = it.general_category();
        let is_unshown = matches!(category, Format | LineSeparator | ParagraphSeparator)
            || u32::from(*it) & 0xFFFE == 0xFFFE;
        !it.is_ascii() && (is_blank || is_unshown)
    };
    let at_an_end = [first, last].into_iter().find(|it| it.is_whitespace());
    at_an_end.or_else(|| name.chars().find(is_hidden))
}

/// The refusal of a name that is a step of a path.
pub const PATH_STEP: &str = "must not be `.` or `..`, which are steps of a path";

/// True for names that clients take for steps of a path: they would ask for another one.
#[must_use]
pub fn is_path_step(name: &str) -> bool {
    matches!(name, "." | "..")
}

/// Like [`check_name`], but the text may be empty.
///
/// # Errors
/// [`InvalidText`] says which rule was broken.
pub fn check_text(text: &str, max_chars: usize) -> Result<(), InvalidText> {
    let actual = text.chars().count();
    if actual > max_chars {
        return Err(InvalidText::TooLong { max: max_chars, actual });
    }
    if text.chars().any(char::is_control) {
        return Err(InvalidText::ControlCharacter);
    }
    Ok(())
}

/// The longest prefix of `text` that fits in `max_bytes` and ends between two characters.
///
/// ```
/// # use fencepost_domain::text::cut;
/// assert_eq!(cut("añb", 2), "a");
/// assert_eq!(cut("añb", 3), "añ");
/// assert_eq!(cut("añb", 4), "añb");
/// ```
#[must_use]
pub fn cut(text: &str, max_bytes: usize) -> &str {
    &text[..text.floor_char_boundary(max_bytes)]
}

/// A name as part of a path: `[a-z0-9-]`; may be empty.
///
/// ```
/// # use fencepost_domain::text::slug;
/// assert_eq!(slug("Acme Corp. (EU)"), "acme-corp-eu");
/// assert_eq!(slug("--"), "");
/// ```
#[must_use]
pub fn slug(name: &str) -> String {
    let lower = name.to_lowercase();
    let words = lower.split(|it: char| !it.is_ascii_alphanumeric()).filter(|it| !it.is_empty());
    words.collect::<Vec<_>>().join("-")
}

/// Output, made storable: U+0000 becomes U+FFFD, everything else stays.
///
/// ```
/// # use fencepost_domain::text::without_nul;
/// assert_eq!(without_nul("a\0b\u{1b}[0m".into()), "a\u{FFFD}b\u{1b}[0m");
/// ```
#[must_use]
pub fn without_nul(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{FFFD}") } else { text }
}

/// An error report, made storable: control characters other than tab and line breaks become U+FFFD,
/// because a failure must never be refused for the form of its stack trace.
#[must_use]
pub fn printable(text: &str) -> String {
    text.chars()
        .map(
            |it| if it.is_control() && !matches!(it, '\t' | '\n' | '\r') { '\u{FFFD}' } else { it },
        )
        .collect()
}

/// An error as a worker reported it, cut to what is stored.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ErrorReport {
    /// The type of the error, such as an exception's name.
    pub kind: Option<String>,
    /// The message, for people.
    pub message: Option<String>,
    /// The stack trace.
    pub stack_trace: Option<String>,
    /// Whether anything was cut.
    pub truncated: bool,
}

impl ErrorReport {
    /// Keeps at most [`limits::MAX_ERROR_BYTES`] of the three texts together: first the type, then
    /// the message, then as much of the stack trace as still fits.
    #[must_use]
    pub fn bounded(kind: Option<&str>, message: Option<&str>, stack_trace: Option<&str>) -> Self {
        Self::within(limits::MAX_ERROR_BYTES, [kind, message, stack_trace], false)
    }

    /// The same, cut to [`limits::MAX_FULL_ERROR_BYTES`].
    #[must_use]
    pub fn shortened(&self) -> Self {
        let texts = [&self.kind, &self.message, &self.stack_trace].map(|it| it.as_deref());
        Self::within(limits::MAX_FULL_ERROR_BYTES, texts, self.truncated)
    }

    fn within(max_bytes: usize, texts: [Option<&str>; 3], was_truncated: bool) -> Self {
        let [kind, message, stack_trace] = texts;
        let mut left = max_bytes;
        let mut truncated = was_truncated;
        let mut keep = |text: Option<&str>, max_chars: usize| {
            text.map(|text| {
                let clean = printable(text);
                let end = clean.char_indices().nth(max_chars).map_or(clean.len(), |(at, _)| at);
                let kept = cut(&clean, left.min(end)).to_owned();
                left -= kept.len();
                truncated |= kept.len() < clean.len();
                kept
            })
        };
        let kind = keep(kind, limits::MAX_ERROR_TYPE_CHARS);
        let message = keep(message, usize::MAX);
        let stack_trace = keep(stack_trace, usize::MAX);
        Self { kind, message, stack_trace, truncated }
    }
}

/// The nesting depth of arrays and objects in well-formed JSON.
///
/// ```
/// # use fencepost_domain::text::json_depth;
/// assert_eq!(json_depth("1"), 0);
/// assert_eq!(json_depth(r#"{"a":["[[["]}"#), 2);
/// ```
#[must_use]
pub fn json_depth(json: &str) -> usize {
    let (mut depth, mut deepest, mut in_string, mut escaped) = (0_usize, 0, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => (),
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_counted_in_characters_and_have_no_control_characters() {
        assert_eq!(check_name("ä".repeat(10).as_str(), 10), Ok(()));
        assert_eq!(check_name("ab", 1), Err(InvalidText::TooLong { max: 1, actual: 2 }));
        assert_eq!(check_name("", 1), Err(InvalidText::Empty));
        assert_eq!(check_name("a\0b", 9), Err(InvalidText::ControlCharacter));
        assert_eq!(check_name("a\nb", 9), Err(InvalidText::ControlCharacter));
        assert_eq!(check_text("", 1), Ok(()));
    }

    #[test]
    fn a_report_keeps_its_message_before_its_stack_trace() {
        let long = "é".repeat(limits::MAX_ERROR_BYTES);
        let report = ErrorReport::bounded(Some("Timeout"), Some("slow"), Some(&long));
        assert_eq!(report.message.as_deref(), Some("slow"));
        assert!(report.truncated);
        let kept = report.stack_trace.expect("a part of the trace is kept").len();
        assert!((limits::MAX_ERROR_BYTES - 12..=limits::MAX_ERROR_BYTES - 11).contains(&kept));
    }

    #[test]
    fn a_report_that_fits_is_kept_whole_but_for_characters_that_cannot_be_stored() {
        let report = ErrorReport::bounded(None, Some("a\0b\u{1b}[31m\tc\r\n"), None);
        assert_eq!(report.message.as_deref(), Some("a\u{FFFD}b\u{FFFD}[31m\tc\r\n"));
        assert!(!report.truncated);
        assert_eq!(report.kind, None);
    }

    proptest! {
        #[test]
        fn a_bounded_report_never_exceeds_the_bound(
            kind in ".{0,600}", message in ".{0,9000}", trace in ".{0,9000}",
        ) {
            let report = ErrorReport::bounded(Some(&kind), Some(&message), Some(&trace));
            let kept = [&report.kind, &report.message, &report.stack_trace]
                .iter().map(|it| it.as_ref().map_or(0, String::len)).sum::<usize>();
            prop_assert!(kept <= limits::MAX_ERROR_BYTES);
        }

        #[test]
        fn the_depth_of_real_json_is_its_nesting(depth in 0_usize..200, text in ".{0,20}") {
            let text = serde_json::to_string(&text).expect("a string is JSON");
            let json = format!("{}{text}{}", "[".repeat(depth), "]".repeat(depth));
            prop_assert_eq!(json_depth(&json), depth);
        }
    }
}
