//! No import cycles: inside a folder, modules import one another in one direction.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

/// The module of a file, as a path: `src/engine/settle/mod.rs` is `engine`, `settle`.
fn module_path(file: &str) -> Vec<String> {
    let path = file.trim_start_matches("src/").trim_end_matches(".rs");
    let mut parts: Vec<_> = path.split('/').map(str::to_owned).collect();
    if parts.last().is_some_and(|it| it == "mod" || it == "lib") {
        parts.pop();
    }
    parts
}

/// The crate of a module, as a path: a folder of `src`, or `src` itself.
fn crate_of(module: &[String]) -> &[String] {
    let is_crate = |name: &String| {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        src.join(name).join("Cargo.toml").exists()
    };
    &module[..usize::from(module.first().is_some_and(is_crate))]
}

/// Every path that a file names from `crate`, `super` or `self`, with braces written out.
fn named_paths(module: &[String], code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for root in ["crate", "super", "self"] {
        for (at, _) in code.match_indices(&format!("{root}::")) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|it| it.is_alphanumeric() || it == '_' || it == ':') {
                continue;
            }
            let base = if root == "crate" { crate_of(module) } else { module };
            let mut base = base.to_vec();
            if root == "super" {
                base.pop();
            }
            expand(&code[at + root.len() + 2..], &base, &mut found);
        }
    }
    found
}

/// Reads one path, or a tree of them in braces; returns how much of `text` it took.
fn expand(text: &str, base: &[String], found: &mut Vec<Vec<String>>) -> usize {
    let mut path = base.to_vec();
    let mut at = 0;
    loop {
        let rest = &text[at..];
        let skipped = rest.len() - rest.trim_start().len();
        let rest = rest.trim_start();
        at += skipped;
        if let Some(inner) = rest.strip_prefix('{') {
            at += 1;
            let mut read = 0;
            while !inner[read..].trim_start().starts_with('}') && read < inner.len() {
                read += expand(&inner[read..], &path, found);
                read += inner[read..].find([',', '}']).unwrap_or(inner.len() - read);
                if inner[read..].starts_with(',') {
                    read += 1;
                }
            }
            let end = inner[read..].find('}').map_or(inner.len(), |it| read + it + 1);
            return at + end;
        }
        let word = rest.split(|it: char| !it.is_alphanumeric() && it != '_').next();
        let word = word.unwrap_or_default();
        if word.is_empty() {
            return at;
        }
        match word {
            "super" => _ = path.pop(),
            "self" => (),
            other => path.push(other.to_owned()),
        }
        at += word.len();
        if !text[at..].starts_with("::") {
            found.push(path);
            return at;
        }
        at += 2;
    }
}

/// A comment may refer to any module.
fn without_comments(code: &str) -> String {
    let lines = code.lines().filter(|it| !it.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Which children of which folder import which others.
fn imports() -> BTreeMap<String, BTreeMap<String, BTreeSet<String>>> {
    let files: Vec<_> =
        super::files("src").into_iter().map(|(file, text)| (module_path(&file), text)).collect();
    let modules: BTreeSet<_> = files.iter().map(|(module, _)| module.clone()).collect();
    let mut found: BTreeMap<String, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (module, text) in &files {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for path in named_paths(module, &without_comments(code)) {
            let shared = module.iter().zip(&path).take_while(|(a, b)| a == b).count();
            // A folder's own file is the entry to its children, and names them.
            if module.len() == shared || path.len() == shared {
                continue;
            }
            if !modules.contains(&path[..=shared]) {
                continue;
            }
            let folder = found.entry(module[..shared].join("/")).or_default();
            folder.entry(module[shared].clone()).or_default().insert(path[shared].clone());
        }
    }
    found
}

/// The modules that lie on an import cycle with `from`.
fn cycle(imports: &BTreeMap<String, BTreeSet<String>>, from: &str) -> BTreeSet<String> {
    let reach = |from: &str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(it) = next.pop() {
            for to in imports.get(&it).into_iter().flatten() {
                if seen.insert(to.clone()) {
                    next.push(to.clone());
                }
            }
        }
        seen
    };
    let reached = reach(from);
    reached.into_iter().filter(|it| it == from || reach(it).contains(from)).collect()
}

#[test]
fn no_modules_of_a_folder_import_one_another_in_a_cycle() {
    let mut found = BTreeSet::new();
    for (folder, imports) in imports() {
        for from in imports.keys() {
            let cycle = cycle(&imports, from);
            if cycle.contains(from) {
                let names: Vec<_> = cycle.into_iter().collect();
                found.insert(format!("{folder}: {}", names.join(" ")));
            }
        }
    }
    assert!(found.is_empty(), "import cycles; see ARCHITECTURE.md, \"Layers\": {found:?}");
}

/// The layer of each module of the engine: it imports from lower layers only.
const ENGINE_LAYERS: &[(&str, u32)] = &[
    ("group_commit", 0),
    ("isolate", 0),
    ("known", 0),
    ("settings", 0),
    ("stats", 0),
    ("sync_match", 0),
    ("notify", 1),
    ("reach", 1),
    ("shared_limits", 1),
    ("backlog", 2),
    ("cancel", 2),
    ("queues", 2),
    ("enqueue", 3),
    ("batches", 4),
    ("jobs", 4),
    ("schedules", 4),
    ("groups", 5),
    ("settle", 5),
    ("operations", 5),
    ("workers", 6),
    ("dispatch", 7),
    ("canary", 8),
    ("alarms", 8),
    ("webhooks", 8),
    ("maintenance", 7),
];

#[test]
fn a_module_of_the_engine_imports_only_from_lower_layers() {
    let layers: BTreeMap<_, _> = ENGINE_LAYERS.iter().copied().collect();
    let imports = imports();
    let modules = imports.get("engine").expect("the engine has modules");
    for (module, imported) in modules {
        let layer = layers.get(module.as_str());
        let layer = layer.unwrap_or_else(|| panic!("give engine/{module} a layer"));
        for other in imported {
            let below = layers.get(other.as_str()).unwrap_or_else(|| panic!("engine/{other}"));
            assert!(below < layer, "engine/{module} imports engine/{other}, which is not below it");
        }
    }
}
