//! The libraries as their languages install them: a wheel, an npm package, a Go module and a Rust
//! crate with its registry. They are made of the sources that this server was built with, so they
//! need no registry and have the server's version.

mod archive;
mod go;
mod python;
mod rust;
#[cfg(test)]
mod tests;
mod typescript;

use std::sync::LazyLock;

use axum::{
    Json, Router,
    body::Bytes,
    extract::State,
    http::header::{CACHE_CONTROL, CONTENT_TYPE},
    routing,
};
use fencepost_web::app::App;
use rust_embed::RustEmbed;
use sha2::{Digest, Sha256};

/// The sources of the libraries, by language and path.
#[derive(RustEmbed)]
#[folder = "../../clients/"]
#[include = "go/*.go"]
#[include = "go/go.mod"]
#[include = "go/README.md"]
#[include = "python/fencepost/*"]
#[include = "python/README.md"]
#[include = "rust/src/*.rs"]
#[include = "rust/Cargo.toml"]
#[include = "rust/README.md"]
#[include = "typescript/*.js"]
#[include = "typescript/*.d.ts"]
#[include = "typescript/package.json"]
#[include = "typescript/README.md"]
#[exclude = "*/examples/*"]
#[exclude = "*/node_modules/*"]
#[exclude = "*_test.go"]
#[exclude = "*/__pycache__/*"]
struct Sources;

const LICENCES: [(&str, &str); 2] = [
    ("LICENSE-APACHE", include_str!("../../../LICENSE-APACHE")),
    ("LICENSE-MIT", include_str!("../../../LICENSE-MIT")),
];

/// The version of the server and of its libraries.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A file that installs a library, or a list of such files.
struct Served {
    path: String,
    kind: &'static str,
    data: Bytes,
}

impl Served {
    fn new(path: impl Into<String>, kind: &'static str, data: impl Into<Bytes>) -> Self {
        Self { path: path.into(), kind, data: data.into() }
    }

    /// SHA-256, as hexadecimal digits.
    fn digest(&self) -> String {
        digest(&self.data)
    }
}

fn digest(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file of a package: its path in there, and its bytes.
type File = (String, Vec<u8>);

/// Sources of one library, by their paths in its folder, and the licences.
fn sources(folder: &str) -> Vec<File> {
    let prefix = format!("{folder}/");
    let sources = Sources::iter().filter_map(|path| {
        let name = path.strip_prefix(&prefix)?.to_owned();
        Some((name, Sources::get(&path)?.data.into_owned()))
    });
    let mut files: Vec<_> = sources.collect();
    files.extend(LICENCES.map(|(name, text)| (name.to_owned(), text.into())));
    files.sort();
    files
}

/// The text of one source.
fn source(path: &str) -> String {
    let file = Sources::get(path).map(|it| it.data.into_owned()).unwrap_or_default();
    String::from_utf8(file).unwrap_or_default()
}

/// All files, made when the server starts.
static FILES: LazyLock<Vec<Served>> = LazyLock::new(|| {
    let all = [python::files(), typescript::files(), go::files(), rust::files()];
    all.into_iter().flatten().collect()
});

/// The files below `/clients/`.
pub fn routes() -> Router<App> {
    let mut router = Router::new().route(rust::CONFIG, routing::get(registry));
    for file in FILES.iter() {
        // A server of another version has other bytes.
        let head = [(CONTENT_TYPE, file.kind), (CACHE_CONTROL, "no-cache")];
        let serve = routing::get(async move || (head, file.data.clone()));
        router = router.route(&file.path, serve);
    }
    router
}

/// The configuration of the registry. Cargo takes no relative URL.
async fn registry(State(app): State<App>) -> Json<serde_json::Value> {
    Json(rust::config(&app.accounts.public_url))
}

/// The page that lists them, as Markdown.
pub fn page() -> String {
    let mut page = include_str!("page.md").replace("{version}", VERSION);
    for (name, path) in [
        ("{python}", python::path()),
        ("{typescript}", typescript::path()),
        ("{go}", go::path()),
        ("{rust}", rust::path()),
    ] {
        let file = FILES.iter().find(|it| it.path == path);
        let row =
            file.map(|it| format!("[{path}]({path}) | {} | `{}`", it.data.len(), it.digest()));
        page = page.replace(name, &row.unwrap_or_default());
    }
    page
}
