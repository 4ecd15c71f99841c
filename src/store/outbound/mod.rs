//! What endpoints and people are told: events, webhooks, alarms and their incidents.

pub mod alarms;
pub mod incidents;
pub mod outbound_events;
pub mod webhooks;
