//! Findings with one cause are one incident: when the workers of a project are gone, the jobs of
//! all of its queues wait, or are held by them.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashSet},
};

use fencepost_domain::{
    alarm::{LosingWorker, Rule},
    ids::ProjectId,
};
use fencepost_store::sweep::alarms::{self, Found};
use sqlx::PgConnection;

/// The subject of the incident of an alarm about several queues without workers.
pub(super) const WITHOUT_WORKERS: &str = "queues without workers";

/// A finding, or several with one cause.
#[derive(Debug)]
pub(super) struct Grouped {
    pub found: Found,
    /// Queues without workers, the longest waiting first, or those with the most jobs.
    pub queues: Vec<String>,
    /// Workers that have lost the job of the finding, the last first.
    pub lost_by: Vec<LosingWorker>,
}

impl Grouped {
    fn of(found: Found, queues: Vec<String>) -> Self {
        Self { found, queues, lost_by: Vec::new() }
    }
}

/// Adds the workers that have lost the jobs of these findings of a project.
pub(super) async fn name_workers(
    conn: &mut PgConnection,
    project_id: ProjectId,
    found: &mut [Grouped],
) -> sqlx::Result<()> {
    let mut lost: Vec<_> =
        found.iter_mut().filter(|it| it.found.rule == Rule::JobsLost.name()).collect();
    let jobs: Vec<_> = lost.iter().filter_map(|it| it.found.job_id).collect();
    if jobs.is_empty() {
        return Ok(());
    }
    for (job, worker) in alarms::losing_workers(conn, project_id, &jobs).await? {
        let of_job = lost.iter_mut().filter(|it| it.found.job_id == Some(job));
        of_job.for_each(|it| it.lost_by.push(worker.clone()));
    }
    Ok(())
}

/// Puts the queues that share a cause together, those of each alarm, if there are several, or if an
/// incident about several of this alarm is open. The numbers are those of the queue that waits
/// longest; or of all, if silent workers hold their jobs. An incident about one of them that is
/// open stays so, and no further one begins.
pub(super) fn group(found: Vec<Found>, open_groups: &HashSet<&str>) -> Vec<Grouped> {
    let (sharing, others): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|it| it.shares_cause && it.queue.is_some());
    let mut of_alarm: BTreeMap<String, Vec<Found>> = BTreeMap::new();
    for found in sharing {
        of_alarm.entry(found.alarm.clone()).or_default().push(found);
    }
    let mut grouped: Vec<_> =
        others.into_iter().map(|found| Grouped::of(found, Vec::new())).collect();
    for (alarm, mut members) in of_alarm {
        members.sort_by_key(|it| (Reverse(it.value), it.queue.clone()));
        let queues: Vec<_> = members.iter().filter_map(|it| it.queue.clone()).collect();
        if members.len() > 1 || open_groups.contains(&*alarm) {
            let subject = Some(WITHOUT_WORKERS.to_owned());
            let is_beyond = members.iter().any(|it| it.is_beyond);
            let first = &members[0];
            let value = match first.rule == Rule::WorkersSilent.name() {
                true => members.iter().map(|it| it.value).sum(),
                false => first.value,
            };
            let return_by = members.iter().filter_map(|it| it.return_by).max();
            let found = Found { subject, is_beyond, value, return_by, ..first.clone() };
            grouped.push(Grouped::of(found, queues));
            let held = members.into_iter().map(|it| Found { is_beyond: false, ..it });
            grouped.extend(held.map(|found| Grouped::of(found, Vec::new())));
        } else {
            let alone = members.into_iter().map(|found| Grouped::of(found, queues.clone()));
            grouped.extend(alone);
        }
    }
    grouped
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;

    use super::*;

    fn found(alarm: &str, queue: &str, seconds: i64, shares_cause: bool) -> Found {
        Found {
            project_id: ProjectId(1),
            alarm: alarm.to_owned(),
            rule: "oldest_ready".to_owned(),
            mail_to: "owners".to_owned(),
            subject: Some(queue.to_owned()),
            subject_id: None,
            is_beyond: seconds > 60,
            for_seconds: 120,
            queue: Some(queue.to_owned()),
            job_type: None,
            error_type: None,
            job_id: None,
            name: None,
            value: Some(seconds),
            shares_cause,
            return_by: None,
        }
    }

    /// Alarm, subject, queues, and whether it is beyond the threshold.
    fn rows(grouped: &[Grouped]) -> Vec<(&str, &str, String, bool)> {
        let rows = grouped.iter().map(|Grouped { found, queues, .. }| {
            let subject = found.subject.as_deref().unwrap_or_default();
            (&*found.alarm, subject, queues.join(" "), found.is_beyond)
        });
        rows.collect()
    }

    #[test]
    fn several_queues_without_workers_are_one_finding_of_their_alarm() {
        let grouped = group(
            vec![
                found("a", "short", 50, true),
                found("a", "served", 900, false),
                found("b", "alone", 70, true),
                found("a", "long", 900, true),
            ],
            &HashSet::new(),
        );
        let nothing = String::new;
        assert_eq!(
            rows(&grouped),
            [
                ("a", "served", nothing(), true),
                ("a", WITHOUT_WORKERS, "long short".to_owned(), true),
                ("a", "long", nothing(), false),
                ("a", "short", nothing(), false),
                ("b", "alone", "alone".to_owned(), true),
            ]
        );
        assert_eq!(grouped[1].found.value, Some(900));
    }

    #[test]
    fn jobs_that_silent_workers_hold_are_summed_and_return_with_the_last() {
        let held = |queue, jobs, return_by| Found {
            rule: "workers_silent".to_owned(),
            return_by,
            ..found("a", queue, jobs, true)
        };
        let [early, late] = [0, 900].map(|it| DateTime::from_timestamp(it, 0));
        let grouped = group(vec![held("few", 3, late), held("many", 900, early)], &HashSet::new());
        let all = &grouped[0];
        assert_eq!((all.found.value, all.found.return_by), (Some(903), late));
        assert_eq!(all.queues, ["many", "few"]);
    }

    #[test]
    fn an_incident_about_several_queues_lasts_with_the_last_of_them() {
        let grouped = group(vec![found("a", "last", 90, true)], &HashSet::from(["a"]));
        assert_eq!(
            rows(&grouped),
            [("a", WITHOUT_WORKERS, "last".to_owned(), true), ("a", "last", String::new(), false),]
        );
    }
}
