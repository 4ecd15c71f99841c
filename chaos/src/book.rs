//! The server's book: what the API says of every job, queue and schedule once all has ended.

use std::collections::BTreeMap;

use anyhow::Context;
use chrono::{DateTime, Utc};
use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::sleep;

use crate::clients::{RETRY_PAUSE, World};

/// Jobs that are read at a time.
const READS: usize = 16;
/// Tries of one read.
const MAX_TRIES: usize = 30;

/// A job, as the API shows it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BookJob {
    pub id: String,
    pub queue: String,
    pub job_type: String,
    pub state: String,
    pub attempt: i64,
    pub failures: i64,
    /// Attempts that were lost; servers before 0.3 count them as failures.
    #[serde(default)]
    pub losses: i64,
    /// Why it was dead-lettered, as servers since 0.3 say.
    #[serde(default)]
    pub dead_letter_reason: Option<String>,
    pub attempts: Vec<BookAttempt>,
    pub enqueued_at: DateTime<Utc>,
    #[serde(default)]
    pub parents: Vec<Value>,
    pub claimed_at: Option<DateTime<Utc>>,
    pub completed_at: Option<DateTime<Utc>>,
    #[serde(default)]
    pub payload: Value,
    /// Whose it is.
    #[serde(default)]
    pub tenant: usize,
}

impl BookJob {
    /// When its first attempt began; a success need not be in the list of attempts.
    pub fn began(&self) -> Option<DateTime<Utc>> {
        self.attempts.iter().map(|it| it.claimed_at).chain(self.claimed_at).min()
    }
}

/// An attempt that has ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BookAttempt {
    pub attempt: i64,
    pub outcome: String,
    pub claimed_at: DateTime<Utc>,
    pub ended_at: DateTime<Utc>,
}

/// A tick of a schedule.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BookFire {
    pub due_at: DateTime<Utc>,
    /// When it was handled.
    pub at: DateTime<Utc>,
    pub outcome: String,
    pub job_id: Option<String>,
    pub ticks: i64,
}

/// Everything.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Book {
    pub jobs: Vec<BookJob>,
    /// By tenant and queue: the number of its jobs in each state.
    pub counts: BTreeMap<usize, BTreeMap<String, BTreeMap<String, i64>>>,
    /// By tenant: the ticks of its schedule.
    pub fires: BTreeMap<usize, Vec<BookFire>>,
    /// From when until when the schedules fired, in milliseconds since 1970.
    pub schedules_ran: Option<(i64, i64)>,
    /// All nodes count expired leases of the native API as losses.
    #[serde(default)]
    pub counts_losses: bool,
}

impl Book {
    /// Reads it over the API.
    ///
    /// # Errors
    /// When the API does not answer.
    pub async fn read(world: &World, schedules: &[String]) -> anyhow::Result<Self> {
        let mut book = Self::default();
        for (tenant, schedule) in schedules.iter().enumerate() {
            let reader = Reader { world, tenant };
            let ids: Vec<_> = reader.all("/v1/jobs", "jobs").await?;
            let paths = ids.iter().filter_map(|it| it["id"].as_str().map(str::to_owned));
            let reads = stream::iter(paths.collect::<Vec<_>>())
                .map(|id| reader.get(format!("/v1/jobs/{id}")))
                .buffer_unordered(READS);
            for job in reads.collect::<Vec<_>>().await {
                let job: BookJob = serde_json::from_value(job?)?;
                book.jobs.push(BookJob { tenant, ..job });
            }
            for queue in &world.queues {
                let read = reader.get(format!("/v1/queues/{queue}")).await?;
                let counts = serde_json::from_value(read["counts"].clone())?;
                book.counts.entry(tenant).or_default().insert((*queue).to_owned(), counts);
            }
            let path = format!("/v1/recurring/{schedule}/fires");
            let fires = reader.all(&path, "fires").await?;
            let fires = fires.into_iter().map(serde_json::from_value);
            book.fires.insert(tenant, fires.collect::<Result<_, _>>()?);
        }
        Ok(book)
    }
}

struct Reader<'a> {
    world: &'a World,
    tenant: usize,
}

impl Reader<'_> {
    async fn get(&self, path: String) -> anyhow::Result<Value> {
        let mut tries = 0;
        loop {
            let url = &self.world.urls[tries % self.world.urls.len()];
            let key = &self.world.tenants[self.tenant].key;
            let request = self.world.client.get(format!("{url}{path}")).bearer_auth(key);
            let read = async { request.send().await?.error_for_status()?.json().await };
            tries += 1;
            match read.await {
                Ok(answer) => return Ok(answer),
                Err(error) if tries == MAX_TRIES => return Err(error.into()),
                Err(_) => sleep(RETRY_PAUSE).await,
            }
        }
    }

    /// All pages of a list.
    async fn all(&self, path: &str, name: &str) -> anyhow::Result<Vec<Value>> {
        let (mut all, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = self.get(format!("{path}?limit=100{cursor}")).await?;
            all.extend(page[name].as_array().context("a list")?.iter().cloned());
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return Ok(all),
            }
        }
    }
}
