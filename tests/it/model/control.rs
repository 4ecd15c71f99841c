//! What operators do: cancel, retry, purge a queue, bring all dead letters back, delete; and what
//! the retention deletes.

use fencepost_domain::{
    actor::ChangedBy,
    error::Error,
    ids::OperationId,
    job::StoredState,
    operation::{Filter, Kind, Which},
    plan::{Limits, Tenant},
};
use fencepost_engine::{
    jobs::{control, dead_letters},
    maintenance::{counts, retention},
    operations::{self, NewOperation},
};
use fencepost_store as store;

use super::{
    Checked, Plant, Run,
    machine::{Model, is_bad},
};

impl Run {
    /// The number of running jobs as it is known where they are too many to be counted in rows.
    pub async fn processing_by_deltas(&mut self) -> i64 {
        let counted = sqlx::query_scalar(
            "select coalesce(sum(processing), 0)::bigint
             from (
                 select project_id, queue, processing from queue_counts
                 union all
                 select project_id, queue, processing from unmerged_deltas
             ) moves
             where project_id = $1 and queue = 'default'",
        );
        counted.bind(self.project_id.0).fetch_one(&mut self.conn).await.expect("it runs")
    }

    pub async fn cancel(&mut self) -> Checked {
        let Some(job) = self.any_job() else { return Ok(()) };
        let answer = control::cancel(&self.engine, self.key(job), &ChangedBy::SERVER).await;
        let model = &mut self.jobs[job];
        match (model.state, answer) {
            (StoredState::Succeeded | StoredState::DeadLetter, Err(Error::InvalidState(_)))
            | (StoredState::Cancelled, Ok(())) => (),
            (StoredState::Processing, Ok(())) => model.cancel_requested = true,
            (StoredState::Scheduled | StoredState::Backoff | StoredState::Pending, Ok(())) => {
                model.state = StoredState::Cancelled;
                self.lead_on(job);
            }
            (state, answer) => return Err(format!("cancel of job {job}, {state:?}: {answer:?}")),
        }
        Ok(())
    }

    pub async fn retry(&mut self) -> Checked {
        let Some(job) = self.any_job() else { return Ok(()) };
        let answer = control::retry(
            &self.engine,
            self.key(job),
            control::OldCheckpoint::Kept,
            &ChangedBy::SERVER,
        )
        .await;
        if self.plant == Plant::ResetAttempt && answer.is_ok() {
            let (project, id) = (self.project_id.0, self.jobs[job].id.0);
            let reset = "update jobs set attempt = 0 where project_id =";
            self.sql(format!("{reset} {project} and id = '{id}'")).await;
        }
        let is_broken = self.is_broken(job);
        match (self.jobs[job].state, answer) {
            (StoredState::DeadLetter, Ok(())) => self.requeue(job),
            (StoredState::Cancelled, Err(Error::ParentTerminal(_))) if is_broken => (),
            (StoredState::Cancelled, Ok(())) if !is_broken => self.requeue(job),
            (state, Err(Error::InvalidState(_))) if !is_bad(state) => (),
            (state, answer) => return Err(format!("retry of job {job}, {state:?}: {answer:?}")),
        }
        self.requeue_descendants(job).await;
        Ok(())
    }

    /// Which of several bad parents has called a job off is the store's to say.
    async fn requeue_descendants(&mut self, job: usize) {
        let mut back = vec![job];
        while let Some(parent) = back.pop() {
            for child in 0..self.jobs.len() {
                let model = &self.jobs[child];
                let is_cancelled_by_parent = model.state == StoredState::Cancelled
                    && !model.is_gone
                    && model.has_parent(parent);
                if is_cancelled_by_parent && !self.is_broken(child) && self.is_live(child).await {
                    self.requeue(child);
                    back.push(child);
                }
            }
        }
    }

    /// Starts an operation, and runs it to its end.
    async fn operate(&mut self, kind: Kind) -> Checked {
        let queue = (kind == Kind::QueuePurge).then(|| "default".to_owned());
        let new = NewOperation {
            id: OperationId::generate(),
            kind,
            filter: Which::Letters(Filter { queue, ..Filter::default() }),
            expected: None,
            max_jobs: None,
            rate_per_second: None,
        };
        let tenant = Tenant { project_id: self.project_id, limits: Limits::default() };
        let begun = operations::begin(&self.engine, tenant, &new).await;
        begun.map_err(|error| format!("{kind:?}: {error}"))?;
        while operations::pass(&self.engine).await.map_err(|it| it.to_string())?.is_some() {}
        Ok(())
    }

    pub async fn purge(&mut self) -> Checked {
        self.operate(Kind::QueuePurge).await?;
        let waiting = |it: &usize| self.jobs[*it].state.is_waiting();
        let purged: Vec<_> = (0..self.jobs.len()).filter(waiting).collect();
        purged.iter().for_each(|it| self.jobs[*it].state = StoredState::Cancelled);
        for job in purged {
            self.lead_on(job);
        }
        Ok(())
    }

    pub async fn redrive(&mut self) -> Checked {
        self.operate(Kind::DeadLettersRetry).await?;
        for job in 0..self.jobs.len() {
            let Model { state, is_gone, .. } = self.jobs[job];
            if state == StoredState::DeadLetter && !is_gone {
                self.requeue(job);
                self.requeue_descendants(job).await;
            }
        }
        Ok(())
    }

    /// Deletes a dead letter. Its children stay cancelled, whatever becomes of their other parents.
    pub async fn delete(&mut self) -> Checked {
        let Some(job) = self.any_job() else { return Ok(()) };
        let answer = dead_letters::delete(&self.engine, self.key(job)).await;
        match (self.jobs[job].state, answer) {
            (StoredState::DeadLetter, Ok(())) => self.jobs[job].is_gone = true,
            (state, Err(Error::InvalidState(_))) if state != StoredState::DeadLetter => (),
            (state, answer) => return Err(format!("delete of job {job}, {state:?}: {answer:?}")),
        }
        Ok(())
    }

    /// Lets the retention of all finished jobs pass. Those with a live child stay.
    pub async fn prune(&mut self) -> Checked {
        let project = self.project_id.0;
        self.sql(format!(
            "update finished_jobs set completed_at = now() - interval '1 year'
             where project_id = {project}"
        ))
        .await;
        // The retention looks for the queues that are counted.
        counts::pass(&self.engine).await.map_err(|it| it.to_string())?;
        self.sql("update retention_dues set due_at = now()".to_owned()).await;
        while retention::pass(&self.engine).await.map_err(|it| it.to_string())? {}
        let has_ended = |it: &Model| it.state == StoredState::Succeeded || is_bad(it.state);
        for job in 0..self.jobs.len() {
            let mut children = self.jobs.iter().filter(|it| it.has_parent(job));
            let has_live_child = children.any(|it| !has_ended(it));
            let Model { state, is_gone, .. } = &mut self.jobs[job];
            let is_finished = matches!(state, StoredState::Succeeded | StoredState::Cancelled);
            *is_gone |= is_finished && !has_live_child;
        }
        Ok(())
    }

    async fn is_live(&self, job: usize) -> bool {
        let mut conn = self.database.connect().await;
        let found = store::jobs::find(&mut conn, self.project_id, self.jobs[job].id).await;
        found.expect("it runs").is_some_and(|it| !is_bad(it.state))
    }
}
