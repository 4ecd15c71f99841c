//! Callbacks: jobs that are enqueued when a job or a batch ends.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{backoff::RetryPolicy, dependency::FinalState};

/// Follow-ups of an end: jobs that it enqueues, and a URL that is notified.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Callbacks {
    /// After success; of a batch, when all of its jobs have succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_success: Option<Box<CallbackJob>>,
    /// After a failure: dead-lettered or cancelled. Of a batch, when one of its jobs has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_failure: Option<Box<CallbackJob>>,
    /// After any end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_complete: Option<Box<CallbackJob>>,
    /// A URL that is notified of any end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

impl Callbacks {
    /// The jobs that it enqueues, and those that their ends enqueue, each with the path of its
    /// fields, such as `on_success.on_failure.`.
    #[must_use]
    pub fn jobs(&self, path: &str) -> Vec<(String, &CallbackJob)> {
        let Self { on_success, on_failure, on_complete, url: _ } = self;
        let ends =
            [("on_success", on_success), ("on_failure", on_failure), ("on_complete", on_complete)];
        let mut found = Vec::new();
        for (name, job) in ends.into_iter().filter_map(|(name, it)| Some((name, it.as_ref()?))) {
            let path = format!("{path}{name}.");
            found.extend(job.callbacks.jobs(&path));
            found.push((path, job));
        }
        found
    }
}

/// A job that an end enqueues. Its fields were checked as those of every new job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallbackJob {
    /// Queue of the job.
    pub queue: String,
    /// Type of the job.
    pub job_type: String,
    /// The JSON as it was sent.
    pub payload: String,
    /// Minus the priority.
    pub rank: i16,
    /// None: the queue's setting or the default.
    pub max_attempts: Option<i32>,
    /// Timeout of an attempt, in seconds.
    pub timeout_seconds: i32,
    /// None: the queue's setting or the default.
    pub retry: Option<RetryPolicy>,
    /// None: no tags.
    pub tags: Option<BTreeMap<String, String>>,
    /// Labels that its worker must have, sorted.
    pub labels: Vec<String>,
    /// Its group within the queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The trace context of the enqueue that declared it.
    pub traceparent: Option<String>,
    /// JSON that an adapter keeps beside the payload.
    pub envelope: Option<String>,
    /// The jobs that its own end enqueues.
    pub callbacks: Callbacks,
}

/// The job that has ended, as the callback's payload reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EndedJob {
    /// The job.
    pub job_id: String,
    /// `succeeded`, `dead_letter` or `cancelled`.
    pub state: &'static str,
    /// The final state: as `state`, or `expired` or `skipped`, which `state` calls `cancelled`.
    pub final_state: &'static str,
    /// Counted from 1: a retried job ends again. None: it was deleted meanwhile.
    pub end_number: Option<i32>,
}

/// The batch that has ended, as the callback's payload reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EndedBatch {
    /// The batch.
    pub batch_id: String,
    /// Number of its jobs.
    pub jobs: i64,
    /// Number of jobs that have succeeded.
    pub succeeded: i64,
    /// Number of dead-lettered jobs.
    pub dead_letter: i64,
    /// Number of cancelled jobs.
    pub cancelled: i64,
    /// Number of skipped jobs.
    pub skipped: i64,
    /// These numbers by the names that they have in the answers about batches.
    #[serde(flatten)]
    pub counts: BatchCounts,
}

/// Numbers of a batch's jobs by how they ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "as in `EndedBatch`")]
pub struct BatchCounts {
    pub total_jobs: i64,
    pub succeeded_jobs: i64,
    pub dead_letter_jobs: i64,
    pub cancelled_jobs: i64,
    pub skipped_jobs: i64,
}

/// The ends that have a callback.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CallbackEnd {
    /// It succeeded.
    Success,
    /// It was dead-lettered or cancelled.
    Failure,
    /// It ended, in whatever way.
    Complete,
}

