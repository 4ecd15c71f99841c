//! Group commit, the pump and what it works with, and the relay. Claims read a table in memory
//! instead of PostgreSQL.

// The server's files have more than is called here.
#![allow(dead_code)]

/// Group commit.
pub mod group_commit {
    include!(concat!(env!("OUT_DIR"), "/group_commit.rs"));
}

/// Sync match.
pub mod sync_match {
    include!(concat!(env!("OUT_DIR"), "/sync_match.rs"));
}

/// A node, as the relay sees it.
pub struct Engine {
    notifier: notify::Notifier,
}

/// Messages that the pump publishes.
pub mod notify {
    use std::sync::Arc;

    use fencepost_domain::ids::ProjectId;
    use fencepost_signals::events_feed::JobEvent;
    use fencepost_store::claims::LeasedJob;

    use crate::wakeups::{Arrival, Wake};

    mod relay {
        include!(concat!(env!("OUT_DIR"), "/relay.rs"));
    }
    pub mod pair;

    /// Wakes, and publishes nothing.
    #[derive(Clone)]
    pub struct Notifier {
        pub wake: Wake,
        pub feed: NoListeners,
        pub tally: NoListeners,
        pub backlog_waits: NoListeners,
    }

    /// Without listeners.
    #[derive(Clone)]
    pub struct NoListeners;

    impl NoListeners {
        pub fn publish(&self, _: impl FnOnce() -> Vec<JobEvent>) {}

        pub fn claimed<'a>(&self, _: impl Iterator<Item = &'a LeasedJob>) {}

        pub fn arrived(&self, _: &[Arrival]) {}

        pub fn changed(&self, _: ProjectId, _: &Arc<str>) {}

        pub fn everywhere(&self) {}
    }
}

/// Releases.
pub mod settle {
    use std::future::Future;

    use fencepost_domain::{
        error::Error,
        ids::{JobKey, LeaseId, ProjectId},
    };

    use crate::{
        engine::group_commit::{Coalescer, GroupCommit},
        store::connection::pools::{Connection, Pool},
        wakeups::Wake,
    };

    /// The group commit of releases.
    pub struct Failures {
        pub pool: Pool,
        pub wake: Wake,
    }

    impl GroupCommit for Failures {
        type Item = (JobKey, LeaseId);
        type Answer = ();
        type Key = JobKey;
        type Connection = Connection;
        const KIND: &'static str = "end";
        const MAX_ROWS: usize = 10;

        fn bytes(_: &Self::Item) -> usize {
            1
        }
        fn key(item: &Self::Item) -> JobKey {
            item.0
        }
        fn project(item: &Self::Item) -> ProjectId {
            item.0.project_id
        }
        async fn connect(&self) -> sqlx::Result<Connection> {
            self.pool.acquire().await
        }
        async fn flush(
            &self,
            _: &mut Connection,
            items: &[Self::Item],
            _: bool,
        ) -> sqlx::Result<Vec<Result<(), Error>>> {
            tokio::task::yield_now().await;
            let released = self.pool.table.release(items);
            tokio::task::yield_now().await;
            self.wake.arrived(released);
            Ok(items.iter().map(|_| Ok(())).collect())
        }
    }

    /// Releases a lease.
    pub fn release(
        failures: &Coalescer<Failures>,
        key: JobKey,
        _: &str,
        lease_id: LeaseId,
    ) -> impl Future<Output = ()> + Send + use<> {
        let failures = failures.clone();
        async move { failures.submit((key, lease_id)).await.expect("it is released") }
    }
}

/// Results of parents.
pub mod enqueue {
    /// Their type.
    pub mod dependencies {
        pub use fencepost_engine::enqueue::dependencies::ParentResult;
    }
}

/// The pump.
pub mod dispatch {
    mod answered {
        include!(concat!(env!("OUT_DIR"), "/answered.rs"));
    }
    mod dispatched {
        include!(concat!(env!("OUT_DIR"), "/dispatched.rs"));
    }
    mod request {
        include!(concat!(env!("OUT_DIR"), "/request.rs"));
    }
    mod lanes {
        include!(concat!(env!("OUT_DIR"), "/lanes.rs"));
    }
    mod matches {
        include!(concat!(env!("OUT_DIR"), "/matches.rs"));
    }
    mod pump {
        include!(concat!(env!("OUT_DIR"), "/pump.rs"));
    }
    mod claim;
    pub mod node;

    /// Leases of claims whose outcome is unknown: no claim of these tests is.
    mod lost_claims {
        use fencepost_domain::ids::LeaseId;

        use crate::{
            engine::{group_commit::Coalescer, settle::Failures},
            store::connection::pools::Pool,
            tokio_util::sync::CancellationToken,
        };

        pub async fn release(
            pool: Pool,
            failures: Coalescer<Failures>,
            lease_ids: Vec<LeaseId>,
            _: CancellationToken,
        ) {
            for lease_id in lease_ids {
                if let Some(key) = pool.table.leased_with(lease_id) {
                    crate::engine::settle::release(&failures, key, "", lease_id).await;
                }
            }
        }
    }
}
