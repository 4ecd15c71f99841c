//! Publishes this node's wake-ups to the others over Redis (debounced), and delivers theirs to the
//! local pump. Jobs that idle polls of this node can take are not published: the claims of other
//! nodes would come in vain. These are hints: a poll that misses one finds its job with the next
//! claim.

use std::{collections::HashMap, sync::Arc, time::Duration};

use chrono::{DateTime, Utc};
use fencepost_domain::ids::ProjectId;
use fencepost_signals::{
    redis_bus::{Bus, Topic},
    telemetry,
    wakeups::{Arrival, Hint, Hints, interest},
};
use fencepost_store::claims::MAX_CLAIM_SLOTS;
use metrics::counter;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::Engine;

/// Debounce time: at most one message per queue in this time. A poll of another node waits so much
/// longer for its job.
const GATHER: Duration = Duration::from_millis(2);
/// Wake-ups of one message; more become "claim everywhere".
const MAX_WAKES: usize = 500;
/// After Redis reconnects, lanes are claimed from again within this time, spread evenly.
const REJOIN_SPREAD: Duration = Duration::from_millis(500);

/// A message between nodes. An older node that does not know a message claims everywhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Message {
    from: String,
    wakes: Vec<HintMessage>,
}

/// One wake-up, in as few characters as JSON allows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "k")]
enum HintMessage {
    /// Jobs of one type have arrived in a queue.
    #[serde(rename = "a")]
    Arrived {
        p: i32,
        q: Arc<str>,
        t: Arc<str>,
        r: i16,
        /// In microseconds since 1970.
        at: i64,
        g: bool,
        n: usize,
    },
    /// Jobs of a project that counted against a limit have ended.
    #[serde(rename = "s")]
    SlotsFreed { p: i32 },
    /// The settings of a queue have changed.
    #[serde(rename = "q")]
    QueueChanged { p: i32, q: Arc<str> },
    /// Endpoints or pushes have changed.
    #[serde(rename = "t")]
    TargetsChanged,
    #[serde(rename = "e")]
    Everywhere,
}

impl HintMessage {
    fn topic(&self) -> Topic {
        match self {
            Self::Arrived { p, .. } | Self::SlotsFreed { p } | Self::QueueChanged { p, .. } => {
                Topic::Wake(interest::shard(ProjectId(*p)))
            }
            Self::TargetsChanged | Self::Everywhere => Topic::WakeAll,
        }
    }

    fn hint(self) -> Hint {
        match self {
            Self::Arrived { p, q, t, r, at, g, n } => {
                let arrival = Arrival {
                    project_id: ProjectId(p),
                    queue: q,
                    job_type: t,
                    rank: r,
                    run_at: DateTime::from_timestamp_micros(at).unwrap_or_default(),
                    is_constrained: g,
                };
                Hint::ArrivedElsewhere(vec![arrival; n.clamp(1, MAX_CLAIM_SLOTS)])
            }
            Self::SlotsFreed { p } => Hint::SlotsFreed(vec![ProjectId(p)]),
            Self::QueueChanged { p, q } => Hint::QueueChanged(ProjectId(p), q),
            Self::TargetsChanged => Hint::TargetsChanged,
            Self::Everywhere => Hint::Everywhere,
        }
    }
}

/// Jobs of one project, queue and type, with or without a constraint key.
type Kin = (ProjectId, Arc<str>, Arc<str>, bool);

/// Hints collected in the current debounce window.
#[derive(Debug, Default)]
struct Gathered {
    /// The first in claim order, and their number.
    arrived: HashMap<Kin, (i16, DateTime<Utc>, usize)>,
    others: Vec<HintMessage>,
    everywhere: bool,
}

impl Gathered {
    fn add(&mut self, hint: Hint) {
        match hint {
            Hint::Arrived(arrivals) | Hint::ArrivedElsewhere(arrivals) => {
                for it in arrivals {
                    let key = (it.project_id, it.queue, it.job_type, it.is_constrained);
                    let best = self.arrived.entry(key).or_insert((it.rank, it.run_at, 0));
                    let first = (best.0, best.1).min((it.rank, it.run_at));
                    *best = (first.0, first.1, best.2 + 1);
                }
            }
            Hint::SlotsFreed(projects) => {
                self.others
                    .extend(projects.into_iter().map(|it| HintMessage::SlotsFreed { p: it.0 }));
            }
            Hint::QueueChanged(project_id, q) => {
                self.others.push(HintMessage::QueueChanged { p: project_id.0, q });
            }
            Hint::TargetsChanged if self.others.contains(&HintMessage::TargetsChanged) => (),
            Hint::TargetsChanged => self.others.push(HintMessage::TargetsChanged),
            Hint::Everywhere => self.everywhere = true,
        }
        self.everywhere |= self.arrived.len() + self.others.len() > MAX_WAKES;
    }

