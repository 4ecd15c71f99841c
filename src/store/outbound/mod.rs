//! Notifications of endpoints and people: events, webhooks, alarms and their incidents.

pub mod alarms;
pub mod incidents;
pub mod outbound_events;
pub mod webhooks;
