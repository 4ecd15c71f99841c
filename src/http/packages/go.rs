//! The Go module, as `GOPROXY` asks for it (<https://go.dev/ref/mod#goproxy-protocol>).

use super::{Served, VERSION, archive, source, sources};

/// The import path of the module, the same on every server: an import path has no port.
const MODULE: &str = "fencepost.example/fencepost";

fn at(name: &str) -> String {
    format!("/clients/go/{MODULE}/{name}")
}

fn of_version(end: &str) -> String {
    at(&format!("@v/v{VERSION}.{end}"))
}

/// The path of the module.
pub fn path() -> String {
    of_version("zip")
}

pub fn files() -> Vec<Served> {
    let inside = |(name, data)| (format!("{MODULE}@v{VERSION}/{name}"), data);
    let module: Vec<_> = sources("go").into_iter().map(inside).collect();
    let info = serde_json::json!({"Version": format!("v{VERSION}")}).to_string();
    let text = "text/plain; charset=utf-8";
    vec![
        Served::new(at("@v/list"), text, format!("v{VERSION}\n")),
        Served::new(at("@latest"), "application/json", info.clone()),
        Served::new(of_version("info"), "application/json", info),
        Served::new(of_version("mod"), text, source("go/go.mod")),
        Served::new(path(), "application/zip", archive::zip(&module)),
    ]
}
