//! The package of npm, as `npm pack` makes it.

use super::{Served, VERSION, archive, sources};

/// The folder of all files, as npm wants it.
const FOLDER: &str = "package";

/// The path of the package.
pub fn path() -> String {
    format!("/clients/fencepost-{VERSION}.tgz")
}

pub fn files() -> Vec<Served> {
    let package = archive::tar_gz(FOLDER, &sources("typescript"));
    vec![Served::new(path(), "application/gzip", package)]
}
