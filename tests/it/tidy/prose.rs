//! How the project writes: the words of `docs/glossary.md`, and lines that fit a screen.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Columns of a comment or a paragraph.
const MAX_COLUMNS: usize = 100;

/// Where people read: everything but migrations, which never change once they have landed.
const PLACES: &[&str] = &[
    "src",
    "bench",
    "chaos",
    "interleavings",
    "proof",
    "docs",
    "assets",
    "scripts",
    "examples",
    "clients",
    "ops",
    "openapi",
    "tests",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
    "docker-compose.yml",
];
const EXTENSIONS: &[&str] =
    &["rs", "md", "html", "txt", "js", "mjs", "ts", "py", "go", "sh", "json", "yml", "toml", "css"];
/// Written by others, or by a program.
const FOREIGN: &[&str] = &[
    "assets/vendor/",
    "tests/it/tidy/",
    "package-lock.json",
    "node_modules/",
    "target/",
    "docs/pictures/",
    "openapi/released.json",
];

/// Words and phrases that have a usual word instead: `docs/glossary.md`.
const BANNED: &[&str] = &[
    "whoever",
    "nobody",
    "somebody",
    "so many",
    "so long",
    "called off",
    "call off",
    "calls off",
    "tidings",
    "wish",
    "wishes",
    "deed",
    "deeds",
    "dealt",
    "bury",
    "buried",
    "goodbye",
    "give up",
    "gives up",
    "gave up",
    "given up",
    "hand back",
    "hands back",
    "handed back",
    "give back",
    "gives back",
    "gave back",
    "given back",
    "brought back",
    "bring back",
    "brings back",
    "taken back",
    "fell silent",
    "is over",
    "goes on",
    "overhear",
    "overhears",
    "tell",
    "tells",
    "told",
    "telling",
];

/// Names of types that say nothing, exactly as written here.
const BANNED_NAMES: &[&str] = &[
    "Look",
    "Wish",
    "Deed",
    "Reported",
    "Flight",
    "Landed",
    "Tidings",
    "Whereabouts",
    "Acquaintances",
    "Rested",
    "Handed",
];

/// Where a banned word stays: file, word, reason.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("chaos/src/check.rs", "told", "a name in results of earlier runs"),
    ("src/dev/cluster.rs", "nobody", "the name of a system user"),
    ("src/engine/batches/workflow_event.rs", "told", "the column `told_state`"),
    ("src/store/workflows/workflow_events.rs", "told", "the column `told_state`"),
    ("tests/it/webhooks/callbacks.rs", "told", "the column `told_state`"),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every text that people read, by its path.
fn texts() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut paths: Vec<PathBuf> = PLACES.iter().map(|it| root().join(it)).collect();
    while let Some(path) = paths.pop() {
        let name = path.strip_prefix(root()).expect("below the root").display().to_string();
        if FOREIGN.iter().any(|it| format!("{name}/").contains(it)) {
            continue;
        }
        if path.is_dir() {
            paths.extend(fs::read_dir(&path).expect("a folder").map(|it| it.expect("one").path()));
            continue;
        }
        let extension = path.extension().and_then(|it| it.to_str()).unwrap_or("rs");
        if EXTENSIONS.contains(&extension) {
            found.push((name, fs::read_to_string(&path).expect("a text")));
        }
    }
    assert!(found.len() > 300, "the texts were found: {}", found.len());
    found.sort();
    found
}

/// One line of words: identifiers fall apart, and a phrase is found across the end of a line.
struct Words {
    text: String,
    /// Where in `text` each line begins.
    starts: Vec<usize>,
}

impl Words {
    fn of(text: &str) -> Self {
        let (mut joined, mut starts) = (String::from(" "), Vec::new());
        for line in text.lines() {
            starts.push(joined.len());
            let mut last = ' ';
            for it in line.chars() {
                let is_part = it.is_alphanumeric() || it == '\'';
                if last != ' ' && (!is_part || last.is_lowercase() && it.is_uppercase()) {
                    joined.push(' ');
                }
                if is_part {
                    joined.push(it);
                }
                last = if is_part { it } else { ' ' };
            }
            if last != ' ' {
                joined.push(' ');
            }
        }
        Self { text: joined, starts }
    }

