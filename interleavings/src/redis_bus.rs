//! Messages from one node to another, without Redis.

use tokio::sync::mpsc;

use fencepost_domain::ids::NodeId;

/// A channel of Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Topic {
    Wake(u32),
    WakeAll,
}

/// A node's end of it.
#[derive(Debug, Clone)]
pub struct Bus {
    node: NodeId,
    texts: mpsc::UnboundedSender<String>,
}

impl Bus {
    pub fn new(node: NodeId) -> (Self, mpsc::UnboundedReceiver<String>) {
        let (texts, published) = mpsc::unbounded_channel();
        (Self { node, texts }, published)
    }

    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Nodes that run.
    pub fn nodes(&self) -> usize {
        2
    }

    pub async fn publish(&self, _: Topic, text: &str) -> bool {
        tokio::task::yield_now().await;
        self.texts.send(text.to_owned()).is_ok()
    }
}
