//! Each end of a job enqueues its callback exactly once, whatever has ended it.

use std::collections::BTreeMap;

use fencepost_domain::{
    callbacks::Callbacks,
    plan::{Newcomers, Plans, ProjectPlans, UNLIMITED},
};
use fencepost_engine::{
    enqueue::{self, Extras, NewJob},
    maintenance,
};

use super::{Checked, Plant, Run, again};
use uuid::Uuid;

/// Nothing else is stored in this queue, and no step of a history looks at it.
const QUEUE: &str = "callbacks";

/// With a callback for every end.
pub fn declare(extras: Extras, like: &NewJob) -> Extras {
    let job = NewJob { queue: QUEUE.into(), extras: None, ..like.clone() };
    let on_complete = Some(Box::new(enqueue::callback(job)));
    extras.with_callbacks(&Callbacks { on_complete, ..Callbacks::default() })
}

impl Run {
    /// Those that have ended since the last comparison, and no others, have their callback.
    pub async fn compare_callbacks(&mut self) -> Checked {
        if self.plant == Plant::EndTwice {
            self.sql(
                "insert into job_ends (project_id, job_id, callbacks, succeeded)
                      select project_id, job_id, callbacks, succeeded from job_ends"
                    .to_owned(),
            )
            .await;
        }
        let newcomers = Newcomers { plan: UNLIMITED.to_owned(), must_verify: false };
        let plans = ProjectPlans { plans: Plans::built_in(), newcomers };
        while again(async || maintenance::completions::pass(&self.engine, &plans).await).await? {}
        let mut expected: BTreeMap<Option<Uuid>, i64> = BTreeMap::new();
        for model in &mut self.jobs {
            let has_ended = model.end().is_some();
            if has_ended && !model.had_ended {
                expected.insert(Some(model.id.0), 1);
            }
            model.had_ended = has_ended;
        }
        let stored: Vec<(Option<Uuid>, i64)> = sqlx::query_as(
            "with gone as (
                 delete from jobs where project_id = $1 and queue = $2 returning id
             ), edges as (
                 delete from job_edges using gone
                 where project_id = $1 and child_id = gone.id
                 returning parent_id, child_id
             )
             select parent_id, count(*) from gone left join edges on edges.child_id = gone.id
             group by parent_id",
        )
        .bind(self.project_id.0)
        .bind(QUEUE)
        .fetch_all(&mut self.conn)
        .await
        .expect("it runs");
        let stored: BTreeMap<_, _> = stored.into_iter().collect();
        if stored == expected {
            return Ok(());
        }
        Err(format!("callbacks of {stored:?} are stored, expected {expected:?}"))
    }
}
