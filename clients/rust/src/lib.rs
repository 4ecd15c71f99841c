#![doc = include_str!("../README.md")]

mod client;
mod codes;
mod job;
mod worker;

pub use self::{
    client::{ApiError, Client, Error, ErrorDetail, Request},
    codes::ErrorCode,
    job::{Failure, Job},
    worker::Worker,
};
