//! Who may do what: people, projects, members and keys in [`accounts`]; what a node remembers of
//! them, and for how long, in [`credentials`]. It knows nothing of jobs.

pub mod accounts;
pub mod credentials;
