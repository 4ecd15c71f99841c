//! Admission opens the next jobs of groups, and pauses end. See ADR 17.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicI64, Ordering},
    time::Duration,
};

use fencepost_domain::ids::ProjectId;
use fencepost_signals::telemetry;
use fencepost_store::{
    faults,
    groups::{
        GroupKey, overrides,
        rates::{self, NextLook},
    },
    sweep::{
        groups::{
            admission::{self, Opened},
            noted::{self, NotedGroup},
            pauses, rooms, turns, walks,
        },
        set_aside::Work,
    },
};
use metrics::counter;
use sqlx::{Acquire, PgConnection};

use crate::{
    Engine,
    isolate::{self, Sweep},
};

/// The longest sleep: notes that a crash has left wait for that time.
pub const MAX_SLEEP: Duration = Duration::from_secs(1);

/// How long notes gather before a pass: it costs about as much for one group as for ten.
const GATHERING: Duration = Duration::from_millis(3);

/// The pause when all groups of a pass were left: other transactions have their jobs, or another
/// node decides about them.
const LEFT_PAUSE: Duration = Duration::from_millis(20);

/// What a node remembers between two passes.
#[derive(Debug, Default)]
pub struct Admitting {
    /// Notes by earlier transactions are gone.
    since: AtomicI64,
}

/// One pass: opens what may run, and returns how long to sleep. Zero: there is more.
pub async fn pass(engine: &Engine, before: &Admitting) -> sqlx::Result<Duration> {
    tokio::time::sleep(GATHERING).await;
    let mut conn = engine.pools.background.acquire().await?;
    let since = before.since.load(Ordering::Relaxed);
    let noted = noted::find_and_forget(&mut conn, since).await?;
    before.since.store(noted.all_since, Ordering::Relaxed);
    let mut is_more = false;
    if noted.next_end_ms.is_some_and(|it| it <= 0.0) {
        is_more |= end_pauses(&mut conn).await?;
        is_more |= rates::look(&mut conn).await?;
        is_more |= overrides::forget_ended(&mut conn).await?;
        let (queues, is_full) = turns::end_rests(&mut conn).await?;
        for (project_id, queue) in queues {
            engine.notifier.wake.queue_changed(project_id, &queue);
        }
        is_more |= is_full;
    }
    // Not beyond what is noted already: the groups of other queues would wait behind it.
    if noted.has_walk && !noted.is_full() {
        is_more |= walk(engine, &mut conn).await?;
    }
    let admitting = isolate::process(engine, &mut conn, &Admission, &noted.groups);
    let admitted = faults::around_commit("groups", admitting).await?;
    drop(conn);
    let (mut moved, mut left) = (0, 0);
    for opened in &admitted {
        engine.notifier.waiting(opened.jobs.iter());
        for (project_id, queue) in &opened.freed {
            engine.notifier.wake.queue_changed(*project_id, queue);
        }
        counter!(telemetry::GROUP_JOBS_OPENED).increment(opened.opened as u64);
        moved += opened.opened + opened.closed;
        left += opened.left;
    }
    // Another node may have locked all of them.
    is_more |= moved > 0 || noted.is_full() && (noted.forgotten > 0 || left < noted.groups.len());
    Ok(if is_more { Duration::ZERO } else { pause(left, noted.next_end_ms) })
}

/// How long to sleep when nothing could be done, and some groups may be left.
fn pause(left: usize, next_end_ms: Option<f64>) -> Duration {
    let next_end = next_end_ms.unwrap_or(f64::MAX).max(LEFT_PAUSE.as_secs_f64() * 1_000.0);
    let next_end = Duration::try_from_secs_f64(next_end / 1_000.0).unwrap_or(MAX_SLEEP);
    if left > 0 { LEFT_PAUSE } else { next_end.min(MAX_SLEEP) }
}

/// Ends pauses that have lasted long enough. Returns whether there may be more to do.
async fn end_pauses(conn: &mut PgConnection) -> sqlx::Result<bool> {
    let queues = pauses::find_ended(conn).await?;
    if queues.is_empty() {
        return Ok(false);
    }
    let mut tx = conn.begin().await?;
    // The queues first, as those who pause their groups lock them.
    let queues = pauses::lock_queues(&mut tx, &queues).await?;
    pauses::end_pauses(&mut tx, &queues).await?;
    pauses::open_gates(&mut tx, &queues).await?;
    tx.commit().await?;
    Ok(!queues.is_empty())
}

