//! A server of our own.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};

const START_TIMEOUT: Duration = Duration::from_secs(60);
/// What the server writes to stderr: attacks make it long.
const LOG_FILE: &str = "server.log";
const LOOK_PERIOD: Duration = Duration::from_millis(20);

/// The server's binary, which is built beside this one.
pub fn server_binary() -> anyhow::Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name("fencepost");
    ensure!(path.exists(), "{} is missing: build it first, as `make bench` does", path.display());
    Ok(path)
}

/// A `fencepost dev` of our own, in a temporary folder.
pub struct OwnServer {
    child: Child,
    pub dir: PathBuf,
}

impl OwnServer {
    pub fn start(more: &[&str]) -> anyhow::Result<Self> {
        let dir = PathBuf::from(format!("/var/tmp/fencepost-bench-{}", std::process::id()));
        let ready_file = dir.join("ready.json");
        std::fs::create_dir_all(&dir)?;
        let child = Command::new(server_binary()?)
            .args([
                "dev",
                "--listen",
                "127.0.0.1:0",
                "--metrics-listen",
                "127.0.0.1:0",
                "--log",
                "warn",
            ])
            .args(more)
            .arg("--data-dir")
            .arg(&dir)
            .arg("--ready-file")
            .arg(&ready_file)
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(dir.join(LOG_FILE))?)
            .spawn()?;
        let mut this = Self { child, dir };
        this.wait_for(&ready_file)?;
        Ok(this)
    }

    /// The most memory that the server has used so far, without its PostgreSQL and Redis.
    pub fn most_memory_mib(&self) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|it| it.strip_prefix("VmHWM:")).context("its peak")?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kib / 1024)
    }

    fn wait_for(&mut self, ready_file: &Path) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        while !ready_file.exists() {
            if self.child.try_wait()?.is_some() {
                let log = std::fs::read_to_string(self.dir.join(LOG_FILE)).unwrap_or_default();
                bail!("the server did not start: {log}");
            }
            ensure!(Instant::now() < deadline, "the server was not ready in time");
            std::thread::sleep(LOOK_PERIOD);
        }
        Ok(())
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        let _ = Command::new("sh")
            .args(["-c", "kill -TERM \"$0\"", &self.child.id().to_string()])
            .status();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
