//! Random histories against a pure model: whatever workers, reapers and people do, in whatever
//! order and with whatever fences, the store is where the model says. Faults that are planted must
//! be found.

use std::time::Duration;

use fencepost::dev;
use fencepost_domain::{
    dependency::{Dependency, When},
    error::Error,
    ids::{JobId, JobKey, LeaseId, ProjectId},
    job::{AttemptOutcome, StoredState},
    lease::Fence,
    plan::{Limits, Tenant},
    text::ErrorReport,
    worker::WorkerState,
};
use fencepost_engine::{
    Engine, dispatch,
    enqueue::{
        self, Extras, NewJob, Origin, Start,
        dependencies::{JobWithDependencies, OnConflict},
    },
    maintenance::{self, cascade, promote, reap},
    settle::{self, Ack, Acked, Failure, ReportedOutcome},
    workers,
};
use fencepost_store::{self as store};

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use sqlx::PgConnection;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

mod callbacks;
mod control;
mod faults;
mod machine;

use self::{
    faults::{again, patiently},
    machine::{Answer, Awaited, Model},
};
use crate::harness::{Database, fresh_database, run_for};

const WORKERS: [&str; 3] = ["ann", "bob", "cy"];
/// All histories of one test.
const TIME_LIMIT: Duration = Duration::from_secs(400);
const SEEDS: u64 = 10;
const STEPS: usize = 70;
const MAX_JOBS: usize = 7;

/// A mistake that the system under test is made to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plant {
    Nothing,
    /// An ack settles whatever runs, from any worker.
    NoFence,
    /// A failure is decided on stale data.
    NoRowLock,
    /// A manual retry counts attempts from the beginning.
    ResetAttempt,
    /// An end is recorded twice.
    EndTwice,
}

struct Run {
    /// For looks at the store.
    conn: PgConnection,
    engine: Engine,
    database: Database,
    project_id: ProjectId,
    dice: StdRng,
    jobs: Vec<Model>,
    /// Fences that were once given.
    given: Vec<(usize, Fence)>,
    plant: Plant,
}

type Checked = Result<(), String>;

impl Run {
    fn key(&self, job: usize) -> JobKey {
        JobKey { project_id: self.project_id, id: self.jobs[job].id }
    }

    fn any_job(&mut self) -> Option<usize> {
        let there: Vec<_> = (0..self.jobs.len()).filter(|it| !self.jobs[*it].is_gone).collect();
        there.choose(&mut self.dice).copied()
    }

    async fn step(&mut self) -> Checked {
        match self.dice.random_range(0..34) {
            0..=3 => self.enqueue().await?,
            4..=9 => self.claim().await?,
            10..=15 => self.ack().await?,
            16..=17 => self.expire().await?,
            18..=19 => self.promote().await?,
            20..=21 => self.cancel().await?,
            22..=23 => self.retry().await?,
            24..=25 => {
                maintenance::counts::pass(&self.engine).await.map_err(|it| it.to_string())?;
            }
            26 => self.purge().await?,
            27 => self.redrive().await?,
            28..=29 => self.delete().await?,
            30..=31 => self.prune().await?,
            _ => self.lose_worker().await?,
        }
        while again(async || cascade::pass(&self.engine).await).await? {}
        self.compare_callbacks().await?;
        self.compare().await
    }

    /// Every job is where the model says.
    async fn compare(&mut self) -> Checked {
        let conn = &mut self.conn;
        for (number, model) in self.jobs.iter().enumerate() {
            let found = store::jobs::find(conn, self.project_id, model.id).await;
            let found = found.expect("it runs");
            if model.is_gone {
                let is_there = found.is_some().then_some(format!("job {number} is still there"));
                is_there.map_or(Ok(()), Err)?;
                continue;
            }
            let found = found.ok_or(format!("job {number} is lost"))?;
            let seen = (found.state, found.attempt, found.failures, found.losses);
            let expected = (model.state, model.attempt, model.failures, model.losses.0);
            if seen != expected {
                return Err(format!("job {number} is {seen:?}, the model says {expected:?}"));
            }
        }
        let rows = store::queues::counts::queues(conn, self.project_id, &["default".into()]).await;
        let seen = &rows.expect("it runs")[0];
        let many = |states: &[StoredState]| {
            let there = self.jobs.iter().filter(|it| !it.is_gone);
            there.filter(|it| states.contains(&it.state)).count() as i64
        };
        let waiting = [StoredState::Pending, StoredState::Backoff];
        let counts = [
            ("scheduled", seen.scheduled, many(&[StoredState::Scheduled])),
            ("waiting", seen.active - seen.processing, many(&waiting)),
            ("backoff", seen.backoff, many(&[StoredState::Backoff])),
            ("processing", seen.processing, many(&[StoredState::Processing])),
            ("dead letters", seen.dead_letter, many(&[StoredState::DeadLetter])),
            ("succeeded", seen.succeeded, many(&[StoredState::Succeeded])),
            ("cancelled", seen.cancelled, many(&[StoredState::Cancelled])),
        ];
        // Few running jobs are counted in rows: what is known of many is compared, too.
        let deltas = ("processing", self.processing_by_deltas().await, counts[3].2);
        for (what, counted, expected) in counts.into_iter().chain([deltas]) {
            if counted != expected {
                return Err(format!("{counted} jobs are counted as {what}, not {expected}"));
            }
        }
        Ok(())
    }

