//! Server-sent events: a task of its own reads and waits, so that a client that disconnects cannot
//! stop it in the middle of a statement. The connection only forwards.

use std::{convert::Infallible, time::Duration};

use axum::{
    http::{HeaderMap, HeaderName},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use fencepost_domain::{error::Error, ids::ProjectId, limits::RESERVED_STREAMS};
use fencepost_store::connection::deadline::bounded;
use futures_util::stream;
use serde::Serialize;
use tokio::sync::mpsc;

use crate::{
    app::App,
    auth::{Caller, CallerKind},
};

/// Interval of keep-alive comments on a silent stream.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Events that may wait for a slow client; then the task waits.
const MAX_WAITING_EVENTS: usize = 64;
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// The writing end of a stream.
pub struct Writer {
    sender: mpsc::Sender<Event>,
    app: App,
}

/// The client is gone, or the stream has to end.
#[derive(Debug)]
pub struct Ended;

impl Writer {
    /// Sends one event, when a slow client has read enough of the earlier ones.
    ///
    /// # Errors
    /// [`Ended`] when the client is gone, or the node stops first.
    pub async fn send(&self, kind: &str, id: &str, data: &impl Serialize) -> Result<(), Ended> {
        let event = Event::default().event(kind).id(id).json_data(data).map_err(|_| Ended)?;
        tokio::select! {
            biased;
            sent = self.sender.send(event) => sent.map_err(|_| Ended),
            () = self.app.engine.stopping.cancelled() => Err(Ended),
        }
    }

    /// Waits for something, unless the stream has to end before: the client disconnected, or the
    /// node stops.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn wait<T>(&self, for_what: impl Future<Output = T>) -> Result<T, Ended> {
        tokio::select! {
            it = for_what => Ok(it),
            () = self.sender.closed() => Err(Ended),
            () = self.app.engine.stopping.cancelled() => Err(Ended),
        }
    }
}

/// Streams of a project that this node serves.
#[must_use]
pub fn count(app: &App, project_id: ProjectId) -> u32 {
    app.local_permits.taken(&permit_name(project_id))
}

fn permit_name(project_id: ProjectId) -> String {
    format!("streams:{}", project_id.0)
}

/// Starts a stream, written by a task of its own.
///
/// # Errors
/// [`Error::Overloaded`] when this node serves
/// [`MAX_STREAMS`](fencepost_domain::limits::MAX_STREAMS) already, but for the
/// [`RESERVED_STREAMS`] of projects that have none; [`Error::QuotaExceeded`] when it serves as many
/// of the project as its plan allows.
pub fn start<P: CallerKind + Clone, Writing>(
    app: &App,
    caller: &Caller<P>,
    write: impl FnOnce(Writer) -> Writing,
) -> Result<Response, Error>
where
    Writing: Future<Output = Result<(), Ended>> + Send + 'static,
{
    let (name, max) = (permit_name(caller.project_id), caller.limits.max_streams());
    let is_first = app.local_permits.taken(&name) == 0;
    if !is_first && app.streams.available_permits() <= RESERVED_STREAMS {
        return Err(Error::Overloaded);
    }
    let on_node = app.streams.clone().try_acquire_owned().map_err(|_| Error::Overloaded)?;
    let of_project = app.local_permits.take(&name, max);
    let what = "event streams on one node";
    let of_project = of_project.ok_or(Error::QuotaExceeded { what, max: max.into() })?;
    let (sender, receiver) = mpsc::channel(MAX_WAITING_EVENTS);
    let writing = write(Writer { sender, app: app.clone() });
    let (app, caller) = (app.clone(), caller.clone());
    tokio::spawn(bounded(async move {
        // However busy the stream is: a revoked key gets nothing more. The reason of the end does
        // not matter.
        tokio::select! {
            _ = writing => (),
            _ = caller.until_revoked(&app) => (),
        }
        drop((on_node, of_project));
    }));
    let events = stream::unfold(receiver, async |mut receiver| {
        let event = receiver.recv().await?;
        Some((Ok::<_, Infallible>(event), receiver))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response())
}

/// The `Last-Event-ID` of a client that reconnects.
#[must_use]
pub fn last_event_id(headers: &HeaderMap) -> Option<&str> {
    headers.get(LAST_EVENT_ID)?.to_str().ok().filter(|it| !it.is_empty())
}
