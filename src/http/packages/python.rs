//! The wheel (<https://packaging.python.org/en/latest/specifications/binary-distribution-format/>).

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use sha2::{Digest, Sha256};

use super::{Served, VERSION, archive, source, sources};

const ABOUT: &str = "Client and worker for Fencepost, a job queue with an HTTP API";
const PYTHON: &str = ">=3.9";
const LICENCE: &str = "MIT OR Apache-2.0";

/// The path of the wheel.
pub fn path() -> String {
    format!("/clients/fencepost-{VERSION}-py3-none-any.whl")
}

pub fn files() -> Vec<Served> {
    let info = format!("fencepost-{VERSION}.dist-info");
    let mut files = Vec::new();
    for (name, data) in sources("python") {
        if name.starts_with("fencepost/") {
            files.push((name, data));
        } else if name.starts_with("LICENSE") {
            files.push((format!("{info}/licenses/{name}"), data));
        }
    }
    files.push((format!("{info}/METADATA"), metadata().into()));
    let wheel =
        "Wheel-Version: 1.0\nGenerator: fencepost\nRoot-Is-Purelib: true\nTag: py3-none-any\n";
    files.push((format!("{info}/WHEEL"), wheel.into()));
    let mut record = String::new();
    for (name, data) in &files {
        let digest = URL_SAFE_NO_PAD.encode(Sha256::digest(data));
        record += &format!("{name},sha256={digest},{}\n", data.len());
    }
    record += &format!("{info}/RECORD,,\n");
    files.push((format!("{info}/RECORD"), record.into()));
    vec![Served::new(path(), "application/zip", archive::zip(&files))]
}

fn metadata() -> String {
    let readme = source("python/README.md");
    format!(
        "Metadata-Version: 2.4\nName: fencepost\nVersion: {VERSION}\nSummary: {ABOUT}\n\
         License-Expression: {LICENCE}\nLicense-File: LICENSE-APACHE\nLicense-File: LICENSE-MIT\n\
         Requires-Python: {PYTHON}\nDescription-Content-Type: text/markdown\n\n{readme}"
    )
}
