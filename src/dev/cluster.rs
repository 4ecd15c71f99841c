//! A private PostgreSQL: started from the installed binaries in a folder of its own, reachable
//! through a socket only, never as root, and stopped with this process.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, chown},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};

/// The oldest PostgreSQL that the statements are written for.
const MIN_VERSION: u32 = 15;
const START_TIMEOUT: Duration = Duration::from_secs(30);
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
const LOOK_PERIOD: Duration = Duration::from_millis(5);
/// Log lines that are shown when it does not start.
const SHOWN_LOG_LINES: usize = 10;
/// The superuser, who owns everything.
const OWNER: &str = "fencepost";
/// Where packages put the binaries; `*` stands for a version.
const PLACES: &[&str] = &[
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
];

/// Its durability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Commits are on disk before they are answered.
    Safe,
    /// For tests: a crash of the machine loses data.
    Fast,
}

/// A running private PostgreSQL.
#[derive(Debug)]
pub struct Cluster {
    postmaster: Child,
    socket_dir: PathBuf,
}

impl Cluster {
    /// Starts the cluster of `dir`, which is created the first time. Call it from the main thread:
    /// the cluster ends with the thread that started it.
    ///
    /// # Errors
    /// When no suitable PostgreSQL is installed, or it does not start.
    pub fn start(dir: &Path, durability: Durability) -> anyhow::Result<Self> {
        Self::start_at(dir, durability, socket_dir(std::process::id()))
    }

    /// The same with another folder for its socket, for a second cluster of this process.
    ///
    /// # Errors
    /// As for [`Self::start`].
    pub fn start_at(
        dir: &Path,
        durability: Durability,
        socket_dir: PathBuf,
    ) -> anyhow::Result<Self> {
        let binaries = find_binaries()?;
        let runner = Runner::for_this_user()?;
        if !dir.join("PG_VERSION").exists() {
            init(&binaries, &runner, dir)?;
        }
        stop_leftover(&binaries, &runner, dir)?;
        make_socket_dir(&runner, &socket_dir)?;
        let log_path = dir.with_extension("log");
        let log = fs::File::create(&log_path)?;
        let mut command = runner.command(&binaries.join("postgres"));
        command.arg("-D").arg(dir).arg("-k").arg(&socket_dir);
        for setting in settings(durability) {
            command.arg("-c").arg(setting);
        }
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // Ctrl-C is for us: we stop it at the end.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let postmaster = command.spawn().context("PostgreSQL could not be started")?;
        let mut cluster = Self { postmaster, socket_dir };
        cluster.wait_until_ready(dir, &log_path)?;
        Ok(cluster)
    }

    /// The URL of a database in it.
    #[must_use]
    pub fn database_url(&self, database: &str) -> String {
        format!("postgres://{OWNER}@localhost/{database}?host={}", self.socket_dir.display())
    }

    /// Copies it to a new folder, from which a standby of it starts.
    ///
    /// # Errors
    /// When `pg_basebackup` fails.
    pub fn copy_to(&self, dir: &Path, name: &str) -> anyhow::Result<()> {
        let source =
            format!("host={} user={OWNER} application_name={name}", self.socket_dir.display());
        let runner = Runner::for_this_user()?;
        fs::DirBuilder::new().mode(0o700).create(dir)?;
        runner.give(dir)?;
        // Some have links in another folder to what a cluster needs, and to no more.
        let postgres = fs::canonicalize(find_binaries()?.join("postgres"))?;
        let copied = runner
            .command(&postgres.with_file_name("pg_basebackup"))
            .arg("-D")
            .arg(dir)
            .args(["-d", &source, "--write-recovery-conf", "--checkpoint=fast", "--no-sync"])
            .stdin(Stdio::null())
            .output()?;
        let output = String::from_utf8_lossy(&copied.stderr);
        ensure!(copied.status.success(), "pg_basebackup failed: {output}");
        Ok(())
    }

    /// Stops a cluster that outlived its parent, if there is one.
    ///
    /// # Errors
    /// When no suitable PostgreSQL is installed, or it cannot be asked to stop.
    pub fn stop_leftover(dir: &Path) -> anyhow::Result<()> {
        stop_leftover(&find_binaries()?, &Runner::for_this_user()?, dir)
    }

    /// Fails when it has ended by itself.
    ///
    /// # Errors
    /// When it has ended.
    pub fn check(&mut self) -> anyhow::Result<()> {
        match self.postmaster.try_wait()? {
            Some(status) => bail!("PostgreSQL ended unexpectedly ({status})"),
            None => Ok(()),
        }
    }

