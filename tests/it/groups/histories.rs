//! Random histories of groups under limits, rates, pauses and shared limits, beside a pure model:
//! no job starts that the rules forbid, and every job starts that they allow.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde_json::{Value, json};

use crate::{
    harness::{TestProject, TestServer, fresh_database, run_for, until},
    model::asked,
};

/// All histories of one test.
const TIME_LIMIT: Duration = Duration::from_secs(300);
const SEEDS: u64 = 6;
const STEPS: usize = 30;
const GROUPS: [&str; 4] = ["a", "b", "c", "d"];
/// Seconds of the windows of all rates: no start leaves one while a history runs.
const WINDOW_SECONDS: u32 = 86_400;

/// What the rules say of one group.
#[derive(Debug, Clone, Copy, Default)]
struct Rules {
    max_running: Option<usize>,
    /// Starts in a window.
    count: Option<usize>,
}

#[derive(Debug)]
struct Job {
    id: String,
    group: Option<&'static str>,
    priority: i64,
    is_paused: bool,
    /// The answer of the poll that leased it.
    leased: Option<Value>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Group {
    own: Option<Rules>,
    is_paused: bool,
    /// What a pause holds back comes back in steps, beside new jobs.
    was_paused: bool,
    started: usize,
}

struct History<'a> {
    t: &'a TestProject,
    queue: String,
    takes_turns: bool,
    dice: StdRng,
    rules: Rules,
    /// Running jobs of all groups together.
    shared: Option<usize>,
    groups: [Group; GROUPS.len()],
    /// Jobs that wait or run.
    jobs: Vec<Job>,
}

fn index(group: &str) -> usize {
    GROUPS.iter().position(|it| *it == group).expect("one of ours")
}

impl Rules {
    fn roll(dice: &mut StdRng) -> Self {
        let max_running = dice.random_bool(0.7).then(|| dice.random_range(1..4));
        let count = dice.random_bool(0.5).then(|| dice.random_range(2..9));
        // Rules without a number are none.
        let max_running = max_running.or(count.is_none().then_some(2));
        Self { max_running, count }
    }

    fn body(self) -> Value {
        let rates = self.count.map(|it| json!([{"count": it, "per_seconds": WINDOW_SECONDS}]));
        let mut body = json!({});
        if let Some(max_running) = self.max_running {
            body["max_running"] = max_running.into();
        }
        if let Some(rates) = rates {
            body["rates"] = rates;
        }
        body
    }
}

