//! The bugs to plant, as `chaos/bugs.toml` has them, and how a copy of the source gets them.

use std::{fs, path::Path};

use anyhow::{Context, ensure};
use serde::Deserialize;

use crate::check::Invariant;

const TABLE: &str = include_str!("../bugs.toml");
/// Which bug strikes, and when: a module of the store, which the engine and all above it can name.
const PLANTED: &str = include_str!("../planted.rs");
const PLANTED_FILE: &str = "src/store/planted.rs";
const PLANTED_PARENT: &str = "src/store/lib.rs";
const PLANTED_MODULE: &str = "pub mod planted;\n";

/// The environment variable with the number of the bug that a node has.
pub const VARIABLE: &str = "FENCEPOST_BUG";

/// A bug that can be planted.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bug {
    pub number: u8,
    pub name: String,
    pub about: String,
    /// The invariants that show it.
    pub breaks: Vec<Invariant>,
    change: Vec<Change>,
}

/// Text that takes the place of other text.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    /// The file, from the root of the repository.
    file: String,
    /// What it has exactly once.
    from: String,
    to: String,
}

/// All bugs, by their numbers.
///
/// # Errors
/// When the table cannot be read.
pub fn all() -> anyhow::Result<Vec<Bug>> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Table {
        bug: Vec<Bug>,
    }
    let table: Table = toml::from_str(TABLE).context("chaos/bugs.toml")?;
    Ok(table.bug)
}

/// Plants all bugs in a copy of the source.
///
/// # Errors
/// When a bug has no place any more, or more than one. The copy is half changed then, and useless.
pub fn plant(copy: &Path) -> anyhow::Result<()> {
    for bug in all()? {
        for change in &bug.change {
            let path = copy.join(&change.file);
            let text = fs::read_to_string(&path).with_context(|| change.file.clone())?;
            fs::write(&path, changed(&text, &bug, change)?)?;
        }
    }
    let parent = copy.join(PLANTED_PARENT);
    let text = fs::read_to_string(&parent)?;
    let (comment, modules) = text.split_once("pub mod ").context(PLANTED_PARENT)?;
    fs::write(&parent, format!("{comment}{PLANTED_MODULE}pub mod {modules}"))?;
    fs::write(copy.join(PLANTED_FILE), PLANTED)?;
    Ok(())
}

fn changed(text: &str, bug: &Bug, change: &Change) -> anyhow::Result<String> {
    let places = text.matches(&change.from).count();
    let (number, name, file) = (bug.number, &bug.name, &change.file);
    ensure!(places == 1, "bug {number}, {name}: {file} has its place {places} times, not once");
    Ok(text.replacen(&change.from, &change.to, 1))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    #[test]
    fn every_bug_has_its_places_and_they_are_unique() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut texts = BTreeMap::new();
        for bug in all().expect("a table") {
            assert!(!bug.change.is_empty() && !bug.breaks.is_empty(), "{}", bug.name);
            for change in &bug.change {
                let text = texts.entry(change.file.clone()).or_insert_with(|| {
                    fs::read_to_string(root.join(&change.file)).expect("a file of the server")
                });
                *text = changed(text, &bug, change).expect("one place");
            }
        }
    }

    #[test]
    fn bugs_have_the_numbers_of_their_places_and_their_own_names() {
        let all = all().expect("a table");
        let names: BTreeSet<_> = all.iter().map(|it| &it.name).collect();
        assert_eq!(names.len(), all.len());
        for (place, bug) in (1..).zip(&all) {
            assert_eq!(bug.number, place, "{}: {}", bug.name, bug.about);
        }
    }
}
