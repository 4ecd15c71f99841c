//! Forged books of batches, workflows, schedules, counts and events.

use serde_json::json;

use super::{
    super::{families::late_violations, servers::judged},
    *,
};
use crate::{book::BookFire, nemesis::Fault, producers::BATCH_END};

fn named(id: &str, job: BookJob) -> BookJob {
    BookJob { id: id.to_owned(), ..job }
}

fn sent(id: &str) -> [Event; 2] {
    let reported = Event::Delivered {
        tenant: 0,
        event: format!("evt_{id}"),
        kind: "job.succeeded".to_owned(),
        job: id.to_owned(),
        is_taken: true,
    };
    [enqueued(&format!("key of {id}"), Some(id)), reported]
}

/// A batch of one job, and these callbacks of it: each began in this second.
fn batch(callbacks: &[i64]) -> Vec<Invariant> {
    let mut jobs = vec![job("succeeded", &["succeeded"])];
    let mut events = sent(JOB).to_vec();
    for (number, began) in callbacks.iter().enumerate() {
        let id = format!("job_callback{number}");
        let mut callback = named(&id, job("succeeded", &["succeeded"]));
        callback.job_type = BATCH_END.to_owned();
        callback.payload = json!({"mark": "m"});
        callback.attempts[0].claimed_at = at(*began);
        events.push(sent(&id)[1].clone());
        jobs.push(callback);
    }
    let (mark, batch) = ("m".to_owned(), vec![JOB.to_owned()]);
    events.push(Event::Batch { tenant: 0, mark, jobs: batch });
    found(&events, &book(&jobs))
}

#[test]
fn a_batch_calls_back_once_after_its_last_job() {
    assert_eq!(batch(&[100]), []);
    assert_eq!(batch(&[]), [Invariant::BatchesEndOnce]);
    assert_eq!(batch(&[100, 101]), [Invariant::BatchesEndOnce]);
    assert_eq!(batch(&[99]), [Invariant::BatchesEndOnce], "its last job ended later");
}

/// A workflow whose jobs have ended so; the children began in this second.
fn workflow([first, then, otherwise]: [&str; 3], began: i64) -> Vec<Invariant> {
    let ended = |id: &str, state: &str| {
        let outcomes: &[&str] = match state {
            "succeeded" => &["succeeded"],
            "dead_letter" => &["failed"; 3],
            _ => &[],
        };
        let mut job = named(id, job(state, outcomes));
        if id != "job_first" {
            job.attempts.iter_mut().for_each(|it| it.claimed_at = at(began));
        }
        job
    };
    let ids = ["job_first", "job_then", "job_otherwise"];
    let states = [first, then, otherwise];
    let jobs: Vec<_> = ids.iter().zip(states).map(|it| ended(it.0, it.1)).collect();
    let mut events: Vec<_> = jobs.iter().map(end_reported).collect();
    let [first, then, otherwise] = ids.map(str::to_owned);
    events.push(Event::Workflow { tenant: 0, first, then, otherwise });
    found(&events, &book(&jobs))
}

#[test]
fn children_run_after_the_end_that_they_wait_for() {
    assert_eq!(workflow(["succeeded", "succeeded", "cancelled"], 100), []);
    assert_eq!(workflow(["dead_letter", "cancelled", "dead_letter"], 100), []);
    let broken = [Invariant::ChildrenFollow];
    assert_eq!(workflow(["succeeded", "cancelled", "cancelled"], 100), broken);
    assert_eq!(workflow(["succeeded", "succeeded", "succeeded"], 100), broken);
    assert_eq!(workflow(["dead_letter", "succeeded", "succeeded"], 100), broken);
    assert_eq!(workflow(["succeeded", "succeeded", "cancelled"], 99), broken, "too early");
}

/// A schedule that ran from second 1 to 20, in which calls were accepted: when its entries were
/// due, and for how many ticks each stands.
fn fires(ticks: &[(i64, i64, Option<&str>)]) -> Vec<Invariant> {
    fires_while(ticks, 17)
}

