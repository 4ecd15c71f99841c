//! Ids: public ids are a prefix and a sortable base32 suffix, as in
//! `job_01m7w3ha3aextt8pkwwdmxsmqw`. Never talks to a database, never decides anything.
//!
//! The suffix is the `TypeID` encoding of a UUID v7: 26 characters, sortable by creation time.

use std::{fmt, str::FromStr};

use chrono::{DateTime, Utc};
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use typeid_suffix::prelude::{TypeIdSuffix, V7};
use uuid::Uuid;

/// The text is not an id of the expected kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a valid id")]
pub struct InvalidId;

macro_rules! prefixed_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, sqlx::Type)]
        #[sqlx(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// The prefix of every id of this kind.
            pub const PREFIX: &'static str = $prefix;

            /// A new id, greater than every one that this process has made.
            #[must_use]
            pub fn generate() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}{}", Self::PREFIX, TypeIdSuffix::from(self.0))
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                let suffix = text.strip_prefix(Self::PREFIX).ok_or(InvalidId)?;
                let suffix = TypeIdSuffix::from_str(suffix).map_err(|_| InvalidId)?;
                Ok(Self(suffix.to_uuid()))
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
    };
}

prefixed_id!(
    /// A job. Unique in its project only: every statement names the project as well.
    JobId,
    "job_"
);
impl JobId {
    /// When it was made, by the clock of a node; none if a client chose an id without a time.
    #[must_use]
    pub fn made_at(self) -> Option<DateTime<Utc>> {
        let (seconds, nanoseconds) = self.0.get_timestamp()?.to_unix();
        DateTime::from_timestamp(i64::try_from(seconds).ok()?, nanoseconds)
    }

    /// An id derived from a seed: always the same for the same seed. It sorts by the time of the
    /// seed, which is a UUID v7.
    #[must_use]
    pub fn derived(seed: Uuid, number: u64) -> Self {
        Self(derived(seed, number))
    }
}

/// The instance's secret, from which the ids of ticks' jobs are derived: a client that chooses ids
/// for its own jobs must not be able to take the id of a tick.
#[derive(Clone)]
pub struct TickKey(Hmac<Sha256>);

impl TickKey {
    /// Of a secret of any length.
    #[must_use]
    pub fn new(secret: &[u8]) -> Self {
        Self(Hmac::new_from_slice(secret).unwrap_or_else(|_| unreachable!("any length is valid")))
    }
}

impl JobId {
    /// The id of a schedule's job for one tick: the same on every node. It sorts by the tick, given
    /// in milliseconds since 1970.
    #[must_use]
    pub fn of_tick(key: &TickKey, project: ProjectId, schedule_id: &str, tick_ms: i64) -> Self {
        let mut hash = key.0.clone();
        hash.update(b"tick");
        hash.update(&project.0.to_be_bytes());
        hash.update(schedule_id.as_bytes());
        hash.update(&tick_ms.to_be_bytes());
        let hash = hash.finalize().into_bytes();
        let mut bytes = hash.first_chunk::<16>().copied().unwrap_or_default();
        bytes[..TIME_BYTES].copy_from_slice(&tick_ms.to_be_bytes()[2..]);
        Self(v7(bytes))
    }
}

impl ScheduleId {
    /// See [`JobId::derived`].
    #[must_use]
    pub fn derived(seed: Uuid) -> Self {
        Self(derived(seed, u64::MAX))
    }
}

impl OperationId {
    /// See [`JobId::derived`].
    #[must_use]
    pub fn derived(seed: Uuid) -> Self {
        Self(derived(seed, u64::MAX))
    }
}

impl BatchId {
    /// See [`JobId::derived`].
    #[must_use]
    pub fn derived(seed: Uuid) -> Self {
        Self(derived(seed, u64::MAX))
    }
}

impl WorkflowId {
    /// See [`JobId::derived`].
    #[must_use]
    pub fn derived(seed: Uuid) -> Self {
        Self(derived(seed, u64::MAX))
    }
}

/// The leading bytes of a UUID v7 that hold its time.
const TIME_BYTES: usize = 6;

fn derived(seed: Uuid, number: u64) -> Uuid {
    let mut hash = Sha256::new();
    hash.update(seed.as_bytes());
    hash.update(number.to_be_bytes());
    let mut bytes = hash.finalize().first_chunk::<16>().copied().unwrap_or_default();
    bytes[..TIME_BYTES].copy_from_slice(&seed.as_bytes()[..TIME_BYTES]);
    v7(bytes)
}

fn v7(bytes: [u8; 16]) -> Uuid {
    uuid::Builder::from_bytes(bytes)
        .with_version(uuid::Version::SortRand)
        .with_variant(uuid::Variant::RFC4122)
        .into_uuid()
}

prefixed_id!(
    /// A workflow: jobs with dependencies. Unique in its project only.
    WorkflowId,
    "wf_"
);
prefixed_id!(
    /// A batch: jobs whose ends are counted. Unique in its project only.
    BatchId,
    "batch_"
);
prefixed_id!(
    /// A bulk operation in the background. Unique in its project only.
    OperationId,
    "op_"
);
prefixed_id!(
    /// A recurring schedule with a generated id. Unique in its project only.
    ScheduleId,
    "rjob_"
);
prefixed_id!(
    /// An event of a job.
    EventId,
    "evt_"
);
prefixed_id!(
    /// A webhook's endpoint. Unique in its project only. Its queue in the outbox has the same name.
    EndpointId,
    "ep_"
);
prefixed_id!(
    /// An incident, which an alarm has found.
    IncidentId,
    "inc_"
);
prefixed_id!(
    /// A delivery of a webhook: a job of the project's outbox.
    DeliveryId,
    "dlv_"
);
prefixed_id!(
    /// The public name of a project. Inside, a project is a [`ProjectId`].
    ProjectPublicId,
    "proj_"
);
prefixed_id!(
    /// An API key's public name; the key itself is a secret and no id.
    KeyId,
    "key_"
);

