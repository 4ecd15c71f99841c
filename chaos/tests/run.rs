//! Short runs of clients and faults, one of them with a new seed, are without violations, and
//! planted bugs are caught.

use std::{
    path::Path,
    process::{Command, Output},
};

/// Bugs that are planted: a fence that is missing, an ack before its commit, and another tenant's
/// jobs. `make mutants` plants all.
const MUTANTS: &str = "1,2,9";

fn chaos(args: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_fencepost-chaos");
    let server = Path::new(program).with_file_name("fencepost");
    assert!(server.exists(), "the server is missing: run `cargo build --workspace` first");
    Command::new(program).args(args).output().expect("it runs")
}

fn said(output: &Output) -> String {
    let texts = [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
    texts.concat()
}

/// One after the other: the machine must not be slower than faults allow.
#[test]
fn faults_break_no_promise_and_planted_bugs_do() {
    // A machine that tests share may pause by itself.
    for seed in [&["--seed", "1"][..], &[]] {
        let ran = chaos(&[&["run", "--seconds", "30", "--patience", "10"], seed].concat());
        assert!(ran.status.success(), "{}", said(&ran));
    }
    let caught = chaos(&["mutants", "--only", MUTANTS]);
    assert!(caught.status.success(), "{}", said(&caught));
}