impl History<'_> {
    fn running(&self, group: Option<&str>) -> usize {
        let running = self.jobs.iter().filter(|it| it.leased.is_some());
        running.filter(|it| group.is_none() || it.group == group).count()
    }

    /// Its jobs that wait and are not paused.
    fn ready(&self, group: Option<&str>) -> usize {
        let ready = self.jobs.iter().filter(|it| it.leased.is_none() && !it.is_paused);
        ready.filter(|it| it.group == group).count()
    }

    /// How many jobs of a group may start, whatever all groups share.
    fn room(&self, group: Option<&'static str>) -> usize {
        let Some(name) = group else { return usize::MAX };
        let known = self.groups[index(name)];
        let Rules { max_running, count } = known.own.map_or(self.rules, |own| Rules {
            max_running: own.max_running.or(self.rules.max_running),
            count: own.count.or(self.rules.count),
        });
        if known.is_paused {
            return 0;
        }
        let slots = max_running.map_or(usize::MAX, |it| it.saturating_sub(self.running(group)));
        let starts = count.map_or(usize::MAX, |it| it.saturating_sub(known.started));
        slots.min(starts)
    }

    /// Jobs that the rules let start now.
    fn startable(&self) -> usize {
        let groups = GROUPS.into_iter().map(Some).chain([None]);
        let all: usize = groups.map(|it| self.room(it).min(self.ready(it))).sum();
        let shared = self.shared.map_or(usize::MAX, |it| it.saturating_sub(self.running(None)));
        all.min(shared)
    }

    fn path(&self, group: &str) -> String {
        format!("/v1/queues/{}/groups/{group}", self.queue)
    }

    async fn enqueue(&mut self) {
        let count = self.dice.random_range(1..=6);
        let mut made = Vec::new();
        for _ in 0..count {
            let group = self.dice.random_bool(0.85);
            let group = group.then(|| *GROUPS.choose(&mut self.dice).expect("one"));
            made.push((group, self.dice.random_range(0..3)));
        }
        let body: Vec<_> = made
            .iter()
            .map(|(group, priority)| {
                json!({
                    "job_type": "t", "queue": self.queue, "group": group, "priority": priority,
                })
            })
            .collect();
        let stored = self.t.post("/v1/jobs/batch", json!({"jobs": body})).await.is(201);
        for (job, (group, priority)) in stored["jobs"].as_array().expect("jobs").iter().zip(made) {
            let id = job["id"].as_str().expect("an id").to_owned();
            self.jobs.push(Job { id, group, priority, is_paused: false, leased: None });
        }
    }

    /// Two workers poll at once. What they get must have been allowed.
    async fn poll(&mut self) -> usize {
        let capacities = [self.dice.random_range(1..=5), self.dice.random_range(1..=20)];
        let body = |capacity: usize| {
            json!({
                "worker_id": "w", "queues": [self.queue], "capacity": capacity,
                "wait_seconds": 0,
            })
        };
        let polls = capacities.map(|it| self.t.polled(body(it)));
        let [one, other] = polls;
        let (one, other) = tokio::join!(one, other);
        let leased: Vec<_> = one.into_iter().chain(other).collect();
        for job in &leased {
            self.start(job);
        }
        if self.takes_turns {
            leased.iter().for_each(|it| self.was_best(it));
        }
        leased.len()
    }

    /// No job of its group that still waits has a higher priority.
    fn was_best(&self, leased: &Value) {
        let was_paused =
            leased["group"].as_str().is_some_and(|it| self.groups[index(it)].was_paused);
        let waiting = self.jobs.iter().filter(|it| it.leased.is_none() && !it.is_paused);
        let waiting = waiting.filter(|_| !was_paused);
        let mut of_group = waiting.filter(|it| leased["group"] == json!(it.group));
        let better = of_group.find(|it| Some(it.priority) > leased["priority"].as_i64());
        assert!(better.is_none(), "{better:?} waits behind {leased}");
    }

    fn start(&mut self, leased: &Value) {
        let at = self.jobs.iter().position(|it| leased["id"] == *it.id);
        let at = at.unwrap_or_else(|| panic!("not one that waits: {leased}"));
        assert!(self.jobs[at].leased.is_none(), "it runs: {leased}");
        assert!(!self.jobs[at].is_paused, "it is paused: {leased}");
        let group = self.jobs[at].group;
        assert!(self.room(group) > 0, "the rules forbid {leased}: {:?}", self.groups);
        let is_shared_full = self.shared.is_some_and(|it| self.running(None) >= it);
        assert!(!is_shared_full, "the shared limit forbids {leased}");
        self.jobs[at].leased = Some(leased.clone());
        if let Some(group) = group {
            self.groups[index(group)].started += 1;
        }
    }

    /// Polls until all run that may, and once more.
    async fn start_all(&mut self) {
        let seen = format!("{:?} beside {:?}", self.groups, self.shared);
        until(format!("all jobs that may start: {seen}"), async || {
            while self.poll().await > 0 {}
            self.startable() == 0
        })
        .await;
        self.poll().await;
    }

    async fn end_one(&mut self) {
        let running: Vec<_> =
            (0..self.jobs.len()).filter(|it| self.jobs[*it].leased.is_some()).collect();
        let Some(at) = running.choose(&mut self.dice).copied() else { return };
        let status = *["succeeded", "succeeded", "released"].choose(&mut self.dice).expect("one");
        let leased = self.jobs[at].leased.take().expect("it runs");
        self.t.ack(&leased, "w", status).await.is(200);
        if status == "succeeded" {
            self.jobs.remove(at);
        }
    }

    /// One of the jobs that wait.
    fn choose_waiting(&mut self) -> Option<usize> {
        let waiting: Vec<_> =
            (0..self.jobs.len()).filter(|it| self.jobs[*it].leased.is_none()).collect();
        waiting.choose(&mut self.dice).copied()
    }

    async fn pause_or_resume(&mut self) {
        let Some(at) = self.choose_waiting() else { return };
        let job = &mut self.jobs[at];
        let action = if job.is_paused { "resume" } else { "pause" };
        job.is_paused = !job.is_paused;
        self.t.act(&format!("/v1/jobs/{}/{action}", job.id)).await.is(200);
        if let Some(group) = job.group {
            self.groups[index(group)].was_paused = true;
        }
    }

    async fn cancel(&mut self) {
        let Some(at) = self.choose_waiting() else { return };
        let job = self.jobs.remove(at);
        self.t.act(&format!("/v1/jobs/{}/cancel", job.id)).await.is(200);
    }

    async fn change_a_group(&mut self) {
        let at = self.dice.random_range(0..GROUPS.len());
        let path = self.path(GROUPS[at]);
        let is_used = self.jobs.iter().any(|it| it.group == Some(GROUPS[at]));
        let group = &mut self.groups[at];
        match self.dice.random_range(0..4) {
            // Own rules need turns.
            0 if self.takes_turns => {
                let rules = Rules::roll(&mut self.dice);
                self.t.put(&path, rules.body()).await.is(200);
                group.own = Some(rules);
            }
            // Groups that are unknown are not reset.
            1 if is_used => {
                self.t.act(&format!("{path}/reset")).await.is(200);
                (group.own, group.started) = (None, 0);
            }
            _ => {
                let action = if group.is_paused { "resume" } else { "pause" };
                self.t.act(&format!("{path}/{action}")).await.is(200);
                group.is_paused = !group.is_paused;
                group.was_paused = true;
            }
        }
    }

    async fn change_shared(&mut self) {
        let max_running = self.dice.random_range(1..8);
        let limit = json!({"by": "all", "max_running": max_running});
        self.t.put(&format!("/v1/shared-limits/{}", self.queue), limit).await.is(200);
        self.shared = Some(max_running);
    }

    async fn step(&mut self) {
        match self.dice.random_range(0..19) {
            0..=3 => self.enqueue().await,
            4..=5 => _ = self.poll().await,
            6..=9 => self.end_one().await,
            10 => self.cancel().await,
            11..=12 => self.change_a_group().await,
            13..=15 => self.pause_or_resume().await,
            16 if self.shared.is_some() => self.change_shared().await,
            _ => self.start_all().await,
        }
    }
}