/// The same, with the number of calls that were accepted, one in each second.
fn fires_while(ticks: &[(i64, i64, Option<&str>)], calls: usize) -> Vec<Invariant> {
    let fire = |(due, ticks, job): &(i64, i64, Option<&str>)| BookFire {
        due_at: at(*due),
        at: at(*due),
        outcome: if job.is_some() { "fired" } else { "skipped_overlap" }.to_owned(),
        job_id: job.map(str::to_owned),
        ticks: *ticks,
    };
    let fires: Vec<_> = ticks.iter().map(fire).collect();
    let ids: BTreeSet<_> = ticks.iter().filter_map(|it| it.2).collect();
    let jobs: Vec<_> = ids.iter().map(|it| named(it, job("succeeded", &["succeeded"]))).collect();
    let mut events: Vec<_> = ids.iter().map(|it| sent(it)[1].clone()).collect();
    let calls = ids.first().map(|id| vec![sent(id)[0].clone(); calls]);
    events.extend(calls.into_iter().flatten());
    let schedules_ran = Some((1_000, 20_000));
    let book = Book { jobs, fires: [(0, fires)].into(), schedules_ran, ..Book::default() };
    found(&events, &book)
}

#[test]
fn each_tick_has_one_entry_and_one_job() {
    assert_eq!(fires(&[(2, 1, Some("a")), (4, 1, Some("b")), (6, 1, None), (8, 1, None)]), []);
    assert_eq!(fires(&[(2, 1, Some("a")), (8, 3, None), (10, 1, Some("b"))]), []);
    let broken = [Invariant::TicksFireOnce];
    assert_eq!(fires(&[(2, 1, Some("a")), (8, 1, Some("b"))]), broken, "two are lost");
    assert_eq!(fires(&[(2, 3, Some("a")), (8, 1, Some("b"))]), broken, "they came later");
    assert_eq!(fires(&[(2, 1, Some("a")), (2, 1, Some("b")), (8, 3, None)]), broken, "twice");
    assert_eq!(fires(&[(6, 1, Some("a")), (8, 1, Some("a"))]), broken, "two have one job");
    let stopped = [(2, 1, Some("a")), (4, 1, Some("b"))];
    assert_eq!(fires(&stopped), broken, "it stopped");
    assert_eq!(fires_while(&stopped, 13), [], "the servers had stopped before");
    assert_eq!(fires(&[]), broken, "it never fired");
}

#[test]
fn ticks_are_missed_when_one_is_late_by_more_than_its_grace() {
    // Due in second 2 and every two seconds from then on; all are handled in this second.
    let handled = |second: i64, outcomes: &[&str]| {
        let fire = |(place, outcome): (i64, &&str)| BookFire {
            due_at: at(2 + 2 * place),
            at: at(second),
            outcome: (*outcome).to_owned(),
            job_id: (*outcome == "fired").then(|| JOB.to_owned()),
            ticks: 1,
        };
        let fires: Vec<_> = (0..).zip(outcomes).map(fire).collect();
        let its = BookJob { enqueued_at: at(second), ..job("succeeded", &["succeeded"]) };
        let mut found = Found(Vec::new());
        late_violations(&fires, &[(JOB, &its)].into(), &mut found);
        found.0.len()
    };
    assert_eq!(handled(32, &["fired", "fired"]), 0);
    assert_eq!(handled(33, &["missed", "missed", "fired"]), 0);
    assert_eq!(handled(31, &["missed", "fired"]), 1, "it was not too late");
    assert_eq!(handled(33, &["fired", "fired"]), 1, "the first was too late");
}

