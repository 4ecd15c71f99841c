//! Which jobs a list, a count or a bulk operation selects.

use chrono::{DateTime, Utc};
use serde_json::{Map, Value};
use uuid::Uuid;

use fencepost_domain::{
    ids::{BatchId, JobId},
    job::JobState,
    operation::{JobFilter, Kind},
    search::{self, IdPart, Search},
};

/// Which jobs a list shows. Conditions are combined with "and".
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Only jobs in one of these states; none: any.
    pub states: Vec<JobState>,
    /// Only jobs of this queue.
    pub queue: Option<String>,
    /// Only jobs of this type.
    pub job_type: Option<String>,
    /// Only jobs of this group.
    pub group: Option<String>,
    /// Only jobs with all of these tags; without a value, with any value.
    pub tags: Vec<(String, Option<String>)>,
    /// Only jobs that need a worker with all of these labels.
    pub labels: Option<Vec<String>>,
    /// Only paused jobs, or only others.
    pub is_paused: Option<bool>,
    /// Only jobs of this batch.
    pub batch_id: Option<BatchId>,
    /// Only jobs stored at this time or later.
    pub created_after: Option<DateTime<Utc>>,
    /// Only jobs stored before this time.
    pub created_before: Option<DateTime<Utc>>,
    /// Only jobs whose last error has this text in its type or message, in any case.
    pub error: Option<String>,
    /// Only these jobs.
    pub ids: Option<Vec<JobId>>,
    /// Only jobs with an id from the first to the second one.
    pub id_range: Option<(Uuid, Uuid)>,
    /// Only jobs whose id ends with the bits of the second number, as far as the first has them.
    pub id_end: Option<(i64, i64)>,
}

impl Filter {
    /// The conditions of an operation's filter, limited to states that its kind handles. Ages of
    /// its search line count back from `now`.
    ///
    /// # Errors
    /// The mistake in the search line.
    pub fn of(kind: Kind, filter: &JobFilter, now: DateTime<Utc>) -> Result<Self, String> {
        let named = Self {
            states: filter.state.into_iter().collect(),
            queue: filter.queue.clone(),
            job_type: filter.job_type.clone(),
            group: filter.group.clone(),
            tags: filter.tag.as_deref().map(read_tag).into_iter().collect(),
            batch_id: filter.batch_id,
            created_after: filter.created_after,
            created_before: filter.created_before,
            ids: filter.ids.as_deref().map(without_doubles),
            is_paused: kind.of_paused(),
            ..Self::default()
        };
        let mut all = match &filter.q {
            Some(line) => named.and(search::read(line, now)?)?,
            None => named,
        };
        if all.states.is_empty() {
            all.states = kind.states().to_vec();
        }
        match all.states.iter().find(|it| !kind.states().contains(it)) {
            Some(other) => Err(format!("{} jobs cannot be selected here", other.as_str())),
            None => Ok(all),
        }
    }

    /// These conditions and those of a search line.
    ///
    /// # Errors
    /// The condition that both name.
    pub fn and(self, line: Search) -> Result<Self, String> {
        let has_id = line.id.is_some();
        let both = [
            ("state", !self.states.is_empty() && !line.states.is_empty()),
            ("queue", self.queue.is_some() && line.queue.is_some()),
            ("type", self.job_type.is_some() && line.job_type.is_some()),
            ("group", self.group.is_some() && line.group.is_some()),
            ("batch", self.batch_id.is_some() && line.batch_id.is_some()),
            ("age:<", self.created_after.is_some() && line.created_after.is_some()),
            ("age:>", self.created_before.is_some() && line.created_before.is_some()),
            ("id", self.ids.is_some() && has_id),
        ];
        if self.is_paused == Some(false) && line.is_paused {
            return Err("has `is:paused`: paused jobs are left out here".to_owned());
        }
        let tags = [self.tags, line.tags].concat();
        if let Some(name) = search::doubled_tag(&tags) {
            return Err(format!("has `tag:{name}`, which is also given with another value"));
        }
        if let Some((name, _)) = both.iter().find(|it| it.1) {
            return Err(format!("has `{name}`, which is also given beside the line: give one"));
        }
        let (mut ids, mut id_range, mut id_end) = (self.ids, None, None);
        match line.id {
            Some(IdPart::Whole(id)) => ids = Some(vec![id]),
            Some(IdPart::Start { from, to }) => id_range = Some((from, to)),
            Some(IdPart::End { mask, bits }) => id_end = Some((mask, bits)),
            None => {}
        }
        Ok(Self {
            states: if line.states.is_empty() { self.states } else { line.states },
            queue: self.queue.or(line.queue),
            job_type: self.job_type.or(line.job_type),
            group: self.group.or(line.group),
            tags,
            labels: Some(line.labels).filter(|it| !it.is_empty()),
            is_paused: self.is_paused.or(line.is_paused.then_some(true)),
            batch_id: self.batch_id.or(line.batch_id),
            created_after: self.created_after.or(line.created_after),
            created_before: self.created_before.or(line.created_before),
            error: line.error,
            ids,
            id_range,
            id_end,
        })
    }