    fn wait_until_ready(&mut self, dir: &Path, log_path: &Path) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        let pid_file = dir.join("postmaster.pid");
        while Instant::now() < deadline {
            if let Err(error) = self.check() {
                let log = fs::read_to_string(log_path).unwrap_or_default();
                let lines: Vec<_> = log.lines().collect();
                let last = lines[lines.len().saturating_sub(SHOWN_LOG_LINES)..].join("\n");
                return Err(error.context(format!("{}:\n{last}", log_path.display())));
            }
            // Line 1 is the process, line 8 its state.
            let text = fs::read_to_string(&pid_file).unwrap_or_default();
            let lines: Vec<_> = text.lines().map(str::trim).collect();
            let is_ours = lines.first().is_some_and(|it| *it == self.postmaster.id().to_string());
            if is_ours && lines.get(7) == Some(&"ready") {
                return Ok(());
            }
            std::thread::sleep(LOOK_PERIOD);
        }
        bail!(
            "PostgreSQL was not ready within {} s: see {}",
            START_TIMEOUT.as_secs(),
            log_path.display()
        )
    }
}

impl Drop for Cluster {
    /// Stops it: sessions are cut, commits stay.
    fn drop(&mut self) {
        let _ = signal("INT", &self.postmaster.id().to_string());
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline && matches!(self.postmaster.try_wait(), Ok(None)) {
            std::thread::sleep(LOOK_PERIOD);
        }
        let _ = fs::remove_dir_all(&self.socket_dir);
    }
}

fn settings(durability: Durability) -> Vec<&'static str> {
    let mut settings = vec![
        "listen_addresses=",
        "unix_socket_permissions=0700",
        "max_connections=300",
        "shared_buffers=256MB",
        "max_wal_size=2GB",
        "autovacuum_naptime=10s",
        "timezone=UTC",
        "log_timezone=UTC",
    ];
    if durability == Durability::Fast {
        settings.extend([
            "fsync=off",
            "synchronous_commit=off",
            "full_page_writes=off",
            "autovacuum=off",
            "shared_buffers=128MB",
            // Each test's database writes WAL: gigabytes would be kept otherwise.
            "max_wal_size=512MB",
        ]);
    }
    settings
}

/// The folder of the newest suitable PostgreSQL.
///
/// # Errors
/// When there is none.
pub fn find_binaries() -> anyhow::Result<PathBuf> {
    let mut places: Vec<PathBuf> = PLACES.iter().flat_map(|it| expand(it)).collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    places.extend(std::env::split_paths(&path));
    let newest = places
        .into_iter()
        .filter(|it| it.join("initdb").exists() && it.join("postgres").exists())
        .filter_map(|it| Some((version(&it)?, it)))
        .max();
    match newest {
        Some((version, place)) if version >= MIN_VERSION => Ok(place),
        found => {
            let found =
                found.map_or("none is installed".to_owned(), |it| format!("found {}", it.0));
            let command = if cfg!(target_os = "macos") {
                "brew install postgresql@17"
            } else {
                "sudo apt-get install -y postgresql"
            };
            bail!(
                "PostgreSQL {MIN_VERSION} or newer is needed, {found}. Install it with:\n\n    {command}\n"
            )
        }
    }
}

/// The folders that match a pattern with one `*`.
fn expand(pattern: &str) -> Vec<PathBuf> {
    let Some((before, after)) = pattern.split_once('*') else { return vec![pattern.into()] };
    let (parent, prefix) = before.rsplit_once('/').unwrap_or(("", before));
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries
        .filter(|it| it.file_name().to_string_lossy().starts_with(prefix))
        .map(|it| it.path().join(after.trim_start_matches('/')))
        .collect()
}

/// The major version from `postgres (PostgreSQL) 15.18 (Debian …)`.
#[must_use]
pub fn version(place: &Path) -> Option<u32> {
    let output = Command::new(place.join("postgres")).arg("--version").output().ok()?;
    let output = String::from_utf8(output.stdout).ok()?;
    let number = output.split(|it: char| !it.is_ascii_digit()).find(|it| !it.is_empty())?;
    number.parse().ok()
}

/// The user that it runs as.
pub(super) struct Runner {
    /// The unprivileged user that root becomes.
    becomes: Option<User>,
    can_follow_parent: bool,
}

struct User {
    uid: u32,
    gid: u32,
}

impl Runner {
    pub(super) fn for_this_user() -> anyhow::Result<Self> {
        let can_follow_parent =
            Command::new("setpriv").arg("--version").output().is_ok_and(|it| it.status.success());
        if !is_root()? {
            return Ok(Self { becomes: None, can_follow_parent });
        }
        ensure!(
            can_follow_parent,
            "PostgreSQL refuses to run as root, and `setpriv` is missing: install util-linux, or run as another user"
        );
        let user = find_user("postgres").or_else(|| find_user("nobody"));
        Ok(Self {
            becomes: Some(user.context("there is no user `postgres` or `nobody`")?),
            can_follow_parent,
        })
    }