prefixed_id!(AccountId, "acct_");
prefixed_id!(
    /// A session, from login to logout.
    SessionId,
    "sess_"
);
prefixed_id!(
    /// An identity of an account at an OpenID Connect provider. Unique in its account only.
    IdentityId,
    "idn_"
);
prefixed_id!(
    /// A passkey of an account. Unique in its account only.
    PasskeyId,
    "pk_"
);
prefixed_id!(
    /// An invitation to a project. Unique in its project only.
    InvitationId,
    "inv_"
);
prefixed_id!(
    /// An audit entry. Unique in its project only.
    AuditId,
    "aud_"
);
prefixed_id!(NodeId, "node_");

/// A project inside this system: the first column of every tenant's key and index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, sqlx::Type)]
#[sqlx(transparent)]
pub struct ProjectId(pub i32);

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident, $malformed:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, sqlx::Type, serde::Serialize)]
        #[sqlx(transparent)]
        pub struct $name(pub Uuid);

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let malformed = || serde::de::Error::custom($malformed);
                let text = String::deserialize(from).map_err(|_| malformed())?;
                text.parse().map(Self).map_err(|_| malformed())
            }
        }
    };
}

uuid_id!(
    /// One lease of one job: random, made by the server at the claim, never used twice.
    LeaseId,
    "must be the `lease_id` returned by the poll: a UUID"
);
uuid_id!(
    /// A poll, named by its worker so that it can be repeated.
    PollId,
    "must be a UUID that the worker generates for each poll"
);

/// Prefix of the generated names of unnamed workers.
pub const ANONYMOUS: &str = "anonymous:";
/// Prefix of the names under which nodes hold leases of jobs that they push. Statements that look
/// for silent workers leave out such names, and carry this one as a literal.
pub const PUSH_WORKER: &str = "fencepost-push-";

/// A unique name for a worker without one.
#[must_use]
pub fn anonymous_worker() -> String {
    format!("{ANONYMOUS}{}", TypeIdSuffix::new::<V7>())
}

/// An id for one request, for logs and error bodies.
#[must_use]
pub fn request_id() -> String {
    format!("req_{}", TypeIdSuffix::new::<V7>())
}

/// A job within its project: the key of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct JobKey {
    pub project_id: ProjectId,
    pub id: JobId,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_reads_back_as_it_was_written() {
        let id = JobId::generate();
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(id.to_string().len(), "job_".len() + 26);
    }

    #[test]
    fn an_id_from_a_seed_is_the_same_again_and_keeps_its_time() {
        let seed = Uuid::now_v7();
        assert_eq!(JobId::derived(seed, 1), JobId::derived(seed, 1));
        assert_ne!(JobId::derived(seed, 1), JobId::derived(seed, 2));
        let id = JobId::derived(seed, 1);
        assert_eq!(
            id.0.get_timestamp().map(|it| it.to_unix().0),
            seed.get_timestamp().map(|it| it.to_unix().0)
        );
        assert_eq!(id.to_string().parse(), Ok(id));
    }

    #[test]
    fn the_job_of_a_tick_has_one_id_and_it_sorts_by_the_tick() {
        let key = TickKey::new(b"one instance");
        let id = |schedule, tick_ms| JobId::of_tick(&key, ProjectId(1), schedule, tick_ms);
        assert_eq!(id("rjob_a", 1_800_000_000_000), id("rjob_a", 1_800_000_000_000));
        assert_ne!(id("rjob_a", 1_800_000_000_000), id("rjob_b", 1_800_000_000_000));
        assert_ne!(id("rjob_a", 1), JobId::of_tick(&key, ProjectId(2), "rjob_a", 1));
        let other = TickKey::new(b"another instance");
        assert_ne!(id("rjob_a", 1), JobId::of_tick(&other, ProjectId(1), "rjob_a", 1));
        assert!(id("rjob_a", 1_800_000_000_000) < id("rjob_b", 1_800_000_001_000));
        let text = id("rjob_a", 1_800_000_000_000).to_string();
        assert_eq!(text.parse(), Ok(id("rjob_a", 1_800_000_000_000)));
    }

    #[test]
    fn ids_sort_by_the_time_they_were_made() {
        let (first, second) = (JobId::generate(), JobId::generate());
        assert!(first < second);
        assert!(first.to_string() < second.to_string());
    }

    #[test]
    fn an_id_of_another_kind_is_refused() {
        let key = KeyId::generate().to_string();
        assert_eq!(key.parse::<JobId>(), Err(InvalidId));
        assert_eq!("job_".parse::<JobId>(), Err(InvalidId));
        assert_eq!("job_01m7w3ha3aextt8pkwwdmxsmq!".parse::<JobId>(), Err(InvalidId));
        assert_eq!("job_zzzzzzzzzzzzzzzzzzzzzzzzzz".parse::<JobId>(), Err(InvalidId));
    }
}