    pub(super) fn stored_states(&self) -> Vec<&'static str> {
        self.states.iter().flat_map(|it| stored_states(*it)).copied().collect()
    }

    /// Tags with a value, as an object that a job's tags must contain; none: none has one.
    pub(super) fn tag_values(&self) -> Option<Value> {
        let valued = self
            .tags
            .iter()
            .filter_map(|(name, value)| Some((name.clone(), Value::String(value.clone()?))));
        Some(valued.collect::<Map<_, _>>()).filter(|it| !it.is_empty()).map(Value::Object)
    }

    /// Names of tags with any value; none: there is none.
    pub(super) fn tag_names(&self) -> Option<Vec<String>> {
        let names = self.tags.iter().filter(|it| it.1.is_none()).map(|it| it.0.clone());
        Some(names.collect::<Vec<_>>()).filter(|it| !it.is_empty())
    }

    /// The text that the last error must have, in lower case.
    pub(super) fn error_text(&self) -> Option<String> {
        self.error.as_ref().map(|it| it.to_lowercase())
    }

    /// Whether only the dead letter is meant: it has a table of its own.
    pub(super) fn is_dead_only(&self) -> bool {
        self.states == [JobState::DeadLetter]
    }

    pub(super) fn chosen(&self) -> Option<Vec<Uuid>> {
        Some(self.ids.as_ref()?.iter().map(|it| it.0).collect())
    }

    /// The range of ids in which its jobs lie, below `before`: the first excluded id, and the
    /// smallest one.
    pub(super) fn bounds(&self, before: Option<JobId>) -> (Uuid, Uuid) {
        let created_before = self.created_before.map(|it| id_at(it, ID_CLOCK_MARGIN_MS));
        let (least, most) = (self.id_range.map(|it| it.0), self.id_range.map(|it| next(it.1)));
        let upper = [before.map(|it| it.0), created_before, most].into_iter().flatten().min();
        let created_after = self.created_after.map(|it| id_at(it, -ID_CLOCK_MARGIN_MS));
        let lower = created_after.into_iter().chain(least).max();
        (upper.unwrap_or(Uuid::max()), lower.unwrap_or(Uuid::nil()))
    }
}

/// A job that is named twice is one job.
fn without_doubles(ids: &[JobId]) -> Vec<JobId> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// A tag as filters write it: `name:value`, or `name` for any value.
#[must_use]
pub fn read_tag(text: &str) -> (String, Option<String>) {
    match text.split_once(':') {
        Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
        None => (text.to_owned(), None),
    }
}

/// How far the time in a job's id may lie from its `created_at`: ids are made by the nodes' clocks,
/// in milliseconds.
const ID_CLOCK_MARGIN_MS: i64 = 3_600_000;

/// The id after this one.
pub(super) fn next(id: Uuid) -> Uuid {
    Uuid::from_u128(id.as_u128().saturating_add(1))
}

fn stored_states(state: JobState) -> &'static [&'static str] {
    match state {
        JobState::Scheduled => &["scheduled"],
        JobState::Pending => &["pending", "backoff"],
        JobState::Processing => &["processing"],
        JobState::Succeeded => &["succeeded"],
        JobState::DeadLetter => &["dead_letter"],
        JobState::Cancelled => &["cancelled"],
    }
}

/// The smallest id that could have been made `margin_ms` after this time.
fn id_at(time: DateTime<Utc>, margin_ms: i64) -> Uuid {
    let millis = time.timestamp_millis().saturating_add(margin_ms).clamp(0, (1 << 48) - 1);
    Uuid::from_u128(u128::from(millis.unsigned_abs()) << 80)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(filter: JobFilter, expected: Result<&[JobState], &str>) {
        let read = Filter::of(Kind::JobsRetry, &filter, DateTime::UNIX_EPOCH);
        match (read, expected) {
            (Ok(read), Ok(states)) => assert_eq!(read.states, states, "{filter:?}"),
            (Err(error), Err(message)) => assert!(error.contains(message), "{error}"),
            (read, expected) => panic!("{filter:?}: {read:?}, not {expected:?}"),
        }
    }

    #[test]
    fn an_operation_selects_only_states_that_it_handles() {
        let of = |q: &str| JobFilter { q: Some(q.to_owned()), ..JobFilter::default() };
        check(JobFilter::default(), Ok(&[JobState::DeadLetter, JobState::Cancelled]));
        check(of("queue:mail"), Ok(&[JobState::DeadLetter, JobState::Cancelled]));
        check(of("state:cancelled"), Ok(&[JobState::Cancelled]));
        check(of("state:cancelled,succeeded"), Err("succeeded jobs cannot be selected"));
        let both = JobFilter { queue: Some("mail".into()), ..of("queue:mail") };
        check(both, Err("has `queue`"));
    }

    #[test]
    fn a_tag_has_one_value() {
        let of = |tag: &str, q: &str| JobFilter {
            tag: Some(tag.into()),
            q: Some(q.into()),
            ..JobFilter::default()
        };
        check(of("env:staging", "tag:env=prod"), Err("has `tag:env`"));
        let states = [JobState::DeadLetter, JobState::Cancelled];
        check(of("env:prod", "tag:env=prod"), Ok(&states));
        check(of("env", "tag:env=prod tag:eu"), Ok(&states));
    }
}
