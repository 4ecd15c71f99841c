//! The tables of `docs/proof.md`, from the results of runs and of planted bugs.

use std::{collections::BTreeMap, fmt::Write, path::Path};

use anyhow::Context;
use fencepost_store::faults;
use serde::{Deserialize, Serialize};

use crate::{mutants::Caught, nemesis::Fault, report::Report, stage::fail_points_of};

const BEGIN: &str = "<!-- tables -->\n";
const END: &str = "<!-- end of tables -->\n";
const TOGETHER: &str = "Together";

/// A line of the results.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "of", rename_all = "snake_case")]
pub enum Entry {
    Run(Report),
    Mutant(Caught),
}

/// Writes the tables between the two marks of the page.
///
/// # Errors
/// When the results cannot be read, or the page has no marks.
pub fn write(results: &Path, page: &Path) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(page)?;
    std::fs::write(page, with_tables(&text, &read(results)?)?)?;
    Ok(())
}

fn read(results: &Path) -> anyhow::Result<Vec<Entry>> {
    let text = std::fs::read_to_string(results)?;
    text.lines().map(|it| Ok(serde_json::from_str(it)?)).collect()
}

fn with_tables(page: &str, entries: &[Entry]) -> anyhow::Result<String> {
    let (before, rest) = page.split_once(BEGIN).context("the page has no mark")?;
    let (_, after) = rest.split_once(END).context("the page has no second mark")?;
    let runs: Vec<_> = entries
        .iter()
        .filter_map(|it| match it {
            Entry::Run(it) => Some(it),
            Entry::Mutant(_) => None,
        })
        .collect();
    let mut mutants: BTreeMap<u8, &Caught> = BTreeMap::new();
    for entry in entries {
        if let Entry::Mutant(it) = entry {
            mutants.insert(it.number, it);
        }
    }
    // A table says what holds of one commit: that of the last run.
    let commit = &runs.last().context("there are no runs")?.commit;
    let (runs, earlier): (Vec<_>, Vec<_>) = runs.into_iter().partition(|it| it.commit == *commit);
    let tables = [
        format!("### Runs of {commit}\n\n{}", runs_table(&runs)),
        sum(TOGETHER, &runs),
        operations_table(&runs),
        faults_table(&runs),
        sometimes_table(&runs),
        fail_points_table(&runs),
    ];
    let tables = tables.join("\n");
    let mutants = mutants_table(mutants.values().copied());
    let earlier = match earlier.is_empty() {
        true => String::new(),
        false => {
            let all: Vec<_> = earlier.iter().chain(&runs).copied().collect();
            let table = runs_table(&earlier);
            let (of_earlier, of_all) =
                (sum(TOGETHER, &earlier), sum("All runs of this page", &all));
            format!("\n### Earlier runs\n\n{table}\n{of_earlier}\n{of_all}")
        }
    };
    Ok(format!("{before}{BEGIN}{tables}\n{mutants}{earlier}{END}{after}"))
}

/// A number with commas.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

fn runs_table(runs: &[&Report]) -> String {
    let mut table = "| day | commit | PostgreSQL | seed | seconds | load | jobs | operations | \
                     faults | failed commits | all ended after | violations |\n\
                     |---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
        .to_owned();
    for it in runs {
        let of = |it: &mut dyn Iterator<Item = &u64>| grouped(it.sum());
        let drained = it.drained_ms.map_or("–".to_owned(), |ms| format!("{ms} ms"));
        let _ = writeln!(
            table,
            "| {} | {} | {} | {} | {} | {} % | {} | {} | {} | {} | {drained} | {} |",
            it.day,
            it.commit,
            servers(it),
            it.seed,
            grouped(it.seconds),
            it.load_percent,
            grouped(it.jobs as u64),
            of(&mut it.operations.values()),
            of(&mut it.faults.values()),
            of(&mut it.fail_points.values()),
            it.violations.len(),
        );
    }
    table
}

/// What runs in it.
fn servers(run: &Report) -> String {
    let postgres = if run.under_patroni { "Patroni" } else { "pair" };
    format!("{postgres}{}", if run.previous.is_some() { ", two releases" } else { "" })
}