    /// A command that runs as that user and gets SIGINT (a fast shutdown) when this process dies.
    pub(super) fn command(&self, program: &Path) -> Command {
        if !self.can_follow_parent {
            return Command::new(program);
        }
        let mut command = Command::new("setpriv");
        if let Some(User { uid, gid }) = &self.becomes {
            command.args([
                format!("--reuid={uid}"),
                format!("--regid={gid}"),
                "--clear-groups".into(),
            ]);
        }
        command.args(["--pdeathsig", "INT", "--"]).arg(program);
        command
    }

    pub(super) fn give(&self, path: &Path) -> io::Result<()> {
        match &self.becomes {
            Some(User { uid, gid }) => chown(path, Some(*uid), Some(*gid)),
            None => Ok(()),
        }
    }
}

/// Whether this process is root, and therefore must not run PostgreSQL itself.
///
/// # Errors
/// When `id` cannot be run.
pub fn is_root() -> anyhow::Result<bool> {
    let output = Command::new("id").arg("-u").output().context("`id -u` could not be run")?;
    Ok(output.stdout.trim_ascii() == b"0")
}

fn find_user(name: &str) -> Option<User> {
    let users = fs::read_to_string("/etc/passwd").ok()?;
    let fields: Vec<_> =
        users.lines().map(|it| it.split(':').collect::<Vec<_>>()).find(|it| it[0] == name)?;
    Some(User { uid: fields.get(2)?.parse().ok()?, gid: fields.get(3)?.parse().ok()? })
}

/// Creates the data folder under a temporary name and moves it when it is complete, so that an
/// interrupted start leaves nothing incomplete.
fn init(binaries: &Path, runner: &Runner, dir: &Path) -> anyhow::Result<()> {
    let fresh = dir.with_extension("new");
    for leftover in [dir, &fresh] {
        if leftover.exists() {
            fs::remove_dir_all(leftover)?;
        }
    }
    fs::DirBuilder::new().mode(0o700).create(&fresh)?;
    runner.give(&fresh)?;
    let made = runner
        .command(&binaries.join("initdb"))
        .arg("-D")
        .arg(&fresh)
        .args([
            "-U",
            OWNER,
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
            "--no-instructions",
        ])
        .stdin(Stdio::null())
        .output()?;
    if !made.status.success() {
        let output = String::from_utf8_lossy(&made.stderr);
        let place = dir.display();
        bail!("initdb failed in {place}; can the database's user access that folder?\n{output}");
    }
    fs::rename(&fresh, dir)?;
    Ok(())
}

/// Stops a cluster that outlived its parent; waits for one that is stopping.
fn stop_leftover(binaries: &Path, runner: &Runner, dir: &Path) -> anyhow::Result<()> {
    let pid_file = dir.join("postmaster.pid");
    let text = fs::read_to_string(&pid_file).unwrap_or_default();
    let Some(pid) = text.lines().next().map(str::trim).filter(|it| !it.is_empty()) else {
        return Ok(());
    };
    if is_postgres(pid) {
        let timeout = STOP_TIMEOUT.as_secs().to_string();
        let stopped = runner
            .command(&binaries.join("pg_ctl"))
            .arg("-D")
            .arg(dir)
            .args(["stop", "-m", "fast", "-w", "-t", &timeout])
            .output()?;
        // It may have ended by itself meanwhile.
        ensure!(
            stopped.status.success() || !is_postgres(pid),
            "a PostgreSQL of an earlier run does not stop:\n{}",
            String::from_utf8_lossy(&stopped.stderr)
        );
    } else {
        // The process id is unused, or belongs to another process.
        fs::remove_file(&pid_file)?;
    }
    Ok(())
}

/// Whether this process runs and is a PostgreSQL.
fn is_postgres(pid: &str) -> bool {
    if !signal("0", pid) {
        return false;
    }
    // Without /proc the process id must be enough.
    fs::read(format!("/proc/{pid}/cmdline"))
        .map_or(true, |it| String::from_utf8_lossy(&it).contains("postgres"))
}

/// Sends a signal and returns whether it arrived. Uses the shell's `kill`, which always exists.
fn signal(name: &str, pid: &str) -> bool {
    let mut command = Command::new("sh");
    command.args(["-c", "kill -\"$0\" \"$1\" 2>/dev/null", name, pid]);
    command.status().is_ok_and(|it| it.success())
}

/// The socket folder of a process's cluster. Short, because a socket's path has at most 107 bytes.
#[must_use]
pub fn socket_dir(pid: u32) -> PathBuf {
    PathBuf::from(format!("/tmp/fencepost-{pid}"))
}

/// Whether this process runs.
#[must_use]
pub fn is_running(pid: u32) -> bool {
    signal("0", &pid.to_string())
}

fn make_socket_dir(runner: &Runner, dir: &Path) -> anyhow::Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir)?;
    }
    fs::DirBuilder::new().mode(0o700).create(dir)?;
    runner.give(dir)?;
    Ok(())
}
