//! The packages have what their sources have, and the same bytes each time.

use std::io::{Cursor, Read};

use flate2::read::GzDecoder;

use super::*;

/// Bytes of a package that a small program may add to its image.
const MAX_PACKAGE_BYTES: usize = 40_000;

fn names_of_zip(data: &[u8]) -> Vec<String> {
    let archive = zip::ZipArchive::new(Cursor::new(data)).expect("an archive");
    archive.file_names().map(|it| it.expect("a name").into_owned()).collect()
}

fn files_of_tar(data: &[u8]) -> Vec<(String, String)> {
    let mut archive = tar::Archive::new(GzDecoder::new(data));
    let entries = archive.entries().expect("an archive");
    let read = entries.map(|entry| {
        let mut entry = entry.expect("a file");
        let name = entry.path().expect("a path").display().to_string();
        let mut text = String::new();
        entry.read_to_string(&mut text).expect("a text");
        (name, text)
    });
    read.collect()
}

fn found<'a>(files: &'a [Served], path: &str) -> &'a Served {
    files.iter().find(|it| it.path == path).expect(path)
}

#[test]
fn each_path_has_a_file_with_the_same_bytes_each_time() {
    let again = [python::files(), typescript::files(), go::files(), rust::files()];
    let again: Vec<_> = again.into_iter().flatten().collect();
    assert_eq!(FILES.len(), again.len());
    for file in FILES.iter() {
        assert_eq!(file.data, found(&again, &file.path).data, "{}", file.path);
    }
}

#[test]
fn the_libraries_have_the_version_of_the_server() {
    let manifests = [
        include_str!("../../../clients/python/pyproject.toml"),
        include_str!("../../../clients/typescript/package.json"),
        include_str!("../../../clients/rust/Cargo.toml"),
    ];
    let python = include_str!("../../../clients/python/pyproject.toml");
    for manifest in manifests {
        let line =
            manifest.lines().find(|it| it.trim_start_matches([' ', '"']).starts_with("version"));
        assert!(line.is_some_and(|it| it.contains(&format!("\"{VERSION}\""))), "{line:?}");
    }
    let [files] = &python::files()[..] else { panic!("one file") };
    let names = names_of_zip(&files.data);
    for module in [
        "__init__.py",
        "client.py",
        "codes.py",
        "fields.py",
        "job.py",
        "py.typed",
        "webhooks.py",
        "worker.py",
    ] {
        assert!(names.contains(&format!("fencepost/{module}")), "{names:?}");
    }
    assert!(python.contains(r#"requires-python = ">=3.9""#), "as the wheel says");
}

#[test]
fn small_packages_have_all_files_that_their_manifests_name() {
    let [package] = &typescript::files()[..] else { panic!("one file") };
    assert!(package.data.len() <= MAX_PACKAGE_BYTES, "{} bytes", package.data.len());
    let names: Vec<_> = files_of_tar(&package.data).into_iter().map(|it| it.0).collect();
    for name in ["package.json", "index.js", "index.d.ts", "client.js", "worker.js", "README.md"] {
        assert!(names.contains(&format!("package/{name}")), "{names:?}");
    }
    assert!(!names.iter().any(|it| it.contains("examples") || it.contains("tests")), "{names:?}");
    let [wheel] = &python::files()[..] else { panic!("one file") };
    assert!(wheel.data.len() <= MAX_PACKAGE_BYTES, "{} bytes", wheel.data.len());
}

#[test]
fn the_crate_needs_what_its_manifest_says_and_no_workspace() {
    let files = rust::files();
    let package = found(&files, &rust::path());
    let inside = files_of_tar(&package.data);
    assert!(inside.iter().any(|it| it.0.ends_with("/src/worker/polls.rs")), "all modules");
    let manifest = inside.iter().find(|it| it.0.ends_with("/Cargo.toml")).expect("a manifest");
    assert!(!manifest.1.contains("workspace") && !manifest.1.contains("publish"), "{}", manifest.1);
    let entry: serde_json::Value =
        serde_json::from_slice(&found(&files, rust::ENTRY).data).expect("an entry");
    assert_eq!(entry["cksum"], package.digest());
    let needs = entry["deps"].as_array().expect("needs");
    let of = |name: &str| needs.iter().find(|it| it["name"] == name).expect(name);
    assert_eq!(
        (&of("tokio")["req"], &of("tokio")["default_features"]),
        (&"^1.54.1".into(), &true.into())
    );
    assert_eq!(of("reqwest")["features"], serde_json::json!(["json", "rustls-no-provider"]));
    assert_eq!(of("reqwest")["default_features"], false);
}

#[test]
fn the_module_of_go_is_below_its_path_and_version() {
    let files = go::files();
    let names = names_of_zip(&found(&files, &go::path()).data);
    let worker = format!("fencepost.example/fencepost@v{VERSION}/worker.go");
    assert!(names.contains(&worker), "{names:?}");
    let is_other = |it: &String| it.ends_with("_test.go") || it.contains("examples");
    assert!(!names.iter().any(is_other), "{names:?}");
}
