//! What is printed: each measure's median and range.

use std::fmt::Write as _;

use serde::Serialize;

use super::process::{self, Usage};

/// One result.
#[derive(Debug, Clone, Serialize)]
pub struct Measure {
    pub name: String,
    /// The median of all rounds.
    pub value: f64,
    pub unit: &'static str,
    /// The lowest and the highest of several rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<(f64, f64)>,
    /// The value as a multiple of the commits that PostgreSQL alone did with 32 clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio_to_commits: Option<f64>,
    /// CPU of the server, in microseconds per job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_us_per_job: Option<f64>,
    /// CPU of PostgreSQL, in microseconds per job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postgres_us_per_job: Option<f64>,
    /// Write-ahead log of PostgreSQL, in bytes per job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wal_bytes_per_job: Option<f64>,
    /// Jobs per second, for each core of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jobs_per_core: Option<f64>,
}

/// A measure of which nothing else is known.
pub fn plain(name: impl Into<String>, value: f64, unit: &'static str) -> Measure {
    Measure {
        name: name.into(),
        value,
        unit,
        range: None,
        ratio_to_commits: None,
        server_us_per_job: None,
        postgres_us_per_job: None,
        wal_bytes_per_job: None,
        jobs_per_core: None,
    }
}

impl Measure {
    /// Adds the multiple of C1, and what `jobs` jobs used, where they are known.
    pub fn compared(self, commits: Option<f64>, used: Option<Usage>, jobs: f64) -> Self {
        let us = |seconds: f64| seconds * 1e6 / jobs;
        Self {
            ratio_to_commits: commits.map(|it| self.value / it),
            server_us_per_job: used.map(|it| us(it.server_seconds)),
            postgres_us_per_job: used.map(|it| us(it.postgres_seconds)),
            wal_bytes_per_job: used.map(|it| it.wal_bytes / jobs),
            jobs_per_core: Some(self.value / process::cores()),
            ..self
        }
    }
}

/// The median of each measure over all rounds, in the order of the first round that has it.
pub fn medians(rounds: Vec<Vec<Measure>>) -> Vec<Measure> {
    let mut names: Vec<String> = Vec::new();
    for measure in rounds.iter().flatten() {
        if !names.contains(&measure.name) {
            names.push(measure.name.clone());
        }
    }
    let all: Vec<Measure> = rounds.into_iter().flatten().collect();
    let of = |name: &String| {
        let same: Vec<&Measure> = all.iter().filter(|it| it.name == *name).collect();
        let (value, range) = median(same.iter().map(|it| it.value))?;
        let middle = |field: fn(&Measure) -> Option<f64>| {
            median(same.iter().filter_map(|it| field(it))).map(|it| it.0)
        };
        Some(Measure {
            name: name.clone(),
            value,
            unit: same.first()?.unit,
            range: (same.len() > 1).then_some(range),
            ratio_to_commits: middle(|it| it.ratio_to_commits),
            server_us_per_job: middle(|it| it.server_us_per_job),
            postgres_us_per_job: middle(|it| it.postgres_us_per_job),
            wal_bytes_per_job: middle(|it| it.wal_bytes_per_job),
            jobs_per_core: middle(|it| it.jobs_per_core),
        })
    };
    names.iter().filter_map(of).collect()
}

/// The median, and the lowest and highest value.
fn median(values: impl Iterator<Item = f64>) -> Option<(f64, (f64, f64))> {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (*sorted.first()?, *sorted.last()?);
    Some((sorted[sorted.len() / 2], (low, high)))
}

/// A table for people.
pub fn table(measures: &[Measure]) -> String {
    let mut text = format!(
        "{:<44} {:>9} {:<14} {:>19} {:>6} {:>6} {:>8} {:>8} {:>7}\n",
        "measure", "value", "unit", "range", "× C1", "a core", "server µs", "postgres", "WAL B"
    );
    for it in measures {
        let digits = if it.value < 100.0 { 2 } else { 0 };
        let range = it.range.map(|(low, high)| format!("{low:.digits$} to {high:.digits$}"));
        let optional =
            |it: Option<f64>, digits| it.map_or(String::new(), |it| format!("{it:.digits$}"));
        let _ = writeln!(
            text,
            "{:<44} {:>9.digits$} {:<14} {:>19} {:>6} {:>6} {:>9} {:>8} {:>7}",
            it.name,
            it.value,
            it.unit,
            range.unwrap_or_default(),
            optional(it.ratio_to_commits, 2),
            optional(it.jobs_per_core, 0),
            optional(it.server_us_per_job, 0),
            optional(it.postgres_us_per_job, 0),
            optional(it.wal_bytes_per_job, 0),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_become_a_median_and_a_range() {
        let round = |value| vec![plain("one", value, "jobs/s"), plain("other", 1.0, "ms")];
        let printed = medians(vec![round(3.0), round(9.0), round(4.0)]);
        assert_eq!(printed.len(), 2);
        assert_eq!((printed[0].value, printed[0].range), (4.0, Some((3.0, 9.0))));
        let once = medians(vec![round(3.0)]);
        assert_eq!((once[0].value, once[0].range), (3.0, None));
    }
}
