//! `docs/protocols.md` has the numbers that the code has.

use fencepost_adapters::{mobius, ojs, orch8, workflow_graph};
use fencepost_domain::limits;
use fencepost_engine::dispatch;
use fencepost_store::claims::limited_claims;

use crate::docs::read;

#[test]
fn the_page_of_protocols_has_the_codes_numbers() {
    let seconds = |it: i64| format!("{it} s");
    let numbers = [
        ("Mobius: heartbeat interval", seconds(mobius::HEARTBEAT_INTERVAL_SECONDS.into())),
        ("Mobius: lease", seconds(mobius::LEASE_SECONDS.into())),
        ("Orch8: lease", seconds(orch8::LEASE_SECONDS.into())),
        ("Orch8: wait of a poll", format!("{} s", orch8::WAIT_SECONDS)),
        ("Orch8: steps of an instance", orch8::MAX_STEPS.to_string()),
        ("Orch8: steps and fallbacks of an instance", orch8::MAX_JOBS.to_string()),
        ("Orch8: stored sequences of a project", limits::MAX_WORKFLOW_DEFINITIONS.to_string()),
        ("Orch8: a stored sequence", format!("{} KiB", limits::MAX_DEFINITION_BYTES / 1024)),
        ("Orch8: sequences of one list", limits::MAX_PAGE_DEFINITIONS.to_string()),
        (
            "Open Job Spec: visibility timeout, unless asked",
            seconds(ojs::VISIBILITY_SECONDS.into()),
        ),
        ("Open Job Spec: jobs of one fetch", limits::MAX_POLL_CAPACITY.to_string()),
        (
            "Open Job Spec: what is kept of a job beside its arguments",
            format!("{} KiB", ojs::MAX_ENVELOPE_BYTES / 1024),
        ),
        (
            "workflow-graph: lease, unless asked",
            seconds(workflow_graph::DEFAULT_LEASE_SECONDS.into()),
        ),
        (
            "workflow-graph: jobs alike in type, labels and key looked through for commands",
            limited_claims::MAX_EXAMINED_FOR_COMMANDS.to_string(),
        ),
        ("queues of a poll that names none", dispatch::MAX_QUEUES.to_string()),
    ];
    let page = read("docs/protocols.md");
    let (_, table) = page.split_once("| number | value |\n|---|---|\n").expect("a table");
    let listed: Vec<_> = table.lines().take_while(|it| it.starts_with("| ")).collect();
    let expected: Vec<_> = numbers.iter().map(|(what, it)| format!("| {what} | {it} |")).collect();
    assert_eq!(listed, expected);
}