#[test]
fn counts_are_the_numbers_of_jobs() {
    let counted = |number: i64| {
        let states = [("succeeded".to_owned(), number), ("pending".to_owned(), 0)].into();
        let counts = [(0, [("q0".to_owned(), states)].into())].into();
        let jobs = vec![job("succeeded", &["succeeded"])];
        found(&sent(JOB), &Book { jobs, counts, ..Book::default() })
    };
    assert_eq!(counted(1), []);
    assert_eq!(counted(2), [Invariant::CountsAreRight]);
    assert_eq!(counted(0), [Invariant::CountsAreRight]);
    let states = [("succeeded".to_owned(), 1), ("scheduled".to_owned(), 1)].into();
    let counts = [(0, [("q0".to_owned(), states)].into())].into();
    let jobs = vec![job("succeeded", &["succeeded"])];
    let broken = found(&sent(JOB), &Book { jobs, counts, ..Book::default() });
    assert_eq!(broken, [Invariant::CountsAreRight], "none is scheduled");
}

#[test]
fn each_end_is_reported() {
    let [enqueued, _] = sent(JOB);
    let of = |event: Event| {
        found(&[enqueued.clone(), event], &book(&[job("succeeded", &["succeeded"])]))
    };
    let broken = [Invariant::EndsAreReported];
    assert_eq!(of(reported("job.succeeded")), []);
    assert_eq!(of(reported("job.dead_lettered")), broken);
    let (event, kind, id) = ("evt".to_owned(), "job.succeeded".to_owned(), JOB.to_owned());
    let refused = Event::Delivered { tenant: 0, event, kind, job: id, is_taken: false };
    assert_eq!(of(refused), broken, "it was refused");
    let both = |second: Event| {
        let events = [enqueued.clone(), reported("job.succeeded"), second];
        found(&events, &book(&[job("succeeded", &["succeeded"])]))
    };
    assert_eq!(both(reported("job.succeeded")), [], "the same event again");
    assert_eq!(both(reported("job.dead_lettered")), broken, "it did not end so");
    let mut second = reported("job.succeeded");
    if let Event::Delivered { event, .. } = &mut second {
        "evt_b".clone_into(event);
    }
    assert_eq!(both(second), broken, "two events");
    let foreign = Event::Delivered {
        tenant: 1,
        event: "evt".to_owned(),
        kind: "job.succeeded".to_owned(),
        job: JOB.to_owned(),
        is_taken: true,
    };
    assert_eq!(of(foreign), [Invariant::NoForeignJob]);
}

/// What happens when these faults begin and end in these seconds, calls are accepted until second
/// 10, and then again in this second.
fn paused(faults: &[(Fault, i64, i64)], accepted: i64) -> Vec<Line> {
    let line = |at: i64, event: Event| Line { at: at * 1_000, event };
    let mut lines = vec![line(10, leased(1, "x"))];
    for (fault, from, to) in faults {
        lines.push(line(*from, Event::Fault { fault: *fault }));
        lines.push(line(*to, Event::Healed { fault: *fault }));
    }
    lines.push(line(accepted, acked(1, "x", End::Succeeded, Answer::Unknown)));
    lines.push(line(accepted, acked(1, "x", End::Succeeded, Answer::Yes)));
    lines.sort_by_key(|it| it.at);
    lines
}

fn pause(faults: &[(Fault, i64, i64)], accepted: i64) -> BTreeMap<Fault, i64> {
    unavailable(&paused(faults, accepted))
}

#[test]
fn the_time_in_which_postgresql_takes_no_calls_is_no_pause() {
    use Fault::{NodeKilled, PostgresKilled, PostgresSlow, Promotion};
    assert_eq!(pause(&[(NodeKilled, 10, 15)], 13), [(NodeKilled, 3_000)].into());
    assert_eq!(pause(&[(PostgresKilled, 10, 15)], 20), [(PostgresKilled, 5_000)].into());
    let both = [(NodeKilled, 10, 17), (PostgresKilled, 11, 15)];
    assert_eq!(pause(&both, 22), [(PostgresKilled, 7_000)].into(), "the one that allows more");
    // A fault of its end does not hide what came before.
    let late = [(PostgresKilled, 10, 12), (PostgresSlow, 40, 43), (Promotion, 44, 45)];
    assert_eq!(pause(&late, 46), [(PostgresSlow, 32_000)].into());
    assert_eq!(pause(&[], 60), [].into(), "without faults there may be nothing to do");
}