/// What all of these runs did.
fn sum(what: &str, runs: &[&Report]) -> String {
    let seconds: u64 = runs.iter().map(|it| it.seconds).sum();
    let operations = grouped(runs.iter().flat_map(|it| it.operations.values()).sum());
    let faults = grouped(runs.iter().flat_map(|it| it.faults.values()).sum());
    let violations: usize = runs.iter().map(|it| it.violations.len()).sum();
    format!(
        "{what}: {} minutes of faults, {operations} operations, {faults} faults, \
         {violations} violations.\n",
        seconds / 60
    )
}

fn operations_table(runs: &[&Report]) -> String {
    let mut operations: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, number) in runs.iter().flat_map(|it| &it.operations) {
        *operations.entry(name).or_default() += number;
    }
    let mut table = "| operation and outcome | number |\n|---|---:|\n".to_owned();
    for (name, number) in operations {
        let _ = writeln!(table, "| {name} | {} |", grouped(number));
    }
    table
}

fn faults_table(runs: &[&Report]) -> String {
    let mut table = "### Faults\n\nThe longest time in which no call of any client was accepted, \
                     without the\ntime in which PostgreSQL took none.\n\n\
                     | fault | number | longest without an accepted call | bound |\n\
                     |---|---:|---:|---:|\n"
        .to_owned();
    for (fault, ..) in Fault::ALL {
        let number = runs.iter().filter_map(|it| it.faults.get(&fault)).sum();
        let longest = runs.iter().filter_map(|it| it.unavailable_ms.get(&fault)).max();
        let longest = match longest {
            Some(ms) => format!("{ms} ms"),
            None if number == 0 => "–".to_owned(),
            None => "under 200 ms".to_owned(),
        };
        let (name, bound) = (fault.name(), fault.bound_seconds());
        let _ = writeln!(table, "| {name} | {} | {longest} | {bound} s |", grouped(number));
    }
    table
}

fn sometimes_table(runs: &[&Report]) -> String {
    let mut all: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, number) in runs.iter().flat_map(|it| &it.sometimes) {
        *all.entry(name).or_default() += number;
    }
    let mut table = "### What was met\n\n| sometimes | number |\n|---|---:|\n".to_owned();
    for (name, number) in all {
        let _ = writeln!(table, "| {name} | {} |", grouped(number));
    }
    table
}

fn fail_points_table(runs: &[&Report]) -> String {
    let mut table =
        "### Failed commits\n\n| commit of | before | after |\n|---|---:|---:|\n".to_owned();
    for point in faults::FAIL_POINTS {
        let [before, after] = fail_points_of(point)
            .map(|name| grouped(runs.iter().filter_map(|it| it.fail_points.get(&name)).sum()));
        let _ = writeln!(table, "| `{point}` | {before} | {after} |");
    }
    table
}

fn mutants_table<'a>(mutants: impl Iterator<Item = &'a Caught>) -> String {
    let mut table = "### Planted bugs\n\n| number | bug | caught by | after | commit |\n\
                     |---:|---|---|---:|---|\n"
        .to_owned();
    for it in mutants {
        let Caught { number, name, commit, seconds, invariant, .. } = it;
        let _ =
            writeln!(table, "| {number} | `{name}` | `{invariant:?}` | {seconds} s | {commit} |");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_the_results() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let page = std::fs::read_to_string(docs.join("proof.md")).expect("a page");
        let entries = read(&docs.join("proof.jsonl")).expect("results");
        assert_eq!(with_tables(&page, &entries).expect("marks"), page);
    }

    #[test]
    fn the_page_names_each_fault() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let page = std::fs::read_to_string(docs.join("proof.md")).expect("a page");
        for (fault, ..) in Fault::ALL {
            let name = serde_json::to_value(fault).expect("a name");
            let name = name.as_str().expect("a text");
            assert!(page.contains(&format!("`{name}`")), "{name} is not explained");
        }
    }

    #[test]
    fn long_numbers_have_commas() {
        assert_eq!([0, 999, 1_000, 23_022_044].map(grouped), ["0", "999", "1,000", "23,022,044"]);
    }
}
