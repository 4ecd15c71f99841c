//! The data folder of `dev`: its lock and its files.

use std::{
    fs::{self, File, TryLockError},
    io::Write,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use fencepost_config::read_secret;
use fencepost_net::seal;
use fencepost_store::connection::roles::{Logins, Role};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};

use super::cluster;

const DEFAULT_DIR: &str = ".fencepost";
/// The default for root, when the database's user cannot reach the usual one.
const ROOT_DIR: &str = "/var/lib/fencepost-dev";
const LOCK_FILE: &str = "dev.lock";
const READY_FILE: &str = "dev.json";
const KEY_FILE: &str = "dev.key";
const CLUSTER_DIR: &str = "postgres";
const MASTER_KEY_FILE: &str = "master.key";
const ROLES_DIR: &str = "roles";

/// A data folder, locked until this process ends.
#[derive(Debug)]
pub struct Folder {
    dir: PathBuf,
    _lock: File,
}

/// URL and key of a running `dev`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ready {
    pub url: String,
    /// A key that opens the demo project.
    pub api_key: String,
    pub project_id: String,
    pub metrics_url: String,
    pub pid: u32,
    pub database_url: String,
    #[serde(default)]
    pub redis_url: Option<String>,
}

impl Ready {
    /// The file for scripts.
    #[must_use]
    pub fn public(&self) -> serde_json::Value {
        serde_json::json!({
            "url": self.url,
            "api_key": self.api_key,
            "project_id": self.project_id,
            "metrics_url": self.metrics_url,
            "pid": self.pid,
        })
    }

    /// URL and key of the `dev` in this folder.
    ///
    /// # Errors
    /// When none runs there.
    pub fn of_running(data_dir: Option<PathBuf>) -> anyhow::Result<Self> {
        let dir = choose(data_dir)?;
        let text = fs::read_to_string(dir.join(READY_FILE));
        let text = text.ok().filter(|_| is_locked(&dir));
        let text =
            text.with_context(|| format!("no `fencepost dev` is running in {}", dir.display()))?;
        Ok(serde_json::from_str(&text)?)
    }
}

impl Folder {
    /// Creates the folder if necessary, and locks it.
    ///
    /// # Errors
    /// When another `dev` has it.
    pub fn claim(data_dir: Option<PathBuf>) -> anyhow::Result<Self> {
        let dir = choose(data_dir)?;
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let dir = dir.canonicalize()?;
        let lock = File::create(dir.join(LOCK_FILE))?;
        match lock.try_lock() {
            Ok(()) => {
                let this = Self { dir, _lock: lock };
                this.sweep();
                Ok(this)
            }
            Err(TryLockError::WouldBlock) => {
                let running = fs::read_to_string(dir.join(READY_FILE)).ok();
                let running = running.and_then(|it| serde_json::from_str::<Ready>(&it).ok());
                let who = running.map_or("It is just starting.".to_owned(), |server| {
                    format!("It is process {} at {}.", server.pid, server.url)
                });
                bail!(
                    "another `fencepost dev` runs in {}. {who} Stop it, or choose another folder with --data-dir and other addresses with --listen and --metrics-listen",
                    dir.display()
                )
            }
            Err(TryLockError::Error(error)) => Err(error.into()),
        }
    }

    /// Removes files of a killed `dev`.
    fn sweep(&self) {
        let left = fs::read_to_string(self.dir.join(READY_FILE)).ok();
        let left = left.and_then(|it| serde_json::from_str::<Ready>(&it).ok());
        // Only by process id: the file may contain anything.
        if let Some(pid) = left.map(|it| it.pid).filter(|it| !cluster::is_running(*it)) {
            let _ = fs::remove_dir_all(cluster::socket_dir(pid));
            let _ = fs::remove_dir_all(super::redis::Redis::dir(pid));
        }
        self.forget_ready();
    }

    /// Where the folder is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Where the database's files are.
    #[must_use]
    pub fn cluster_dir(&self) -> PathBuf {
        self.dir.join(CLUSTER_DIR)
    }

    /// The master key, created by the first run.
    ///
    /// # Errors
    /// When it cannot be written or read.
    pub fn master_key(&self) -> anyhow::Result<SecretString> {
        let file = self.dir.join(MASTER_KEY_FILE);
        if !file.exists() {
            write_private(&file, &seal::new_master_key())?;
        }
        Ok(read_secret(&file)?.into())
    }

    /// The passwords of the database roles, created by the first run.
    ///
    /// # Errors
    /// When they cannot be written or read.
    pub fn logins(&self) -> anyhow::Result<Logins> {
        let folder = self.dir.join(ROLES_DIR);
        fs::create_dir_all(&folder)?;
        for role in Role::ALL {
            let file = folder.join(role.file());
            if !file.exists() {
                let password: u128 = rand::random();
                write_private(&file, &format!("{password:032x}"))?;
            }
        }
        Logins::read(&folder)
    }

    /// Deletes the data and the key.
    ///
    /// # Errors
    /// When a file cannot be removed.
    pub fn reset(&self) -> anyhow::Result<()> {
        let _ = fs::remove_file(self.dir.join(KEY_FILE));
        let cluster_dir = self.cluster_dir();
        if cluster_dir.exists() {
            fs::remove_dir_all(&cluster_dir)?;
        }
        Ok(())
    }

    /// The key of an earlier run.
    #[must_use]
    pub fn read_key(&self) -> Option<String> {
        fs::read_to_string(self.dir.join(KEY_FILE)).ok().map(|it| it.trim().to_owned())
    }

    /// Stores the key for later runs.
    pub fn write_key(&self, api_key: &str) -> anyhow::Result<()> {
        write_private(&self.dir.join(KEY_FILE), api_key)
    }

    /// Writes URL and key for this machine's own commands.
    pub fn write_ready(&self, ready: &Ready) -> anyhow::Result<()> {
        write_private(&self.dir.join(READY_FILE), &serde_json::to_string(ready)?)
    }

    /// Deletes what [`Self::write_ready`] wrote.
    pub fn forget_ready(&self) {
        let _ = fs::remove_file(self.dir.join(READY_FILE));
    }
}

/// Writes a file that only this user may read, atomically.
pub fn write_private(path: &Path, text: &str) -> anyhow::Result<()> {
    let fresh = path.with_extension("part");
    let mut file =
        File::options().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    file.write_all(text.as_bytes())?;
    fs::rename(&fresh, path).with_context(|| format!("cannot write {}", path.display()))
}

fn choose(data_dir: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    if let Some(dir) = data_dir {
        return Ok(dir);
    }
    let here = std::env::current_dir()?;
    if cluster::is_root()? && !is_open_to_all(&here) {
        return Ok(ROOT_DIR.into());
    }
    Ok(here.join(DEFAULT_DIR))
}

/// Whether any user may traverse this folder and its parents.
fn is_open_to_all(dir: &Path) -> bool {
    const OTHERS_MAY_PASS: u32 = 0o001;
    dir.ancestors().all(|it| fs::metadata(it).is_ok_and(|it| it.mode() & OTHERS_MAY_PASS != 0))
}

fn is_locked(dir: &Path) -> bool {
    let lock = File::options().read(true).write(true).open(dir.join(LOCK_FILE));
    lock.is_ok_and(|it| matches!(it.try_lock(), Err(TryLockError::WouldBlock)))
}