    /// Messages by topic.
    fn messages(self, from: &str) -> Vec<(Topic, Message)> {
        let mut wakes = self.others;
        wakes.extend(self.arrived.into_iter().map(|((p, q, t, g), (r, run_at, n))| {
            HintMessage::Arrived { p: p.0, q, t, r, at: run_at.timestamp_micros(), g, n }
        }));
        if self.everywhere {
            wakes = vec![HintMessage::Everywhere];
        }
        let mut by_topic: HashMap<Topic, Vec<HintMessage>> = HashMap::new();
        for wake in wakes {
            let hints = by_topic.entry(wake.topic()).or_default();
            if !hints.contains(&wake) {
                hints.push(wake);
            }
        }
        let message = |wakes| Message { from: from.to_owned(), wakes };
        by_topic.into_iter().map(|(topic, wakes)| (topic, message(wakes))).collect()
    }
}

/// Publishes this node's hints until `stop`.
pub async fn publish(bus: Bus, mut hints: Hints, stop: CancellationToken) {
    let from = bus.node().to_string();
    loop {
        let first = tokio::select! {
            () = stop.cancelled() => return,
            hint = hints.next() => hint,
        };
        let Some(first) = first else { return };
        let mut gathered = Gathered::default();
        gathered.add(first);
        tokio::time::sleep(GATHER).await;
        while let Some(hint) = hints.try_next() {
            gathered.add(hint);
        }
        // No other node is running.
        if bus.nodes() < 2 {
            continue;
        }
        for (topic, message) in gathered.messages(&from) {
            let Ok(text) = serde_json::to_string(&message) else { continue };
            if bus.publish(topic, &text).await {
                counter!(telemetry::WAKEUPS_SENT).increment(1);
            }
        }
    }
}

/// Handles a message from another node, or from this one.
pub fn hear(engine: &Engine, bus: &Bus, text: &str) {
    let wake = &engine.notifier.wake;
    match serde_json::from_str::<Message>(text) {
        Ok(message) if message.from == bus.node().to_string() => (),
        Ok(message) => {
            counter!(telemetry::WAKEUPS_RECEIVED).increment(1);
            message.wakes.into_iter().for_each(|it| wake.hint_here(it.hint()));
        }
        Err(_) => wake.hint_here(Hint::Everywhere),
    }
}

/// Messages may have been lost before this subscription, so all lanes are claimed from soon.
pub fn rejoin(engine: &Engine) {
    let wake = engine.notifier.wake.clone();
    tokio::spawn(async move {
        tokio::time::sleep(REJOIN_SPREAD.mul_f64(rand::random())).await;
        wake.hint_here(Hint::Everywhere);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(queue: &str, rank: i16) -> Arrival {
        Arrival {
            project_id: ProjectId(21),
            queue: queue.into(),
            job_type: "t".into(),
            rank,
            run_at: DateTime::UNIX_EPOCH,
            is_constrained: false,
        }
    }

    #[test]
    fn arrivals_of_a_moment_become_one_wake_up_a_queue_with_their_number_and_the_best_place() {
        let mut gathered = Gathered::default();
        gathered.add(Hint::Arrived(vec![arrival("a", 0), arrival("a", -5), arrival("b", 0)]));
        gathered.add(Hint::Arrived(vec![arrival("a", 3)]));
        let mut messages = gathered.messages("me");
        assert_eq!(messages.len(), 1);
        let (topic, message) = messages.remove(0);
        assert_eq!(topic, Topic::Wake(21));
        let of_a = message.wakes.iter().find_map(|it| match it {
            HintMessage::Arrived { q, r, n, .. } if &**q == "a" => Some((*r, *n)),
            _ => None,
        });
        assert_eq!((of_a, message.wakes.len()), (Some((-5, 3)), 2));
    }

    #[test]
    fn a_published_hint_reads_back_as_it_was() {
        let mut gathered = Gathered::default();
        gathered.add(Hint::Arrived(vec![arrival("a", 0); 3]));
        gathered.add(Hint::QueueChanged(ProjectId(1), "q".into()));
        gathered.add(Hint::SlotsFreed(vec![ProjectId(2)]));
        gathered.add(Hint::TargetsChanged);
        for (_, message) in gathered.messages("me") {
            let text = serde_json::to_string(&message).expect("JSON");
            let read: Message = serde_json::from_str(&text).expect("a message");
            assert_eq!(read, message);
            for hints in read.wakes {
                match hints.hint() {
                    Hint::ArrivedElsewhere(arrivals) => assert_eq!(arrivals.len(), 3),
                    Hint::QueueChanged(project_id, _) => assert_eq!(project_id, ProjectId(1)),
                    Hint::SlotsFreed(projects) => assert_eq!(projects, [ProjectId(2)]),
                    Hint::Arrived(_) => panic!("it comes from another node"),
                    Hint::TargetsChanged => (),
                    Hint::Everywhere => panic!("nothing was too much"),
                }
            }
        }
    }

    #[test]
    fn too_many_hints_are_published_as_everywhere() {
        let mut gathered = Gathered::default();
        let arrivals = (0..=MAX_WAKES).map(|it| arrival(&it.to_string(), 0)).collect();
        gathered.add(Hint::Arrived(arrivals));
        let messages = gathered.messages("me");
        assert_eq!(messages.len(), 1);
        assert_eq!(messages[0].1.wakes, [HintMessage::Everywhere]);
    }
}
