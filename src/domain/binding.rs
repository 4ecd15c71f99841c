//! The queues and job types that a key is bound to.

use sha2::{Digest, Sha256};

use super::access::Scope;

/// Bytes of a binding's mark: those of one project must not be mistaken for each other.
const MARK_BYTES: usize = 6;

/// Queues and job types of a key. An empty list is no restriction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyBinding {
    /// Queues that it may use.
    pub queues: Vec<String>,
    /// Job types that it may use.
    pub job_types: Vec<String>,
    /// The same for each key with this binding, and for no other.
    mark: String,
}

/// A name that a key is not bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutOfBounds {
    /// `queue` or `job_type`.
    pub what: &'static str,
    /// The name.
    pub name: String,
}

impl KeyBinding {
    /// The scopes that a bound key may have: those whose calls are about single jobs.
    pub const SCOPES: [Scope; 3] = [Scope::Produce, Scope::Work, Scope::PayloadRead];

    /// The binding of a key; none: it may use all.
    #[must_use]
    pub fn of(queues: Vec<String>, job_types: Vec<String>) -> Option<Self> {
        if queues.is_empty() && job_types.is_empty() {
            return None;
        }
        let mut hash = Sha256::new();
        for names in [&queues, &job_types] {
            let mut names: Vec<_> = names.iter().collect();
            names.sort();
            hash.update(names.len().to_be_bytes());
            for name in names {
                hash.update(name.len().to_be_bytes());
                hash.update(name);
            }
        }
        let mark = hash.finalize()[..MARK_BYTES].iter().map(|it| format!("{it:02x}")).collect();
        Some(Self { queues, job_types, mark })
    }

    /// The name of one of its workers, as the project knows it: no key can name a worker of
    /// another one.
    #[must_use]
    pub fn worker(&self, worker_id: &str) -> String {
        format!("{worker_id}@{}", self.mark)
    }

    /// The same for each key with this binding, and for no other.
    #[must_use]
    pub fn mark(&self) -> &str {
        &self.mark
    }

    /// Whether it may use such jobs.
    #[must_use]
    pub fn includes(&self, queue: &str, job_type: &str) -> bool {
        self.check(queue, job_type).is_ok()
    }

    /// The same.
    ///
    /// # Errors
    /// The first name that it is not bound to.
    pub fn check(&self, queue: &str, job_type: &str) -> Result<(), OutOfBounds> {
        check(&self.queues, "queue", queue)?;
        check(&self.job_types, "job_type", job_type)
    }

    /// The job types of a poll of these queues that asks for `job_types`, or any if it names none.
    ///
    /// # Errors
    /// The first name that it is not bound to.
    pub fn narrow(
        &self,
        queues: &[String],
        job_types: Vec<String>,
    ) -> Result<Vec<String>, OutOfBounds> {
        queues.iter().try_for_each(|it| check(&self.queues, "queue", it))?;
        if job_types.is_empty() {
            return Ok(self.job_types.clone());
        }
        job_types.iter().try_for_each(|it| check(&self.job_types, "job_type", it))?;
        Ok(job_types)
    }
}

fn check(bound: &[String], what: &'static str, name: &str) -> Result<(), OutOfBounds> {
    match bound.is_empty() || bound.iter().any(|it| it == name) {
        true => Ok(()),
        false => Err(OutOfBounds { what, name: name.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    fn out(what: &'static str, name: &str) -> OutOfBounds {
        OutOfBounds { what, name: name.to_owned() }
    }

    #[test]
    fn a_key_is_bound_to_what_it_names_and_to_nothing_else() {
        assert_eq!(KeyBinding::of(Vec::new(), Vec::new()), None);
        let of_queue = KeyBinding::of(names(&["mail"]), Vec::new()).expect("bound");
        assert_eq!(of_queue.check("mail", "anything"), Ok(()));
        assert_eq!(of_queue.check("Mail", "anything"), Err(out("queue", "Mail")));
        let of_both = KeyBinding::of(names(&["mail", "sms"]), names(&["send"])).expect("bound");
        assert!(of_both.includes("sms", "send"));
        assert_eq!(of_both.check("sms", "send.all"), Err(out("job_type", "send.all")));
    }

    #[test]
    fn workers_of_different_bindings_have_different_names() {
        let name = |queues: &[&str], job_types: &[&str]| {
            KeyBinding::of(names(queues), names(job_types)).expect("bound").worker("w")
        };
        let mail = name(&["mail"], &[]);
        assert!(mail.starts_with("w@") && mail.len() == 2 + 2 * MARK_BYTES, "{mail}");
        assert_eq!(name(&["a", "b"], &[]), name(&["b", "a"], &[]));
        for other in [name(&[], &["mail"]), name(&["ma", "il"], &[]), name(&["mail"], &["x"])] {
            assert_ne!(other, mail);
        }
    }

    #[test]
    fn a_poll_that_names_no_type_asks_for_those_of_the_key() {
        let bound = KeyBinding::of(Vec::new(), names(&["a", "b"])).expect("bound");
        let queues = names(&["q"]);
        assert_eq!(bound.narrow(&queues, Vec::new()), Ok(names(&["a", "b"])));
        assert_eq!(bound.narrow(&queues, names(&["b"])), Ok(names(&["b"])));
        assert_eq!(bound.narrow(&queues, names(&["b", "c"])), Err(out("job_type", "c")));
        let bound = KeyBinding::of(names(&["q"]), Vec::new()).expect("bound");
        assert_eq!(bound.narrow(&queues, Vec::new()), Ok(Vec::new()));
        assert_eq!(bound.narrow(&names(&["q", "r"]), Vec::new()), Err(out("queue", "r")));
    }
}
