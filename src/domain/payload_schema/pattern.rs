//! Patterns of texts.

use regex::{Regex, RegexBuilder};

/// Maximum bytes of a compiled pattern, and of what it needs to run.
const MAX_PATTERN_BYTES: usize = 256 * 1024;

/// Compiles a pattern.
///
/// # Errors
/// Says what is wrong with it.
pub(super) fn compiled(pattern: &str) -> Result<Regex, String> {
    RegexBuilder::new(pattern)
        .size_limit(MAX_PATTERN_BYTES)
        .dfa_size_limit(MAX_PATTERN_BYTES)
        .build()
        .map_err(|error| match error {
            regex::Error::CompiledTooBig(_) => {
                format!("the pattern needs more than {MAX_PATTERN_BYTES} bytes when it is compiled")
            }
            _ => "the pattern is not a regular expression of the crate regex".to_owned(),
        })
}
