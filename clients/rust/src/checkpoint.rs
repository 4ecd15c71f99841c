//! How far a job has come: stored by one attempt, and found by the next.

use std::sync::PoisonError;

use reqwest::StatusCode;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use crate::{
    client::{Error, Request},
    job::{Failure, Job},
};

const STEPS: &str = "steps";

type Fields = Map<String, Value>;

/// The last checkpoint of a job.
#[derive(Debug, Clone, Default)]
pub(crate) struct Saved {
    pub checkpoint: Option<Value>,
    /// The number of the last one that was sent.
    pub sequence: i64,
    /// The number of the last one that was stored: where another attempt begins.
    pub stored: i64,
}

#[derive(Default, Deserialize)]
struct Answer {
    status: String,
    checkpoint: Option<String>,
}

impl Job {
    /// How far the attempts of the job have come, as [`Self::save`] stored it; none: nowhere.
    #[must_use]
    pub fn checkpoint(&self) -> Option<Value> {
        self.saved().checkpoint
    }

    /// The number of the last checkpoint that was stored.
    pub(crate) fn stored(&self) -> i64 {
        self.saved().stored
    }

    fn saved(&self) -> Saved {
        let there = self.shared.saved.lock().unwrap_or_else(PoisonError::into_inner).clone();
        there.unwrap_or_else(|| Saved {
            checkpoint: self.checkpoint.clone(),
            sequence: self.checkpoint_sequence,
            stored: self.checkpoint_sequence,
        })
    }

    /// Stores how far the job has come: JSON of at most 64 KiB, for the next attempt.
    ///
    /// # Errors
    /// When the job must stop, the project is full, or a later checkpoint is there.
    pub async fn save(&self, checkpoint: impl Serialize) -> Result<(), Failure> {
        let checkpoint = serde_json::to_value(checkpoint)?;
        let _one_after_the_other = self.shared.saving.lock().await;
        self.save_now(checkpoint).await
    }

    async fn save_now(&self, checkpoint: Value) -> Result<(), Failure> {
        let no_worker = Error::Setup("only jobs of a worker have checkpoints");
        let (client, worker_id) = self.shared.worker.get().ok_or(no_worker)?;
        let before = self.saved();
        let sequence = before.sequence + 1;
        let mut body = self.fence();
        body["worker_id"] = json!(worker_id);
        body["checkpoint"] = checkpoint.clone();
        body["checkpoint_sequence"] = json!(sequence);
        // The number is used up, whatever becomes of the call.
        self.keep(Saved { sequence, ..before });
        let sent = client.request::<Answer>(Request::post("/v1/workers/heartbeat", body)).await;
        let answer = match sent {
            Err(Error::Api(error)) if error.status == StatusCode::CONFLICT => {
                self.lose();
                return self.check();
            }
            // Version 0.2.0 or older.
            Err(error) if error.refuses("checkpoint") && error.to_string().contains("unknown") => {
                Answer::default()
            }
            answer => answer?,
        };
        if answer.status == "cancel" {
            self.shared.stopped.cancel();
        }
        match answer.checkpoint.as_deref() {
            None => tracing::warn!("the server is too old for checkpoints"),
            Some("stored") => (),
            Some(other) => {
                return Err(Failure::new("NotSaved", &format!("the checkpoint is {other}")));
            }
        }
        self.keep(Saved { checkpoint: Some(checkpoint), sequence, stored: sequence });
        Ok(())
    }

    fn keep(&self, saved: Saved) {
        *self.shared.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(saved);
    }

    /// The checkpoint without its steps, and their results.
    fn steps(&self) -> Result<(Fields, Fields), Failure> {
        let mut all: Fields = match self.checkpoint() {
            None | Some(Value::Null) => Map::new(),
            Some(there) => serde_json::from_value(there)?,
        };
        let steps = match all.remove(STEPS) {
            None | Some(Value::Null) => Map::new(),
            Some(there) => serde_json::from_value(there)?,
        };
        Ok((all, steps))
    }

    /// Runs `work` if no attempt has done so, and returns its result: the checkpoint has it.
    ///
    /// # Errors
    /// Those of `work` and [`Self::save`]; and when the checkpoint is no object.
    pub async fn step<T, F>(&self, name: &str, work: impl FnOnce() -> F) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned,
        F: Future<Output = Result<T, Failure>>,
    {
        if let Some(done) = self.steps()?.1.remove(name) {
            return Ok(serde_json::from_value(done)?);
        }
        self.check()?;
        let result = work().await?;
        let _one_after_the_other = self.shared.saving.lock().await;
        // Other steps may have ended meanwhile.
        let (mut all, mut steps) = self.steps()?;
        steps.insert(name.to_owned(), serde_json::to_value(&result)?);
        all.insert(STEPS.to_owned(), Value::Object(steps));
        self.save_now(Value::Object(all)).await?;
        Ok(result)
    }
}