/// Notes the next groups of a queue whose rules have changed. Returns whether there was one.
async fn walk(engine: &Engine, conn: &mut PgConnection) -> sqlx::Result<bool> {
    let mut tx = conn.begin().await?;
    let Some(walk) = walks::find_due(&mut tx).await? else { return Ok(false) };
    let unblocked = walks::unblock_from_before_rules(&mut tx, &walk).await?;
    if unblocked == walks::MAX_UNBLOCKED || turns::forget(&mut tx, &walk).await? {
        tx.commit().await?;
        return Ok(true);
    }
    if walk.job.is_some() {
        walks::step_over_jobs(&mut tx, &walk).await?;
        tx.commit().await?;
        return Ok(true);
    }
    let is_more = walks::step(&mut tx, &walk).await?;
    if !is_more {
        pauses::open_gates(&mut tx, &[(walk.project_id, walk.queue.clone())]).await?;
    }
    tx.commit().await?;
    if !is_more {
        // Its claims have rested.
        engine.notifier.wake.queue_changed(walk.project_id, &walk.queue);
    }
    Ok(true)
}

/// How many jobs of each of these groups may start by the rates of its queue; none: it has none.
async fn rooms_by_rate(
    tx: &mut PgConnection,
    keys: &[&GroupKey],
) -> sqlx::Result<Vec<Option<i32>>> {
    let (mut rooms, mut looks) = (vec![None; keys.len()], Vec::new());
    for it in rooms::rated(tx, keys).await? {
        rooms[it.number] = Some(it.rates.allows(&it.starts, it.now));
        let full_until = it.rates.next_at(&it.starts, it.now);
        if let Some(at) = full_until.or_else(|| it.rates.grows_at(&it.starts, it.now)) {
            looks.push(NextLook { key: keys[it.number].clone(), at, full_until });
        }
    }
    if !looks.is_empty() {
        rates::set_looks(tx, &looks).await?;
    }
    Ok(rooms)
}

/// Opening the jobs of groups.
struct Admission;

impl Sweep for Admission {
    type Item = NotedGroup;
    type Done = Opened;
    const WORK: Work = Work::Groups;

    fn name(item: &NotedGroup) -> (ProjectId, String) {
        (item.key.project_id, format!("{}/{}", item.key.queue, item.key.group))
    }

    async fn process(&self, tx: &mut PgConnection, noted: &[NotedGroup]) -> sqlx::Result<Opened> {
        let found = admission::lock(tx, noted).await?;
        let found = found
            .into_iter()
            .filter_map(|it| Some((noted.get(usize::try_from(it.number).ok()?)?, it)));
        let (locked, found): (Vec<_>, Vec<_>) = found.unzip();
        let limited: Vec<_> = found.iter().map(|it| it.is_limited).collect();
        let elsewhere = noted.len() - locked.len();
        if locked.is_empty() {
            return Ok(Opened { left: elsewhere, ..Opened::default() });
        }
        // What is done after the notes are deleted sees all that they are about.
        admission::forget(tx, &locked).await?;
        let keys: Vec<_> = locked.iter().map(|it| &it.key).collect();
        let rooms = match limited.contains(&true) {
            true => rooms_by_rate(tx, &keys).await?,
            false => vec![None; keys.len()],
        };
        let mut unclosed = vec![false; locked.len()];
        let (mut closed, mut freed) = (0, BTreeSet::new());
        for it in admission::close(tx, &keys, &rooms).await? {
            closed += it.jobs;
            unclosed[it.number] = it.is_unfinished;
            if limited[it.number] && it.jobs > 0 {
                // Claims come to jobs now that stood behind these.
                freed.insert((keys[it.number].project_id, keys[it.number].queue.clone()));
            }
        }
        let mut opened = Opened { left: elsewhere, closed, ..Opened::default() };
        let mut others = (Vec::new(), Vec::new());
        let mut with_room = (Vec::new(), Vec::new(), Vec::new());
        for (number, is_limited) in limited.into_iter().enumerate() {
            if is_limited {
                with_room.0.push(keys[number]);
                with_room.1.push(unclosed[number]);
                with_room.2.push(rooms[number]);
            } else {
                others.0.push(keys[number]);
                others.1.push(unclosed[number]);
            }
        }
        if !others.0.is_empty() {
            opened.add(admission::open(tx, &others.0, &others.1).await?);
        }
        let (limited, unclosed, rooms) = with_room;
        if !limited.is_empty() {
            opened.add(rooms::open_limited(tx, &limited, &unclosed, &rooms).await?);
            freed.extend(rooms::queues_with_open(tx, &limited).await?);
        }
        let taking_turns = keys.iter().zip(&found).filter(|it| it.1.has_turns);
        let taking_turns: Vec<_> = taking_turns.map(|it| *it.0).collect();
        if !taking_turns.is_empty() {
            let lined_up = turns::line_up(tx, &taking_turns).await?;
            opened.left += lined_up.left;
            freed.extend(lined_up.queues);
        }
        let sharing = keys.iter().zip(&found).filter(|it| it.1.has_turns && it.1.has_shared_limits);
        let sharing: Vec<_> = sharing.map(|it| *it.0).collect();
        if !sharing.is_empty() {
            let siblings = turns::end_rests_of_siblings(tx, &sharing).await?;
            opened.left += siblings.left;
            freed.extend(siblings.queues);
        }
        opened.freed = freed.into_iter().collect();
        Ok(opened)
    }
}
