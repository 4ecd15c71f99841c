//! Triggers: their queues, and the work in them.

use std::{collections::HashMap, time::Duration};

use fencepost_domain::limits::{MAX_POLL_WAIT_SECONDS, MAX_QUEUE_CHARS};
use futures_util::{
    Stream, StreamExt,
    future::try_join_all,
    stream::{self, FuturesUnordered},
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::StatusCode;
use tokio::time::{Instant, sleep};
use tonic::Status;

use crate::client::{Client, Failure};

/// Queues of one trigger: each holds a request to the server.
pub const MAX_QUEUES: usize = 20;
/// The number of jobs that one worker is for, unless the trigger says it.
const DEFAULT_JOBS_PER_WORKER: u32 = 1;
/// The most that `jobsPerWorker` may say.
pub const MAX_JOBS_PER_WORKER: u32 = 1_000_000;
/// While there is work, KEDA asks for its size itself; the end may be seen late, because KEDA keeps
/// workers for its `cooldownPeriod` then.
const LOOK_WHILE_ACTIVE: Duration = Duration::from_secs(10);
/// After a call that failed, or a wait that ended at once: the node stops.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// The queues that a group of workers serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trigger {
    queues: Vec<String>,
    pub(super) jobs_per_worker: u32,
}

impl Trigger {
    /// Reads the metadata of a trigger.
    ///
    /// # Errors
    /// An invalid argument, which names the field and its bound.
    pub(super) fn of(metadata: &HashMap<String, String>) -> Result<Self, Status> {
        let field = |name| metadata.get(name).map(|it| it.trim());
        let queues: Vec<_> =
            field("queues").unwrap_or_default().split(',').map(|it| it.trim().to_owned()).collect();
        let is_name = |it: &String| (1..=MAX_QUEUE_CHARS).contains(&it.chars().count());
        if !(1..=MAX_QUEUES).contains(&queues.len()) || !queues.iter().all(is_name) {
            return Err(Status::invalid_argument(format!(
                "`queues` must be 1 to {MAX_QUEUES} names, separated by commas, each of at most \
                 {MAX_QUEUE_CHARS} characters"
            )));
        }
        let jobs_per_worker =
            field("jobsPerWorker").map_or(Ok(DEFAULT_JOBS_PER_WORKER), str::parse);
        match jobs_per_worker {
            Ok(number @ 1..=MAX_JOBS_PER_WORKER) => Ok(Self { queues, jobs_per_worker: number }),
            _ => Err(Status::invalid_argument(format!(
                "`jobsPerWorker` must be a whole number from 1 to {MAX_JOBS_PER_WORKER}"
            ))),
        }
    }

    /// The jobs of all its queues that need workers.
    pub(super) async fn backlog(&self, client: &Client) -> Result<i64, Failure> {
        let each = self.queues.iter().map(|it| backlog(client, it, 0));
        Ok(try_join_all(each).await?.into_iter().fold(0, i64::saturating_add))
    }

    /// Waits for work in any queue. The first answer ends all waits, also one that came without
    /// work: its queue must not go unwatched.
    async fn any_work(&self, client: &Client) -> Result<bool, Failure> {
        let waits = self.queues.iter().map(|it| backlog(client, it, MAX_POLL_WAIT_SECONDS));
        let mut waits: FuturesUnordered<_> = waits.collect();
        match waits.next().await {
            Some(backlog) => Ok(backlog? > 0),
            None => Ok(false),
        }
    }

    /// Each change between work and none, beginning with what is now. Ends with the first failure
    /// that a later attempt would meet, too.
    pub(super) fn changes(self, client: Client) -> impl Stream<Item = Result<bool, Failure>> {
        stream::unfold((self, client, None), |(trigger, client, known)| async move {
            loop {
                let since = Instant::now();
                let seen = match known {
                    None => trigger.backlog(&client).await.map(|it| it > 0),
                    Some(false) => trigger.any_work(&client).await,
                    Some(true) => {
                        sleep(LOOK_WHILE_ACTIVE).await;
                        trigger.backlog(&client).await.map(|it| it > 0)
                    }
                };
                match seen {
                    Ok(is_active) if known == Some(is_active) => {
                        if since.elapsed() < RETRY_AFTER {
                            sleep(RETRY_AFTER).await;
                        }
                    }
                    Ok(is_active) => {
                        return Some((Ok(is_active), (trigger, client, Some(is_active))));
                    }
                    Err(failure) if failure.is_transient() => {
                        tracing::warn!(
                            error = &failure as &dyn std::error::Error,
                            queues = ?trigger.queues,
                            "cannot read backlogs"
                        );
                        sleep(RETRY_AFTER).await;
                    }
                    Err(failure) => return Some((Err(failure), (trigger, client, known))),
                }
            }
        })
    }
}

/// The backlog of a queue; waits this long for its first job.
async fn backlog(client: &Client, queue: &str, wait_seconds: u32) -> Result<i64, Failure> {
    let queue = utf8_percent_encode(queue, NON_ALPHANUMERIC);
    let path = format!("/v1/queues/{queue}/backlog?wait_seconds={wait_seconds}");
    let answer = client.get(&path).await?;
    let backlog = answer.json()["backlog"].as_i64();
    backlog.ok_or_else(|| Failure::of(StatusCode::BAD_GATEWAY, answer.text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(metadata: &[(&str, &str)]) -> Result<Trigger, String> {
        let metadata = metadata.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        Trigger::of(&metadata.collect()).map_err(|it| it.message().to_owned())
    }

    #[test]
    fn a_trigger_names_queues_and_jobs_per_worker() {
        let read_all = read(&[("queues", "mail, reports"), ("jobsPerWorker", " 20 ")]);
        let queues = vec!["mail".to_owned(), "reports".to_owned()];
        assert_eq!(read_all, Ok(Trigger { queues, jobs_per_worker: 20 }));
        let one = Trigger { queues: vec!["mail".to_owned()], jobs_per_worker: 1 };
        assert_eq!(read(&[("queues", "mail"), ("scalerAddress", "a:1")]), Ok(one));
    }

    #[test]
    fn a_trigger_that_cannot_be_read_names_the_field_and_its_bound() {
        let (many, long) = (["q"; MAX_QUEUES + 1].join(","), "q".repeat(MAX_QUEUE_CHARS + 1));
        for queues in ["", "mail,", &many, &long] {
            let refused = read(&[("queues", queues)]).expect_err("it is refused");
            assert!(refused.starts_with("`queues` must be 1 to 20 names"), "{refused}");
        }
        for number in ["0", "1.5", "-1", "1000001", "", "many"] {
            let trigger = [("queues", "mail"), ("jobsPerWorker", number)];
            let refused = read(&trigger).expect_err("it is refused");
            assert!(refused.contains("from 1 to 1000000"), "{refused}");
        }
    }
}
