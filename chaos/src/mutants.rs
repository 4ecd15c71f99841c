//! Planted bugs: each must be caught, and soon.

use std::{
    io::Write,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use fencepost_store::faults::Mutant;
use serde::{Deserialize, Serialize};

use crate::{
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

/// The invariants that a bug must break.
const fn broken_by(mutant: Mutant) -> &'static [Invariant] {
    use Invariant::{
        AcceptedIsRecorded, Available, BatchesEndOnce, CallsHaveAnOrder, ChildrenFollow,
        CountsAreRight, EndsAreTold, EveryJobEnds, FailuresAreCounted, LimitsAreKept, NoEarlyEnd,
        NoEndAppears, NoForeignJob, NoStrangeAnswer, NotBeforeItsTime, NothingAppears, OneLease,
        OrderIsKept, PausesAndCancelsHold, RepeatedIsTheSame, StoredAsSent, SuccessIsFinal,
        TicksFireOnce,
    };
    match mutant {
        Mutant::NoFence | Mutant::AckBeforeCommit | Mutant::StaleAckAccepted => {
            &[AcceptedIsRecorded, SuccessIsFinal, CallsHaveAnOrder]
        }
        Mutant::FailureAsRelease => &[AcceptedIsRecorded],
        Mutant::AckNotWritten => &[SuccessIsFinal],
        Mutant::EnqueueBeforeCommit | Mutant::NotReaped => &[EveryJobEnds],
        Mutant::NewSeed => &[NothingAppears],
        Mutant::DeliveredTwice => &[OneLease],
        Mutant::HeartbeatNotWritten => &[NoEarlyEnd],
        Mutant::ForeignPoll => &[NoForeignJob],
        Mutant::LateDeadLetter => &[FailuresAreCounted],
        Mutant::BatchCallsTwice => &[BatchesEndOnce],
        Mutant::EventLost => &[EndsAreTold],
        Mutant::RetriedEarly => &[NotBeforeItsTime],
        Mutant::PauseIgnored | Mutant::CancelNotWritten => &[PausesAndCancelsHold],
        Mutant::LimitIgnored => &[LimitsAreKept],
        Mutant::LeftBehind => &[OrderIsKept],
        Mutant::RefusedPushSucceeds | Mutant::LeaseReleased | Mutant::FailureCancels => {
            &[NoEndAppears]
        }
        Mutant::RepeatRefused => &[RepeatedIsTheSame],
        Mutant::AckRefused | Mutant::HeartbeatRefused => &[CallsHaveAnOrder],
        Mutant::TickLost => &[TicksFireOnce],
        Mutant::SuccessIsFailure => &[ChildrenFollow],
        Mutant::StoredAndFailed => &[NoStrangeAnswer],
        Mutant::StandsStill => &[Available],
        Mutant::PayloadsMixed => &[StoredAsSent],
        Mutant::CountTooLow => &[CountsAreRight],
    }
}

/// The numbers that were asked for.
///
/// # Errors
/// When there is no such bug.
pub fn numbers(only: &[u8]) -> anyhow::Result<Vec<u8>> {
    let all = Mutant::ALL.map(|it| it as u8);
    for number in only {
        ensure!(all.contains(number), "there is no planted bug {number}");
    }
    Ok(if only.is_empty() { all.to_vec() } else { only.to_vec() })
}

/// Runs nodes with this bug until it is caught.
///
/// # Errors
/// When it is not.
pub async fn hunt(dir: &Path, programs: &Programs, number: u8) -> anyhow::Result<Caught> {
    let mutant = Mutant::ALL.into_iter().find(|it| *it as u8 == number).context("a bug")?;
    let began = Instant::now();
    for seed in 1.. {
        let dir = dir.join(format!("mutant-{number}-{seed}"));
        let planted = Planted { mutant: Some(number), fail_percent: 0.0 };
        let (drain, patience) = (DRAIN, 1);
        let seconds = match mutant {
            Mutant::LeftBehind => LONG_RUN_SECONDS,
            _ => RUN_SECONDS,
        };
        let during = Duration::from_secs(seconds);
        let faults = Faults { seed, during, under_patroni: false, only: Vec::new() };
        let plan = Plan { faults, planted, drain, patience, load_percent: MAX_LOAD_PERCENT };
        let report = run::run(&dir, programs.clone(), &plan).await?;
        std::fs::remove_dir_all(&dir)?;
        let expected = broken_by(mutant);
        let mut violations = report.violations.iter();
        if let Some(worst) = violations.find(|it| expected.contains(&it.invariant)) {
            let caught = Caught {
                number,
                name: format!("{mutant:?}"),
                commit: report.commit.clone(),
                day: report.day.clone(),
                seconds: began.elapsed().as_secs(),
                seed,
                invariant: worst.invariant,
                detail: worst.detail.clone(),
            };
            let Caught { invariant, seconds, .. } = &caught;
            let _ =
                writeln!(std::io::stdout(), "{number} {mutant:?}: {invariant:?} after {seconds} s");
            return Ok(caught);
        }
        ensure!(began.elapsed() < HUNT_TIMEOUT, "{mutant:?} was not caught in {HUNT_TIMEOUT:?}");
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
        let alone = Mutant::ALL.into_iter().filter_map(|it| match broken_by(it) {
            [only] => Some(format!("{only:?}")),
            _ => None,
        });
        assert_eq!(alone.chain([WITHOUT_A_BUG.to_owned()]).collect::<BTreeSet<_>>(), named);
    }
}
