//! Workers in other languages, with the libraries of `clients/`: they say which jobs they get and
//! how they end them, and are killed now and then.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
};

use anyhow::Context;
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

use crate::{
    clients::World,
    history::{Answer, End, Event, Held, now},
    stage::Clock,
};

/// The languages: each has a queue of its name, and a program that takes the jobs of it.
pub const LANGUAGES: [&str; 2] = ["python", "node"];

/// The tenant whose workers have a clock that is fast.
const FAST_TENANT: usize = 1;
/// By how much.
const FAST_SECONDS: i64 = 3_600;

/// A line of a worker: it was given a job, or will end it.
#[derive(Deserialize)]
struct Said {
    job_id: String,
    attempt: i64,
    lease_id: String,
    /// The tenant whose mark the payload has.
    #[serde(rename = "tenant")]
    owner: usize,
    end: Option<End>,
}

/// Whether it is one of these workers. Their libraries send the acks, so this process does not know
/// the answers: [`Answer::Unknown`].
pub fn is_foreign(held: &Held) -> bool {
    held.worker.split_once('-').is_some_and(|it| LANGUAGES.contains(&it.0))
}

/// All of them: one of each language for each tenant.
pub struct Foreign {
    world: Arc<World>,
    /// Workers do not fail any more once this file is there.
    healing: PathBuf,
    workers: Vec<(usize, &'static str, Child)>,
}

/// The folder of the repository.
fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The languages whose programs are installed.
#[must_use]
pub fn installed() -> Vec<&'static str> {
    let is_installed = |it: &&str| {
        let program = if *it == "python" { "python3" } else { it };
        let reported = std::process::Command::new(program).arg("--version").output();
        reported.is_ok_and(|it| it.status.success())
    };
    LANGUAGES.into_iter().filter(is_installed).collect()
}

impl Foreign {
    /// Starts them, with their logs in this folder.
    ///
    /// # Errors
    /// When one does not start.
    pub fn start(world: &Arc<World>, dir: &Path) -> anyhow::Result<Self> {
        let healing = dir.join("healing");
        let mut foreign = Self { world: Arc::clone(world), healing, workers: Vec::new() };
        for tenant in 0..world.tenants.len() {
            for language in installed() {
                let worker = foreign.run(tenant, language)?;
                foreign.workers.push((tenant, language, worker));
            }
        }
        Ok(foreign)
    }

    fn run(&self, tenant: usize, language: &'static str) -> anyhow::Result<Child> {
        let place = LANGUAGES.iter().position(|it| *it == language).unwrap_or_default();
        let (programs, libraries) = (repository().join("chaos/workers"), repository());
        let mut command = match language {
            "python" => {
                let mut command = Command::new("python3");
                command.arg(programs.join("worker.py"));
                command.env("PYTHONPATH", libraries.join("clients/python"));
                command
            }
            _ => {
                let mut command = Command::new("node");
                command.arg(programs.join("worker.mjs"));
                command.env("CHAOS_LIBRARY", libraries.join("clients/typescript/index.js"));
                command
            }
        };
        command
            .env("FENCEPOST_URL", &self.world.urls[place % self.world.urls.len()])
            .env("FENCEPOST_KEY", &self.world.tenants[tenant].key)
            .env("CHAOS_HEALING", &self.healing)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        if tenant == FAST_TENANT {
            command.envs(Clock::Off(FAST_SECONDS).variables());
        }
        let mut child = command.spawn().with_context(|| format!("{language} did not start"))?;
        let said = child.stdout.take().context("its output")?;
        let (world, worker) = (Arc::clone(&self.world), format!("{language}-{tenant}"));
        tokio::spawn(async move {
            let mut lines = BufReader::new(said).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                // One that is killed may leave half a line.
                let Ok(said) = serde_json::from_str::<Said>(&line) else { continue };
                let Said { job_id: job, attempt, lease_id: lease, owner, end } = said;
                let held = Held { job, attempt, lease, worker: worker.clone() };
                world.history.note(match end {
                    None => Event::Leased { tenant, held, owner, is_first: false },
                    Some(end) => {
                        Event::Acked { tenant, held, end, answer: Answer::Unknown, sent: now() }
                    }
                });
            }
        });
        Ok(child)
    }

    /// Kills one of them, and starts it again.
    ///
    /// # Errors
    /// When it does not start again.
    pub async fn kill_one(&mut self, number: usize) -> anyhow::Result<()> {
        if self.workers.is_empty() {
            return Ok(());
        }
        let number = number % self.workers.len();
        let (tenant, language, worker) = &mut self.workers[number];
        worker.kill().await?;
        let (tenant, language) = (*tenant, *language);
        self.workers[number].2 = self.run(tenant, language)?;
        Ok(())
    }

    /// From now on they let no job fail.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn heal(&self) -> anyhow::Result<()> {
        Ok(std::fs::write(&self.healing, "")?)
    }
}
