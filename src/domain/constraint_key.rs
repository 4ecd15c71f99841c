//! Constraint keys: which jobs ordinary claims must skip, because they run only on some workers or
//! under a limit.

use sha2::{Digest, Sha256};
use uuid::Uuid;

/// The constraint key of a job: a hash of type, labels, and concurrency key with its limit. Jobs
/// with the same key become claimable together. None: any worker of the queue may run the job.
///
/// `labels` must be sorted.
///
/// ```
/// # use fencepost_domain::constraint_key;
/// let labels = |it: &[&str]| it.iter().map(|it| it.to_string()).collect::<Vec<_>>();
/// assert_eq!(constraint_key::of("mail", &[], None), None);
/// let acme = constraint_key::of("mail", &[], Some(("acme", 1)));
/// assert_eq!(acme, constraint_key::of("mail", &[], Some(("acme", 1))));
/// assert_ne!(acme, constraint_key::of("mail", &[], Some(("acme", 2))));
/// assert_ne!(acme, constraint_key::of("mail", &labels(&["acme"]), None));
/// let ab = constraint_key::of("mail", &labels(&["ab"]), None);
/// assert_ne!(ab, constraint_key::of("mail", &labels(&["a", "b"]), None));
/// assert_ne!(acme, constraint_key::of("fax", &[], Some(("acme", 1))));
/// ```
#[must_use]
pub fn of(job_type: &str, labels: &[String], concurrency: Option<(&str, i32)>) -> Option<Uuid> {
    if labels.is_empty() && concurrency.is_none() {
        return None;
    }
    let mut hash = Sha256::new();
    let mut add = |part: &str| {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    };
    add(job_type);
    add(concurrency.map_or("", |it| it.0));
    add(&concurrency.map_or(String::new(), |it| it.1.to_string()));
    labels.iter().for_each(|it| add(it));
    let digest = hash.finalize();
    let bytes = digest.first_chunk::<16>().copied().unwrap_or_default();
    Some(Uuid::from_bytes(bytes))
}
