//! Two nodes: the second one hears what the first one publishes.

use fencepost_domain::ids::NodeId;

use super::{NoListeners, Notifier, relay};
use crate::{
    engine::Engine,
    redis_bus::Bus,
    tokio_util::sync::CancellationToken,
    wakeups::{self, Hint, Hints, Wake},
};

/// See the module's comment.
pub struct Pair {
    /// The hints of the first node for others.
    pub wake: Wake,
    heard: Hints,
    /// They would end otherwise.
    _own: Hints,
}

impl Pair {
    /// Starts the relays of both.
    #[must_use]
    pub fn start() -> Self {
        let (wake, own) = wakeups::channel();
        let (bus, mut published) = Bus::new(NodeId::generate());
        tokio::spawn(relay::publish(bus, wake.subscribe(), CancellationToken));
        let (second, heard) = wakeups::channel();
        let notifier = Notifier {
            wake: second,
            feed: NoListeners,
            tally: NoListeners,
            backlog_waits: NoListeners,
        };
        let engine = Engine { notifier };
        tokio::spawn(async move {
            let (bus, _) = Bus::new(NodeId::generate());
            while let Some(text) = published.recv().await {
                relay::hear(&engine, &bus, &text);
            }
        });
        Self { wake, heard, _own: own }
    }

    /// The next queue that the second node hears of.
    pub async fn next_queue(&mut self) -> Vec<String> {
        match self.heard.next().await {
            Some(Hint::ArrivedElsewhere(arrivals)) => {
                arrivals.iter().map(|it| it.queue.to_string()).collect()
            }
            other => panic!("{other:?}"),
        }
    }
}
