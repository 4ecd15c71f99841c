//! One row that fails does not stop the others: a part that meets it is halved until it is alone,
//! and it is set aside until its next try.

use std::{
    future::Future,
    sync::atomic::{AtomicBool, Ordering},
};

use fencepost_domain::{
    error::chain,
    ids::{JobKey, ProjectId},
};
use fencepost_store::sweep::set_aside::{self, Failed, Work};
use sqlx::{Acquire, PgConnection};

use crate::Engine;

/// SQLSTATE classes of errors that one row causes: data (22), integrity (23), limits of the program
/// (54), triggers (P0), and corruption (XX). Others concern the database, and every row with it.
const ROW_ERROR_CLASSES: [&str; 5] = ["22", "23", "54", "P0", "XX"];

/// Whether anything is set aside, as far as this node knows: if not, a success clears nothing.
#[derive(Debug, Default)]
pub struct SetAside(AtomicBool);

impl SetAside {
    pub(super) fn learn(&self, is_any: bool) {
        self.0.store(is_any, Ordering::Relaxed);
    }

    pub(super) fn is_any(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Work of a loop on rows of many tenants.
pub trait Sweep: Sync {
    type Item: Sync;
    type Done: Send;

    const WORK: Work;

    /// Its project, and how it is listed if it fails.
    fn name(item: &Self::Item) -> (ProjectId, String);

    /// Processes some of the items; after an error it has no effect.
    fn process(
        &self,
        conn: &mut PgConnection,
        items: &[Self::Item],
    ) -> impl Future<Output = sqlx::Result<Self::Done>> + Send;
}

/// Processes all items, in as few transactions as possible; inside of a transaction, in savepoints.
/// Items that fail by themselves are set aside.
///
/// # Errors
/// When the database fails. What was processed in a transaction of its own stays.
pub async fn process<S: Sweep>(
    engine: &Engine,
    conn: &mut PgConnection,
    sweep: &S,
    items: &[S::Item],
) -> sqlx::Result<Vec<S::Done>> {
    let (mut done, mut failed) = (Vec::new(), Vec::new());
    // A stack: the first half is processed first.
    let mut open = vec![items];
    while let Some(items) = open.pop().filter(|it| !it.is_empty()) {
        match process_together(engine, conn, sweep, items).await {
            Ok(one) => done.push(one),
            Err(error) if is_of_a_row(&error) => match items {
                [alone] => failed.push(failure(S::WORK, S::name(alone), &error)),
                items => {
                    let (first, second) = items.split_at(items.len() / 2);
                    open.extend([second, first]);
                }
            },
            Err(error) if done.is_empty() => return Err(error),
            // What is done must be published; the next pass meets the error again.
            Err(error) => {
                tracing::warn!(
                    error = chain(&error),
                    work = S::WORK.as_str(),
                    "background pass ended early, will retry the rest"
                );
                break;
            }
        }
    }
    if !failed.is_empty() {
        engine.set_aside.learn(true);
        set_aside::insert(conn, S::WORK, &failed).await?;
    }
    Ok(done)
}

async fn process_together<S: Sweep>(
    engine: &Engine,
    conn: &mut PgConnection,
    sweep: &S,
    items: &[S::Item],
) -> sqlx::Result<S::Done> {
    let mut tx = conn.begin().await?;
    let done = match sweep.process(&mut tx, items).await {
        Ok(done) => done,
        Err(error) => {
            // The caller may continue its transaction: the savepoint must be rolled back.
            tx.rollback().await?;
            return Err(error);
        }
    };
    if engine.set_aside.is_any() {
        let names: Vec<_> = items.iter().map(S::name).collect();
        set_aside::clear(&mut tx, S::WORK, &names).await?;
    }
    tx.commit().await?;
    Ok(done)
}

/// How a job is listed.
pub fn job_name(key: JobKey) -> (ProjectId, String) {
    (key.project_id, key.id.0.to_string())
}

/// Sets one item aside that failed in its own transaction.
///
/// # Errors
/// The given one, when it concerns the database and not the item.
pub async fn set_aside(
    engine: &Engine,
    work: Work,
    (project_id, item): (ProjectId, &str),
    error: sqlx::Error,
) -> sqlx::Result<()> {
    if !is_of_a_row(&error) {
        return Err(error);
    }
    let failed = failure(work, (project_id, item.to_owned()), &error);
    engine.set_aside.learn(true);
    let mut conn = engine.pools.background.acquire().await?;
    set_aside::insert(&mut conn, work, &[failed]).await
}

/// Notes that one item succeeded in its own transaction.
pub async fn succeeded(
    engine: &Engine,
    conn: &mut PgConnection,
    work: Work,
    (project_id, item): (ProjectId, &str),
) -> sqlx::Result<()> {
    if !engine.set_aside.is_any() {
        return Ok(());
    }
    set_aside::clear(conn, work, &[(project_id, item.to_owned())]).await
}

/// Whether an item caused the error, and not the database.
pub fn is_of_a_row(error: &sqlx::Error) -> bool {
    let error = match error {
        sqlx::Error::Database(error) => error,
        // A stored text that this version cannot read.
        sqlx::Error::Decode(_) => return true,
        _ => return false,
    };
    let code = error.code();
    code.is_some_and(|code| ROW_ERROR_CLASSES.iter().any(|it| code.starts_with(it)))
}

fn failure(work: Work, (project_id, item): (ProjectId, String), error: &sqlx::Error) -> Failed {
    let (work, problem) = (work.as_str(), chain(error));
    tracing::error!(project_id = project_id.0, work, item, problem, "row failed and is set aside");
    Failed { project_id, item, problem }
}
