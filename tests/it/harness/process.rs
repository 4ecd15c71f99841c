//! Nodes in processes of their own, and other people's programs around them.

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use super::{Database, client, eventually, redis_url, until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_fencepost");

/// Ports below those that the system gives to connections: none of them takes a node's while it is
/// restarted.
const PORTS: std::ops::Range<u32> = 20_000..32_000;

/// A port that is free, and that no other test of this run gets.
pub fn free_port() -> u16 {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = std::process::id() * 61 + GIVEN.fetch_add(1, Ordering::Relaxed);
        let port = PORTS.start + number % (PORTS.end - PORTS.start);
        let port = u16::try_from(port).expect("a port");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// An empty folder of this test run.
pub fn scratch(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder");
    dir
}

/// A program that ends with its test.
pub struct Process(Child);

impl Process {
    /// Starts it and drops its output.
    pub fn start(command: &mut Command) -> Self {
        let command = command.stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }

    /// Asks it to end, and waits until it has. Answers whether it ended well.
    pub async fn terminate(&mut self) -> bool {
        let pid = self.0.id().to_string();
        let reported = Command::new("kill").args(["-TERM", &pid]).status().expect("kill runs");
        assert!(reported.success());
        self.ended().await.success()
    }

    /// Waits until it has ended.
    async fn ended(&mut self) -> ExitStatus {
        eventually("a process to end", async || self.0.try_wait().expect("a child")).await
    }

    /// Ends it as a crash would.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A node.
pub struct NodeProcess {
    /// The API.
    pub port: u16,
    /// The operator's listener.
    pub operator_port: u16,
    process: Process,
}

impl NodeProcess {
    /// Starts one on free ports.
    pub fn start(database: &Database) -> Self {
        Self::start_at(database, free_port(), &[])
    }

    /// Starts one on this port, with more arguments.
    pub fn start_at(database: &Database, port: u16, args: &[&str]) -> Self {
        let operator_port = free_port();
        let (api, operator) = (format!("127.0.0.1:{port}"), format!("127.0.0.1:{operator_port}"));
        let process = Process::start(
            Command::new(PROGRAM)
                .args(["serve", "--listen", &api, "--metrics-listen", &operator])
                .args(args)
                .env("FENCEPOST_DATABASE_URL", &database.url)
                .env("FENCEPOST_REDIS_URL", redis_url())
                // It would store jobs that no test expects.
                .env("FENCEPOST_CANARY_SECONDS", "0"),
        );
        Self { port, operator_port, process }
    }

    /// Its base URL.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Reads the metrics of the node, as an operator scrapes them.
    pub async fn metrics(&self) -> String {
        let url = format!("http://127.0.0.1:{}/metrics", self.operator_port);
        let answer = client().get(url).send().await.expect("an answer");
        answer.text().await.expect("text")
    }

    /// Waits until it can serve.
    pub async fn until_ready(&mut self) {
        let url = self.url();
        tokio::select! {
            () = until_ready(&url) => (),
            status = self.process.ended() => panic!("the node at {url} has ended: {status}"),
        }
    }

    /// See [`Process::kill`].
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// See [`Process::terminate`].
    pub async fn terminate(&mut self) -> bool {
        self.process.terminate().await
    }
}

/// Waits until a server can serve.
pub async fn until_ready(url: &str) {
    let client = client();
    until(format!("{url} to be ready"), async || {
        let ready = client.get(format!("{url}/readyz")).send().await;
        ready.is_ok_and(|answer| answer.status() == 200)
    })
    .await;
}
