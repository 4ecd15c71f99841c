//! Calls to the outside: URLs of users, mail and TLS; and secrets as the database has them, sealed.

pub mod mail;
pub mod outbound;
pub mod seal;
pub mod tls;