impl Callbacks {
    /// Each with the end that enqueues it.
    pub fn each(&self) -> impl Iterator<Item = (CallbackEnd, &CallbackJob)> {
        [
            (CallbackEnd::Success, &self.on_success),
            (CallbackEnd::Failure, &self.on_failure),
            (CallbackEnd::Complete, &self.on_complete),
        ]
        .into_iter()
        .filter_map(|(end, job)| Some((end, job.as_deref()?)))
    }

    /// How many jobs they are, with those that follow these.
    #[must_use]
    pub fn count(&self) -> usize {
        self.each().map(|(_, it)| 1 + it.callbacks.count()).sum()
    }

    /// How many of them follow each other; 0: there is none.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.each().map(|(_, it)| 1 + it.callbacks.depth()).max().unwrap_or_default()
    }

    /// The jobs that this end enqueues.
    pub fn of_end(self, end: FinalState) -> impl Iterator<Item = CallbackJob> {
        let (on_success, on_failure) = match end.has_failed() {
            true => (None, self.on_failure),
            false => (self.on_success.filter(|_| end == FinalState::Succeeded), None),
        };
        [on_success, on_failure, self.on_complete].into_iter().flatten().map(|it| *it)
    }
}

/// The payload of a callback: as it was sent, with what has ended as the field `ended`, if it is an
/// object without such a field or was not sent.
#[must_use]
pub fn payload(sent: String, ended: &impl Serialize) -> String {
    let Ok(ended) = serde_json::to_string(ended) else { return sent };
    let fields = match sent.trim() {
        "null" => "",
        object if object.starts_with('{') && !has_ended(object) => {
            let inside = object.strip_prefix('{').and_then(|it| it.strip_suffix('}'));
            inside.unwrap_or_default().trim()
        }
        _ => return sent,
    };
    let comma = if fields.is_empty() { "" } else { "," };
    format!(r#"{{{fields}{comma}"ended":{ended}}}"#)
}

fn has_ended(object: &str) -> bool {
    let fields: Result<BTreeMap<String, serde::de::IgnoredAny>, _> = serde_json::from_str(object);
    fields.map_or(true, |it| it.contains_key("ended"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn callback(callbacks: Callbacks) -> Box<CallbackJob> {
        Box::new(CallbackJob {
            queue: "q".to_owned(),
            job_type: "t".to_owned(),
            payload: "null".to_owned(),
            rank: 0,
            max_attempts: None,
            timeout_seconds: 1,
            retry: None,
            tags: None,
            labels: Vec::new(),
            group: None,
            traceparent: None,
            envelope: None,
            callbacks,
        })
    }

    #[test]
    fn callbacks_are_counted_with_those_that_follow_them() {
        let inner =
            Callbacks { on_failure: Some(callback(Callbacks::default())), ..<_>::default() };
        let all = Callbacks {
            on_success: Some(callback(inner.clone())),
            on_complete: Some(callback(inner)),
            ..<_>::default()
        };
        assert_eq!((all.count(), all.depth()), (4, 2));
        assert_eq!(Callbacks::default().depth(), 0);
        let of = |end| all.clone().of_end(end).count();
        assert_eq!(of(FinalState::Succeeded), 2);
        assert_eq!(of(FinalState::DeadLetter), 1);
        assert_eq!(of(FinalState::Skipped), 1);
    }

    #[test]
    fn what_ended_is_added_to_objects_only() {
        let sent_on = |sent: &str| payload(sent.to_owned(), &1);
        assert_eq!(sent_on("null"), r#"{"ended":1}"#);
        assert_eq!(sent_on("{}"), r#"{"ended":1}"#);
        assert_eq!(sent_on(r#" {"a": {"b": 2.50}} "#), r#"{"a": {"b": 2.50},"ended":1}"#);
        assert_eq!(sent_on(r#"{"ended": 2}"#), r#"{"ended": 2}"#);
        assert_eq!(sent_on("[{}]"), "[{}]");
    }
}