async fn play(t: &TestProject, seed: u64, takes_turns: bool, is_shared: bool) {
    let mut dice = StdRng::seed_from_u64(seed);
    // Starts are counted while a rate is there.
    let count = dice.random_range(3..20);
    let rules = Rules { count: Some(count), ..Rules::roll(&mut dice) };
    let mut history = History {
        t,
        queue: format!("q{seed}"),
        takes_turns,
        dice,
        rules,
        shared: None,
        groups: [Group::default(); GROUPS.len()],
        jobs: Vec::new(),
    };
    let path = format!("/v1/queues/{}", history.queue);
    let mut groups = rules.body();
    groups["fair"] = takes_turns.into();
    t.patch(&path, json!({"groups": groups})).await.is(200);
    if is_shared {
        history.change_shared().await;
        t.patch(&path, json!({"shared_limits": [history.queue]})).await.is(200);
    }
    for _ in 0..STEPS {
        history.step().await;
    }
    history.start_all().await;
}

/// Plays histories: more of them, from another seed on, where the night asks for it.
fn play_all(takes_turns: bool) {
    let histories = asked("FENCEPOST_MODEL_SEEDS").unwrap_or(SEEDS);
    let first = asked("FENCEPOST_MODEL_FIRST_SEED").unwrap_or(0);
    run_for(TIME_LIMIT, async {
        let database = fresh_database().await;
        let server = TestServer::start(database).await;
        let t = server.project("histories").await;
        for seed in first..first + histories {
            play(&t, seed, takes_turns, seed % 2 == 0).await;
        }
        server.stop().await;
    });
}

#[test]
fn whatever_happens_what_may_start_starts_and_nothing_else() {
    play_all(false);
}

#[test]
fn whatever_happens_turns_let_start_what_may_and_nothing_else() {
    play_all(true);
}
