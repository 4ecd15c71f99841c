//! Planted bugs: each must be caught, and soon.

use std::{
    io::Write,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use crate::{
    bugs::{self, Bug},
    check::Invariant,
    nemesis::Faults,
    producers::MAX_LOAD_PERCENT,
    run::{self, Plan},
    stage::{Planted, Programs},
};

/// The longest hunt for one bug.
const HUNT_TIMEOUT: Duration = Duration::from_secs(600);
/// How long faults come in one run of a hunt, in seconds.
const RUN_SECONDS: u64 = 25;
/// The same for a bug that lets jobs wait for longer.
const LONG_RUN_SECONDS: u64 = 60;
/// How long jobs may take to end in it: some bugs keep them from it.
const DRAIN: Duration = Duration::from_secs(30);

/// A bug that was caught.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Caught {
    pub number: u8,
    pub name: String,
    pub commit: String,
    pub day: String,
    /// How long the hunt took.
    pub seconds: u64,
    /// The seed of the run that caught it.
    pub seed: u64,
    /// The invariant that showed it.
    pub invariant: Invariant,
    pub detail: String,
}

/// The bugs that were asked for, by their numbers; without a number, all.
///
/// # Errors
/// When there is no such bug.
pub fn asked(only: &[u8]) -> anyhow::Result<Vec<Bug>> {
    let mut all = bugs::all()?;
    for number in only {
        ensure!(all.iter().any(|it| it.number == *number), "there is no planted bug {number}");
    }
    all.retain(|it| only.is_empty() || only.contains(&it.number));
    Ok(all)
}

/// Runs nodes with this bug until it is caught.
///
/// # Errors
/// When it is not.
pub async fn hunt(dir: &Path, programs: &Programs, bug: &Bug) -> anyhow::Result<Caught> {
    let Bug { number, name, .. } = bug;
    let began = Instant::now();
    for seed in 1.. {
        let dir = dir.join(format!("mutant-{number}-{seed}"));
        let planted = Planted { bug: Some(*number), fail_percent: 0.0 };
        let (drain, patience) = (DRAIN, 1);
        let is_slow = bug.breaks.contains(&Invariant::OrderIsKept);
        let seconds = if is_slow { LONG_RUN_SECONDS } else { RUN_SECONDS };
        let during = Duration::from_secs(seconds);
        let faults = Faults { seed, during, under_patroni: false, only: Vec::new(), first: None };
        let plan = Plan { faults, planted, drain, patience, load_percent: MAX_LOAD_PERCENT };
        let report = run::run(&dir, programs.clone(), &plan).await?;
        std::fs::remove_dir_all(&dir)?;
        let mut violations = report.violations.iter();
        if let Some(worst) = violations.find(|it| bug.breaks.contains(&it.invariant)) {
            let caught = Caught {
                number: *number,
                name: name.clone(),
                commit: report.commit.clone(),
                day: report.day.clone(),
                seconds: began.elapsed().as_secs(),
                seed,
                invariant: worst.invariant,
                detail: worst.detail.clone(),
            };
            let Caught { invariant, seconds, .. } = &caught;
            let line = format!("{number} {name}: {invariant:?} after {seconds} s: {}", bug.about);
            let _ = writeln!(std::io::stdout(), "{line}");
            return Ok(caught);
        }
        ensure!(began.elapsed() < HUNT_TIMEOUT, "{name} was not caught in {HUNT_TIMEOUT:?}");
    }
    anyhow::bail!("no seed is left")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The page says so: it is measured while a run ends.
    const WITHOUT_A_BUG: &str = "EndsInTime";

    #[test]
    fn each_other_invariant_of_the_page_has_a_bug_that_must_break_it() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/proof.md");
        let page = std::fs::read_to_string(page).expect("a page");
        let (_, table) = page.split_once("| invariant | |\n").expect("the table");
        let name = |line: &str| Some(line.strip_prefix("| `")?.split('`').next()?.to_owned());
        let named: BTreeSet<_> = table.lines().skip(1).map_while(name).collect();
        let all = bugs::all().expect("a table");
        let alone = all.iter().filter_map(|it| match it.breaks.as_slice() {
            [only] => Some(format!("{only:?}")),
            _ => None,
        });
        assert_eq!(alone.chain([WITHOUT_A_BUG.to_owned()]).collect::<BTreeSet<_>>(), named);
    }
}
