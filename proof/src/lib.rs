//! Models of Fencepost's protocols. Each is small enough to be checked in every order of events,
//! and comes with broken variants that the check must catch: a check that passes everything proves
//! nothing.

pub mod lease;
pub mod order;