    async fn enqueue(&mut self) -> Checked {
        if self.jobs.iter().filter(|it| !it.is_gone).count() == MAX_JOBS {
            return Ok(());
        }
        let mut parents = Vec::new();
        for number in 0..self.jobs.len() {
            let (end, is_gone) = (self.jobs[number].end(), self.jobs[number].is_gone);
            let whens = [When::Succeeded, When::NotFailed, When::Failed, When::Ended];
            let when = *whens.choose(&mut self.dice).expect("one");
            let is_met = end.is_some_and(|it| when.is_met_by(it));
            if self.dice.random_bool(0.2) && (end.is_none() || is_met) && !is_gone {
                parents.push(Awaited { parent: number, when, is_met, is_counted: end.is_none() });
            }
        }
        let max_attempts = self.dice.random_range(1..=3);
        let named = parents.iter();
        let named = named.map(|it| Dependency { parent: self.jobs[it.parent].id, when: it.when });
        let extras = Extras {
            parents: named.collect(),
            has_parents: !parents.is_empty(),
            ..Extras::default()
        };
        let mut job = NewJob {
            project_id: self.project_id,
            id: JobId::generate(),
            queue: "default".into(),
            job_type: "t".into(),
            rank: 0,
            start: Start::After(0),
            max_attempts: Some(max_attempts),
            timeout_seconds: 60,
            payload: "1".into(),
            retry: None,
            tags: None,
            extras: None,
        };
        job.extras = Some(Box::new(callbacks::declare(extras, &job)));
        let entry = JobWithDependencies::new(job, OnConflict::Reject);
        let id = entry.job.id;
        let tenant = Tenant { project_id: self.project_id, limits: Limits::default() };
        patiently(async || {
            enqueue::store(&self.engine, tenant, Origin::server(), vec![entry.clone()]).await
        })
        .await
        .map_err(|error| format!("enqueue: {error}"))?;
        let waits = parents.iter().any(|it| !it.is_met);
        self.jobs.push(Model {
            id,
            parents,
            state: if waits { StoredState::Scheduled } else { StoredState::Pending },
            attempt: 0,
            failures: 0,
            max_attempts,
            losses: (0, 0),
            loss_fails: false,
            cancel_requested: false,
            running: None,
            is_skipped: false,
            recorded: Vec::new(),
            activated: None,
            is_gone: false,
            had_ended: false,
        });
        Ok(())
    }

    async fn claim(&mut self) -> Checked {
        let worker = *WORKERS.choose(&mut self.dice).expect("one");
        let loss_fails = self.dice.random_bool(0.3).then_some(true);
        let poll = dispatch::Poll {
            worker_id: Some(worker.into()),
            queues: vec!["default".into()],
            loss_fails,
            ..dispatch::Poll::new(self.project_id)
        };
        let never = std::future::pending::<fencepost_domain::error::Error>();
        let gone = CancellationToken::new();
        let delivery = dispatch::poll(&self.engine, poll, &gone, never).await;
        let delivery = delivery.map_err(|error| format!("poll: {error}"))?;
        let taken = delivery.jobs().first().map(|it| it.job.clone());
        delivery.delivered();
        let Some(taken) = taken else {
            let waiting = self.jobs.iter().position(|it| it.state == StoredState::Pending);
            return waiting.map_or(Ok(()), |it| Err(format!("job {it} was not handed out")));
        };
        let number = self.jobs.iter().position(|it| it.id == taken.id).expect("one of ours");
        let fence = Fence {
            worker_id: Some(worker.into()),
            attempt: Some(taken.attempt),
            lease_id: Some(taken.lease_id),
        };
        let model = &mut self.jobs[number];
        if model.state != StoredState::Pending || taken.attempt != model.attempt + 1 {
            return Err(format!("job {number} was handed out as {taken:?}: {model:?}"));
        }
        model.attempt += 1;
        model.loss_fails = loss_fails.is_some();
        model.state = StoredState::Processing;
        model.running = Some(fence.clone());
        self.given.push((number, fence));
        Ok(())
    }

