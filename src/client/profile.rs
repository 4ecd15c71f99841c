//! Profiles: servers and their keys, as `fencepost login` keeps them in one file that only its
//! owner can read.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

/// The profile of commands that name none.
pub const DEFAULT: &str = "default";
/// Rights of others: none.
const OWNER_ONLY: u32 = 0o600;
const RIGHTS_OF_OTHERS: u32 = 0o077;

/// A server and its key.
#[derive(Clone, Serialize, Deserialize)]
pub struct Profile {
    pub url: String,
    pub api_key: String,
}

/// All profiles, by name.
#[derive(Default, Serialize, Deserialize)]
pub struct Profiles(BTreeMap<String, Profile>);

impl Profiles {
    /// The profiles of the file; none if there is no file.
    ///
    /// # Errors
    /// When others could read the file, or it cannot be read.
    pub fn read() -> anyhow::Result<Self> {
        let path = path()?;
        let Ok(metadata) = fs::metadata(&path) else { return Ok(Self::default()) };
        let shown = path.display();
        if metadata.permissions().mode() & RIGHTS_OF_OTHERS != 0 {
            bail!("{shown} has keys that others can read: chmod 600 {shown}");
        }
        let text = fs::read_to_string(&path).with_context(|| shown.to_string())?;
        serde_json::from_str(&text).with_context(|| format!("{shown} is not as it was written"))
    }

    /// The profile of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Profile> {
        self.0.get(name)
    }

    pub fn set(&mut self, name: String, profile: Profile) {
        self.0.insert(name, profile);
    }

    /// Whether there was one.
    pub fn remove(&mut self, name: &str) -> bool {
        self.0.remove(name).is_some()
    }

    /// Replaces the file at once: a reader sees the old or the new one.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self) -> anyhow::Result<PathBuf> {
        let path = path()?;
        let folder = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let fresh = path.with_extension(format!("{}.new", std::process::id()));
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(OWNER_ONLY);
        let mut file = options.open(&fresh).with_context(|| fresh.display().to_string())?;
        file.write_all(serde_json::to_string_pretty(&self)?.as_bytes())?;
        file.sync_all()?;
        fs::rename(&fresh, &path).with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

fn path() -> anyhow::Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|it| !it.is_empty()).map(PathBuf::from);
    let folder = set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")));
    let folder = folder.context("there is no home folder for profiles: set XDG_CONFIG_HOME")?;
    Ok(folder.join("fencepost/profiles.json"))
}
