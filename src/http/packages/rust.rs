//! The crate, and a registry with this one crate
//! (<https://doc.rust-lang.org/cargo/reference/registry-index.html>, its sparse protocol).

use serde::Deserialize;
use serde_json::{Value, json};

use super::{File, Served, VERSION, archive, digest, source, sources};

const NAME: &str = "fencepost-client";
/// The path that Cargo reads first.
pub const CONFIG: &str = "/clients/rust/config.json";
/// The path of the crate in the index: below the first letters of its name.
pub const ENTRY: &str = "/clients/rust/fe/nc/fencepost-client";
/// Dependencies are in the public registry.
const CRATES_IO: &str = "https://github.com/rust-lang/crates.io-index";
/// Parts of the manifest that hold in its repository alone.
const OF_REPOSITORY: [&str; 2] = ["publish = false\n", "\n[lints]\nworkspace = true\n"];

/// The path of the crate.
pub fn path() -> String {
    format!("/clients/rust/{NAME}-{VERSION}.crate")
}

/// The configuration of the registry of a server with this URL.
pub fn config(public_url: &str) -> Value {
    json!({"dl": format!("{public_url}/clients/rust/{{crate}}-{{version}}.crate")})
}

pub fn files() -> Vec<Served> {
    let manifest = manifest();
    let mut files = sources("rust");
    files.retain(|it| it.0 != "Cargo.toml");
    files.push(("Cargo.toml".to_owned(), manifest.clone().into()));
    files.sort();
    let package = archive::tar_gz(&format!("{NAME}-{VERSION}"), &files as &[File]);
    let entry = entry(&manifest, &digest(&package));
    vec![
        Served::new(ENTRY, "text/plain; charset=utf-8", entry),
        Served::new(path(), "application/gzip", package),
    ]
}

fn manifest() -> String {
    let all = source("rust/Cargo.toml");
    OF_REPOSITORY.iter().fold(all, |text, part| text.replace(part, ""))
}

/// The line of the index about the crate.
fn entry(manifest: &str, digest: &str) -> String {
    #[derive(Deserialize)]
    struct Manifest {
        package: Package,
        dependencies: toml::Table,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Package {
        rust_version: String,
    }
    let Manifest { package, dependencies } = toml::from_str(manifest).expect("a manifest");
    let needs: Vec<_> = dependencies.iter().map(|(name, needed)| need(name, needed)).collect();
    let entry = json!({
        "name": NAME, "vers": VERSION, "deps": needs, "cksum": digest, "features": {},
        "yanked": false, "rust_version": package.rust_version,
    });
    format!("{entry}\n")
}

fn need(name: &str, needed: &toml::Value) -> Value {
    let version = needed.get("version").unwrap_or(needed).as_str();
    let features = needed.get("features").cloned().map_or(json!([]), |it| json!(it));
    let with_defaults = needed.get("default-features").and_then(toml::Value::as_bool);
    json!({
        "name": name, "req": format!("^{}", version.expect("a version")), "features": features,
        "optional": false, "default_features": with_defaults.unwrap_or(true), "target": null,
        "kind": "normal", "registry": CRATES_IO,
    })
}