    /// A fence for a job: the current one, an older one, one of another job, or one that is made
    /// up.
    fn any_fence(&mut self, job: usize) -> Fence {
        let current = self.jobs[job].running.clone();
        match (self.dice.random_range(0..6), current) {
            (0..=2, Some(fence)) => fence,
            (3, _) => Fence {
                worker_id: Some((*WORKERS.choose(&mut self.dice).expect("one")).into()),
                attempt: Some(self.dice.random_range(1..5)),
                lease_id: Some(LeaseId(Uuid::from_u128(7))),
            },
            _ => match self.given.choose(&mut self.dice) {
                Some((_, fence)) => fence.clone(),
                None => Fence { worker_id: Some("ann".into()), ..Fence::default() },
            },
        }
    }

    async fn ack(&mut self) -> Checked {
        let Some(job) = self.any_job() else { return Ok(()) };
        let fence = self.any_fence(job);
        let outcome =
            *[AttemptOutcome::Succeeded, AttemptOutcome::Failed, AttemptOutcome::Released]
                .choose(&mut self.dice)
                .expect("one");
        if self.plant == Plant::NoRowLock && outcome == AttemptOutcome::Failed {
            return self.fail_without_a_lock(job, fence).await;
        }
        let expected = self.expect_ack(job, &fence, outcome);
        let end = match outcome {
            AttemptOutcome::Succeeded => ReportedOutcome::Succeeded { result: None },
            AttemptOutcome::Failed => {
                ReportedOutcome::Failed(Failure { retryable: true, ..Failure::default() })
            }
            _ => ReportedOutcome::Released,
        };
        let sent = match (&self.plant, &self.jobs[job].running) {
            (Plant::NoFence, Some(current)) => current.clone(),
            _ => fence.clone(),
        };
        let ack = Ack { job_id: self.jobs[job].id, fence: sent, end, duration_ms: None };
        let acked =
            patiently(async || settle::ack(&self.engine, self.project_id, ack.clone()).await);
        let answer = match acked.await {
            Ok(Acked::Done { children_activated }) => Answer::Done(children_activated),
            Ok(Acked::Retry { .. }) => Answer::Retry,
            Err(Error::InvalidState(_)) => Answer::Refused("invalid_state"),
            Err(Error::WorkerMismatch(_)) => Answer::Refused("worker_mismatch"),
            Err(Error::StaleLease(_)) => Answer::Refused("stale_lease"),
            Err(error) => return Err(format!("ack: {error}")),
        };
        if answer == expected {
            return Ok(());
        }
        Err(format!("{outcome:?} of job {job} with {fence:?}: {answer:?}, expected {expected:?}"))
    }

    /// Reads, lets another transaction in, writes: what a row lock prevents.
    async fn fail_without_a_lock(&mut self, job: usize, fence: Fence) -> Checked {
        let key = self.key(job);
        let mut conn = self.database.connect().await;
        let fences = [(key, &fence)];
        let held = store::settle::settle_failure::lock_held(&mut conn, fences.into_iter()).await;
        let Some(held) = held.expect("it runs").pop() else { return Ok(()) };
        self.expire_one(job).await?;
        self.claim().await?;
        let ended = store::settle::settle_failure::OutcomeToWrite {
            key,
            attempt: held.attempt,
            state: StoredState::Backoff,
            failures: held.failures + 1,
            losses: None,
            wait: Duration::from_secs(15),
            outcome: AttemptOutcome::Failed,
            error: ErrorReport::default(),
            duration_ms: None,
            ran_ms: 0,
        };
        let _ = store::settle::settle_failure::write_outcomes(&mut conn, &[ended]).await;
        Ok(())
    }

