//! The package of npm: what `npm pack` makes.

use super::{Served, VERSION, archive, sources};

/// The folder of all files, as npm wants it.
const FOLDER: &str = "package";

/// Where the package is.
pub fn path() -> String {
    format!("/clients/fencepost-{VERSION}.tgz")
}

pub fn paths() -> Vec<String> {
    vec![path()]
}

pub fn files() -> Vec<Served> {
    let package = archive::tar_gz(FOLDER, &sources("typescript"));
    vec![Served::new(path(), "application/gzip", package)]
}
