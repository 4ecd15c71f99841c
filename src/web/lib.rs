//! What every API shares: the handles of a node in [`app`], who calls and what they may in
//! [`auth`], and how requests are read and answers written in [`wire`].

pub mod app;
pub mod auth;
pub mod wire;