#[test]
fn a_fault_before_the_end_of_a_pause_has_its_own_time() {
    use Fault::{EtcdKilled, LeaderKilled, RedisFrozen};
    let longest = |faults: &[(Fault, i64, i64)], accepted: i64| {
        judged(&paused(faults, accepted)).into_values().max().unwrap_or_default() / 1_000
    };
    let faults = [(LeaderKilled, 10, 33), (EtcdKilled, 38, 52)];
    assert_eq!(longest(&faults, 56), 28);
    assert_eq!(longest(&faults, 100), 62, "no other fault comes");
    assert_eq!(pause(&faults, 56), [(EtcdKilled, 46_000)].into(), "the whole is shown");
    let often: Vec<_> = (10..110).step_by(10).map(|it| (LeaderKilled, it, it + 1)).collect();
    assert_eq!(longest(&often, 110), 50, "half of the whole");
    let slow = [(Fault::NodeKilled, 10, 12), (Fault::PostgresSlow, 19, 20)];
    assert_eq!(
        judged(&paused(&slow, 20))[&Fault::NodeKilled],
        9_000,
        "what came later excuses none"
    );
    let harmless = [(LeaderKilled, 10, 12), (RedisFrozen, 49, 50)];
    assert_eq!(longest(&harmless, 88), 78, "the second one allows less");
}

#[test]
fn a_push_is_no_call_of_a_client() {
    let mut lines = paused(&[(Fault::NodeKilled, 10, 15)], 15);
    for second in 11..15 {
        let worker = "fencepost-push-0".to_owned();
        let held = Held { worker, ..held(1, "x") };
        let event = Event::Leased { tenant: 0, held, owner: 0, is_first: true };
        lines.push(Line { at: second * 1_000, event });
    }
    lines.sort_by_key(|it| it.at);
    assert_eq!(unavailable(&lines), [(Fault::NodeKilled, 5_000)].into());
}

#[test]
fn a_pause_that_is_too_long_is_found() {
    let line = |at: i64, event: Event| Line { at, event };
    let fault = Fault::NodeKilled;
    let broken = |accepted: i64| {
        let lines = [
            line(0, leased(1, "x")),
            line(1, Event::Fault { fault }),
            line(accepted, acked(1, "x", End::Succeeded, Answer::Yes)),
            line(accepted, enqueued("k", Some(JOB))),
            line(accepted, reported("job.succeeded")),
            line(accepted, Event::Healed { fault }),
        ];
        let book = book(&[job("succeeded", &["succeeded"])]);
        let broken = violations(&lines, &book, 1).into_iter().map(|it| it.invariant);
        broken.filter(|it| !APART.contains(it)).collect::<Vec<_>>()
    };
    assert_eq!(broken(1_900), []);
    assert_eq!(broken(2_500), [Invariant::Available]);
}

#[test]
fn jobs_that_are_mixed_up_are_found() {
    let stored = |job: BookJob, key: &str| {
        let job = BookJob { payload: json!({"key": key}), ..job };
        let lines = [Line { at: 1, event: enqueued("k", Some(JOB)) }];
        let broken = violations(&lines, &book(&[job]), 1);
        broken.iter().all(|it| it.invariant != Invariant::StoredAsSent)
    };
    let job = job("succeeded", &["succeeded"]);
    assert!(stored(job.clone(), "k"));
    assert!(!stored(job.clone(), "other"), "the payload of another one");
    assert!(!stored(BookJob { queue: "q1".to_owned(), ..job.clone() }, "k"));
    assert!(!stored(BookJob { tenant: 1, ..job }, "k"));
}
