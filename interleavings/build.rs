//! Makes one text of each of the server's files that are checked here, without its tests, and with
//! a bug in some of them, which a test can switch on.

use std::{env, error::Error, fs, path::Path};

/// The files, below `src`, with the names of their texts.
const FILES: [(&str, &str); 10] = [
    ("engine/group_commit.rs", "group_commit.rs"),
    ("signals/wakeups.rs", "wakeups.rs"),
    ("engine/sync_match.rs", "sync_match.rs"),
    ("engine/notify/relay.rs", "relay.rs"),
    ("engine/dispatch/answered.rs", "answered.rs"),
    ("engine/dispatch/dispatched.rs", "dispatched.rs"),
    ("engine/dispatch/request.rs", "request.rs"),
    ("engine/dispatch/lanes/mod.rs", "lanes.rs"),
    ("engine/dispatch/matches.rs", "matches.rs"),
    ("engine/dispatch/pump.rs", "pump.rs"),
];

/// Bugs: the name of the text, what is replaced, and by what.
const BUGS: [(&str, &str, &str); 4] = [
    // What was received is lost when a group commit ends in that moment.
    (
        "group_commit.rs",
        "        self.add(entry);\n        true",
        "        if crate::has_bug() {
            tokio::task::yield_now().await;
        }
        self.add(entry);
        true",
    ),
    // Only a loop that waits in this moment is woken.
    (
        "wakeups.rs",
        "self.chores[chore as usize].notify_one();",
        "match crate::has_bug() {
            true => self.chores[chore as usize].notify_waiters(),
            false => self.chores[chore as usize].notify_one(),
        }",
    ),
    // Hints that come while others are collected are not published.
    ("relay.rs", "gathered.add(hint);", "if !crate::has_bug() {\ngathered.add(hint);\n}"),
    // Jobs that arrive while a claim is under way are forgotten.
    (
        "lanes.rs",
        "Supply::Known(self.arrived_in_flight)",
        "Supply::Known(if crate::has_bug() { 0 } else { self.arrived_in_flight })",
    ),
];

/// Modules in which no task waits: the server's own are used.
const AS_THEY_ARE: [&str; 3] = ["pub mod backlog_waits;", "pub mod interest;", "pub mod keyed;"];

/// The engine is a module here. In place of the others this crate has some whose tasks shuttle
/// schedules.
const REPLACED: [(&str, &str); 4] = [
    ("crate::", "crate::engine::"),
    ("use tokio_util::", "use crate::tokio_util::"),
    ("fencepost_signals::", "crate::"),
    ("fencepost_store::", "crate::store::"),
];

fn main() -> Result<(), Box<dyn Error>> {
    let source = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../src");
    let out = env::var("OUT_DIR")?;
    println!("cargo::rerun-if-changed={}", source.display());
    for (file, name) in FILES {
        let mut text = text(&source.join(file))?;
        for (theirs, ours) in REPLACED {
            text = text.replace(theirs, ours);
        }
        for (_, from, to) in BUGS.iter().filter(|it| it.0 == name) {
            if text.matches(from).count() != 1 {
                return Err(format!("{file} has no single place for the bug: {from}").into());
            }
            text = text.replace(from, to);
        }
        fs::write(Path::new(&out).join(name), text)?;
    }
    Ok(())
}

/// A file with its modules in it.
fn text(path: &Path) -> Result<String, Box<dyn Error>> {
    let whole = fs::read_to_string(path)?;
    let folder = match path.file_name().is_some_and(|it| it == "mod.rs") {
        true => path.with_file_name(""),
        false => path.with_extension(""),
    };
    let (mut text, mut is_of_tests) = (String::new(), false);
    for line in whole.lines() {
        if line.starts_with("//!") {
            continue;
        }
        if AS_THEY_ARE.contains(&line) {
            text += &line.replace("pub mod ", "pub use super::servers_wakeups::");
            text += "\n";
            continue;
        }
        if line == "#[cfg(test)]" {
            is_of_tests = true;
            continue;
        }
        if std::mem::take(&mut is_of_tests) {
            match line.ends_with(';') {
                // The tests are in another file.
                true => continue,
                // They are the rest of this one.
                false => break,
            }
        }
        let name = line.trim_start_matches("pub ").strip_prefix("mod ");
        match name.and_then(|it| it.strip_suffix(';')) {
            Some(name) => {
                let inner = text_of(&folder, name)?;
                text += &format!("{} {{\n{inner}}}\n", line.trim_end_matches(';'));
            }
            None => text += &format!("{line}\n"),
        }
    }
    Ok(text)
}

fn text_of(folder: &Path, name: &str) -> Result<String, Box<dyn Error>> {
    let file = folder.join(name).with_extension("rs");
    if file.exists() { text(&file) } else { text(&folder.join(name).join("mod.rs")) }
}
