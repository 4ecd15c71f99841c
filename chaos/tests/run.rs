//! A short run of clients and faults is without violations. `make nightly` runs longer ones, also
//! with new seeds, and plants every bug.

use std::{
    path::Path,
    process::{Command, Output},
};

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

#[test]
fn faults_break_no_promise() {
    // A machine that tests share may pause by itself.
    let ran = chaos(&["run", "--seconds", "20", "--patience", "10", "--seed", "1"]);
    assert!(ran.status.success(), "{}", said(&ran));
}
