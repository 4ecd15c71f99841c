//! A private Redis: started from the installed binary, reachable through a socket only, without
//! persistence, and stopped with this process.

use std::{
    os::unix::{fs::DirBuilderExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};

use super::cluster::Runner;

const START_TIMEOUT: Duration = Duration::from_secs(10);
const LOOK_PERIOD: Duration = Duration::from_millis(5);
/// Its memory limit.
const MAX_MEMORY: &str = "128mb";
const SOCKET: &str = "redis.sock";
const PROGRAM: &str = "redis-server";

/// A running private Redis.
#[derive(Debug)]
pub struct Redis {
    server: Child,
    dir: PathBuf,
}

impl Redis {
    /// Starts it with its socket in `dir`, which is recreated and must be short: a socket's path
    /// has at most 107 bytes. Never as root. Call it from the main thread: it ends with the thread
    /// that started it.
    ///
    /// # Errors
    /// When none is installed, or it does not start.
    pub fn start(dir: &Path) -> anyhow::Result<Self> {
        let runner = Runner::for_this_user()?;
        if dir.exists() {
            std::fs::remove_dir_all(dir)?;
        }
        std::fs::DirBuilder::new().mode(0o700).create(dir)?;
        runner.give(dir)?;
        let socket = dir.join(SOCKET);
        let mut command = runner.command(Path::new(PROGRAM));
        command
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no"])
            .args(["--maxmemory", MAX_MEMORY, "--maxmemory-policy", "noeviction"])
            .args(["--unixsocketperm", "700", "--logfile", ""])
            .arg("--dir")
            .arg(dir)
            .arg("--unixsocket")
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // Ctrl-C is for us: we stop it at the end.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let server = command.spawn().context("Redis could not be started")?;
        let mut redis = Self { server, dir: dir.to_owned() };
        redis.wait_until_ready(&socket)?;
        Ok(redis)
    }

    /// The socket of a process's Redis.
    #[must_use]
    pub fn dir(pid: u32) -> PathBuf {
        std::env::temp_dir().join(format!("fencepost-redis-{pid}"))
    }

    /// Whether the binary is installed.
    #[must_use]
    pub fn is_installed() -> bool {
        Command::new(PROGRAM).arg("--version").output().is_ok_and(|it| it.status.success())
    }

    /// Its socket.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis+unix://{}", self.dir.join(SOCKET).display())
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.server.id()
    }

    fn wait_until_ready(&mut self, socket: &Path) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.server.try_wait()? {
                bail!("Redis ended at once ({status}); is `{PROGRAM}` installed?");
            }
            if UnixStream::connect(socket).is_ok() {
                return Ok(());
            }
            std::thread::sleep(LOOK_PERIOD);
        }
        bail!("Redis was not ready within {} s", START_TIMEOUT.as_secs())
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // It has nothing to persist.
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
