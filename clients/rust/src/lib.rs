#![doc = include_str!("../README.md")]

mod checkpoint;
mod client;
mod codes;
mod job;
mod webhooks;
mod worker;

pub use self::{
    client::{ApiError, Client, Error, ErrorDetail, Request},
    codes::ErrorCode,
    job::{Failure, Job, Scope},
    webhooks::{InvalidWebhook, WEBHOOK_TOLERANCE, WebhookEvent, verify_webhook},
    worker::Worker,
};
