//! Many jobs in one request, and lists that are read page by page.

use tokio::process::Command;

use super::{go, python, rust, typescript};
use crate::harness::run;

#[test]
fn each_library_enqueues_many_jobs_and_reads_all_pages() {
    const JOBS: usize = 5;
    run(async |t| {
        for (number, program) in [python, typescript, go, rust].into_iter().enumerate() {
            let mut command = Command::from(program());
            command.args(["many", &JOBS.to_string()]).kill_on_drop(true);
            command.env("FENCEPOST_URL", &t.url).env("FENCEPOST_KEY", &t.api_key);
            let output = command.output().await.expect("it runs");
            let said = String::from_utf8_lossy(&output.stdout);
            // Those of the others are listed, too.
            assert_eq!(said.trim(), format!("{JOBS} {}", JOBS * (number + 1)), "{output:?}");
        }
    });
}