    /// The lines with this phrase.
    fn lines_with(&self, phrase: &str) -> Vec<usize> {
        let needle = format!(" {phrase} ");
        let at = self.text.match_indices(&needle).map(|(at, _)| at + 1);
        at.map(|at| self.starts.partition_point(|it| *it <= at)).collect()
    }
}

/// Banned words of a text, each as `line: word`.
fn banned(file: &str, text: &str) -> Vec<String> {
    let names = Words::of(text);
    let words = Words { text: names.text.to_lowercase(), starts: names.starts.clone() };
    let is_code = file.ends_with(".rs");
    let found = BANNED.iter().map(|it| (*it, words.lines_with(it)));
    let named = BANNED_NAMES.iter().filter(|_| is_code).map(|it| (*it, names_with(text, it)));
    found
        .chain(named)
        .filter(|(word, _)| !EXCEPTIONS.iter().any(|it| (it.0, it.1) == (file, *word)))
        .flat_map(|(word, lines)| lines.into_iter().map(move |it| format!("{file}:{it}: {word}")))
        .collect()
}

/// The lines that use this identifier, outside comments and texts as far as a line shows it.
fn names_with(text: &str, name: &str) -> Vec<usize> {
    let is_code = |line: &str| !line.trim_start().starts_with("//") && !line.contains('"');
    let uses =
        |line: &str| line.split(|it: char| !it.is_alphanumeric() && it != '_').any(|it| it == name);
    let lines = text.lines().enumerate().filter(|(_, line)| is_code(line) && uses(line));
    lines.map(|(at, _)| at + 1).collect()
}

/// Lines of comments, paragraphs and templates that do not fit.
fn long_lines(file: &str, text: &str) -> Vec<String> {
    let (is_rust, is_markdown) = (file.ends_with(".rs"), file.ends_with(".md"));
    let is_template = file.starts_with("src/console/templates/");
    let mut in_fence = false;
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let start = line.trim_start();
        in_fence ^= is_markdown && start.starts_with("```");
        let is_prose = is_rust && start.starts_with("//")
            || is_markdown && !in_fence && !start.starts_with('|')
            // Preformatted text cannot be broken.
            || is_template && !line.contains("<pre");
        if is_prose && line.chars().count() > MAX_COLUMNS && !line.contains("://") {
            found.push(format!("{file}:{}: {} columns", at + 1, line.chars().count()));
        }
    }
    found
}

#[test]
fn texts_use_the_words_of_the_glossary_and_fit_a_screen() {
    let texts = texts();
    let found: Vec<_> = texts
        .iter()
        .flat_map(|(file, text)| banned(file, text).into_iter().chain(long_lines(file, text)))
        .collect();
    assert!(found.is_empty(), "write these otherwise (docs/glossary.md):\n{}", found.join("\n"));
    for (file, word, _) in EXCEPTIONS {
        let text = texts.iter().find(|it| it.0 == *file).map(|it| it.1.to_lowercase());
        assert!(
            text.is_some_and(|it| it.contains(word)),
            "{file}: {word} is no exception any more"
        );
    }
}

#[test]
fn a_banned_word_is_found_in_identifiers_in_strings_and_across_lines() {
    let check = |text: &str, expected: &str| {
        assert_eq!(banned("src/a.rs", text), [format!("src/a.rs:{expected}")], "{text}");
    };
    check("fn call_off() {}", "1: call off");
    check("enum Cancelling { CallOff }", "1: call off");
    check("let it = \"it is over\";", "1: is over");
    check("// It was given\n// up then.", "1: given up");
    check("struct Handed;", "1: Handed");
    assert!(banned("src/a.rs", "// So much longer than a wishbone.").is_empty());
}
