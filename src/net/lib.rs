//! Calls to the outside: URLs of users, mail and TLS; and secrets as they are sealed for the database.

pub mod mail;
pub mod outbound;
pub mod seal;
pub mod tls;