    async fn sql(&self, sql: String) {
        let mut conn = self.database.connect().await;
        sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&mut conn).await.expect("it runs");
    }

    async fn expire(&mut self) -> Checked {
        match self.any_job().filter(|it| self.jobs[*it].running.is_some()) {
            Some(job) => self.expire_one(job).await,
            None => Ok(()),
        }
    }

    async fn expire_one(&mut self, job: usize) -> Checked {
        let (project, id) = (self.project_id.0, self.jobs[job].id.0);
        self.sql("update reaper_state set last_pass_at = now()".to_owned()).await;
        self.sql(format!(
            "update jobs set lease_expires_at = now() - interval '1 ms'
             where project_id = {project} and id = '{id}' and state = 'processing'"
        ))
        .await;
        again(async || reap::pass(&self.engine).await).await?;
        self.end(job, AttemptOutcome::LeaseExpired, true);
        Ok(())
    }

    async fn promote(&mut self) -> Checked {
        let project = self.project_id.0;
        self.sql(format!(
            "update jobs set run_at = now() where project_id = {project} and state = 'backoff'"
        ))
        .await;
        again(async || promote::pass(&self.engine).await).await?;
        for model in self.jobs.iter_mut().filter(|it| it.state == StoredState::Backoff) {
            model.state = StoredState::Pending;
        }
        Ok(())
    }

    async fn lose_worker(&mut self) -> Checked {
        let worker = *WORKERS.choose(&mut self.dice).expect("one");
        let key = (self.project_id, worker.into());
        let said @ (_, counts_losses) = (WorkerState::Running, self.dice.random_bool(0.5));
        let beaten = workers::beat(&self.engine, &key, said, Vec::new()).await;
        beaten.map_err(|error| format!("heartbeat: {error}"))?;
        // Its polls are recorded now, and not after it has become old.
        workers::pass(&self.engine).await.map_err(|it| it.to_string())?;
        let project = self.project_id.0;
        self.sql("update reaper_state set last_pass_at = now()".to_owned()).await;
        self.sql(format!(
            "update workers set last_seen_at = now() - interval '31 s',
                 last_beat_at = now() - interval '31 s'
             where project_id = {project} and worker_id = '{worker}'"
        ))
        .await;
        self.sql(format!(
            "update jobs set claimed_at = claimed_at - interval '31 s',
                 lease_expires_at = lease_expires_at - interval '31 s'
             where project_id = {project} and worker_id = '{worker}' and state = 'processing'"
        ))
        .await;
        workers::pass(&self.engine).await.map_err(|it| it.to_string())?;
        let (lost, spared) = (AttemptOutcome::LeaseExpired, AttemptOutcome::Released);
        let outcome = if counts_losses { lost } else { spared };
        for job in 0..self.jobs.len() {
            let holder = self.jobs[job].running.as_ref().and_then(|it| it.worker_id.as_deref());
            if holder == Some(worker) {
                self.end(job, outcome, true);
            }
        }
        Ok(())
    }
}

/// Plays one history. Err: where the store and the model part.
async fn play(engine: &Engine, database: &Database, seed: u64, plant: Plant) -> Checked {
    let mut conn = database.connect().await;
    let name = format!("{plant:?}-{seed}");
    let project = dev::make_project(&mut conn, &name, "model").await;
    let project_id = project.expect("a project").0.id;
    let mut run = Run {
        engine: engine.clone(),
        database: database.clone(),
        conn,
        project_id,
        dice: StdRng::seed_from_u64(seed),
        jobs: Vec::new(),
        given: Vec::new(),
        plant,
    };
    for step in 0..STEPS {
        run.step().await.map_err(|error| format!("seed {seed}, step {step}: {error}"))?;
    }
    Ok(())
}

/// Runs against an engine without loops: the test alone says when what happens.
fn with_engine(test: impl AsyncFnOnce(&Engine, &Database)) {
    run_for(TIME_LIMIT, async {
        let database = fresh_database().await;
        let engine = database.engine();
        test(&engine, &database).await;
        engine.finish().await;
    });
}

/// A number that the environment asks for.
pub fn asked(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn whatever_happens_the_store_is_where_the_model_says() {
    let faults = faults::set_up();
    let histories = asked("FENCEPOST_MODEL_SEEDS").unwrap_or(SEEDS);
    with_engine(async |engine, database| {
        let first = asked("FENCEPOST_MODEL_FIRST_SEED").unwrap_or(0);
        for seed in first..first + histories {
            play(engine, database, seed, Plant::Nothing).await.unwrap_or_else(|it| panic!("{it}"));
        }
    });
    faults.were_met(histories);
}

fn is_found(plant: Plant) {
    with_engine(async |engine, database| {
        for seed in 0..SEEDS {
            if play(engine, database, seed, plant).await.is_err() {
                return;
            }
        }
        panic!("{plant:?} was not found in {SEEDS} histories");
    });
}

#[test]
fn a_missing_fence_is_found() {
    is_found(Plant::NoFence);
}

#[test]
fn a_missing_row_lock_is_found() {
    is_found(Plant::NoRowLock);
}

#[test]
fn an_attempt_that_is_counted_anew_is_found() {
    is_found(Plant::ResetAttempt);
}

#[test]
fn an_end_that_enqueues_twice_is_found() {
    with_engine(async |engine, database| {
        let played = play(engine, database, 0, Plant::EndTwice).await;
        let error = played.expect_err("it ends twice");
        assert!(error.contains("callbacks of"), "{error}");
    });
}
