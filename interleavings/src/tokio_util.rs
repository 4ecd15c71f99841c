//! What stops tasks, and what waits for them.

/// A signal to stop.
pub mod sync {
    use std::future::{Future, pending};

    /// Never sent.
    #[derive(Clone, Default)]
    pub struct CancellationToken;

    impl CancellationToken {
        pub fn cancelled(&self) -> impl Future<Output = ()> {
            pending()
        }
    }
}

/// Tasks that end before the node does.
pub mod task {
    use std::future::Future;

    /// Starts them, and waits for none.
    #[derive(Clone, Default)]
    pub struct TaskTracker;

    impl TaskTracker {
        pub fn spawn<T: Send + 'static>(
            &self,
            task: impl Future<Output = T> + Send + 'static,
        ) -> tokio::task::JoinHandle<T> {
            tokio::spawn(task)
        }
    }
}
