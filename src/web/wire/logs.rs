//! Streaming a job's logs, for the native API and adapters.

use std::{collections::BTreeMap, time::Duration};

use fencepost_domain::{error::Error, ids::JobKey, job::StoredState, limits};
use fencepost_engine::jobs::{self, LogPlace, LogRow};
use serde::Serialize;

use super::streams::{Ended, Writer};
use crate::app::App;

/// The output streams.
pub const STREAMS: [&str; 3] = ["stdout", "stderr", "system"];
/// Maximum positions in one event id. The newest attempts stay.
const MAX_SENT_PLACES: usize = 64;
/// A busy job is read at most this often for one stream.
const READ_PAUSE: Duration = Duration::from_millis(100);

/// Before all output of a job.
#[must_use]
pub fn beginning() -> LogPlace {
    LogPlace { attempt: 0, stream: String::new(), sequence: -1 }
}

/// A position, from a cursor.
///
/// # Errors
/// [`Error::Invalid`].
pub fn read_place(text: &str) -> Result<LogPlace, Error> {
    let invalid = || Error::invalid("cursor", "must be the next_cursor of an earlier page");
    let mut parts = text.splitn(3, '.');
    let mut part = || parts.next().ok_or_else(invalid);
    let attempt = part()?.parse().map_err(|_| invalid())?;
    let stream = part()?.to_owned();
    if !STREAMS.contains(&stream.as_str()) {
        return Err(invalid());
    }
    let sequence = part()?.parse().map_err(|_| invalid())?;
    Ok(LogPlace { attempt, stream, sequence })
}

/// The last sequence sent of each stream of each attempt: streams grow in parallel.
pub type Sent = BTreeMap<(i32, String), i64>;

/// The id of an event, from which a reader continues after it reconnects (`Last-Event-ID`): the
/// last sequence sent of each stream.
#[must_use]
pub fn write_sent(sent: &Sent) -> String {
    let latest = sent.iter().rev().take(MAX_SENT_PLACES);
    let places = latest.map(|((attempt, stream), it)| format!("{attempt}.{stream}.{it}"));
    places.collect::<Vec<_>>().join(",")
}

/// The positions in an event id.
#[must_use]
pub fn read_sent(text: &str) -> Sent {
    let places = text.split(',').take(MAX_SENT_PLACES).filter_map(|it| read_place(it).ok());
    places.map(|it| ((it.attempt, it.stream), it.sequence)).collect()
}

/// Sends stored and new chunks until the job has ended: each as `view` shows it.
///
/// # Errors
/// [`Ended`] when the client is gone or the node stops.
pub async fn follow<View: Serialize>(
    app: App,
    key: JobKey,
    mut sent: Sent,
    writer: Writer,
    view: impl Fn(LogRow) -> View + Send + Sync,
) -> Result<(), Ended> {
    let watch = app.engine.notifier.feed.watch(key.project_id, key.id);
    loop {
        // Subscribe before reading.
        let changed = watch.changed();
        tokio::pin!(changed);
        changed.as_mut().enable();
        // Read the state before the output: once the job has ended, all of its output is stored.
        let state = jobs::find(&app.engine, key).await.map_err(|_| Ended)?.state;
        send_new(&app, key, &mut sent, &writer, &view).await?;
        if matches!(state, StoredState::Succeeded | StoredState::Cancelled) {
            return Ok(());
        }
        writer.wait(changed).await?;
        writer.wait(tokio::time::sleep(READ_PAUSE)).await?;
    }
}

/// Page by page, so that at most one page is in memory.
async fn send_new<View: Serialize>(
    app: &App,
    key: JobKey,
    sent: &mut Sent,
    writer: &Writer,
    view: &impl Fn(LogRow) -> View,
) -> Result<(), Ended> {
    let limit = i64::from(limits::MAX_PAGE_LOGS);
    let mut after = beginning();
    // Attempts before the latest one do not grow any more.
    if let Some(((attempt, _), _)) = sent.last_key_value() {
        after.attempt = *attempt;
    }
    loop {
        let page = jobs::logs(&app.engine, key, None, &after, limit).await.map_err(|_| Ended)?;
        let is_full = page.len() as i64 == limit;
        for row in page {
            let stream = (row.attempt, row.stream.clone());
            after = LogPlace {
                attempt: row.attempt,
                stream: row.stream.clone(),
                sequence: row.sequence,
            };
            if sent.get(&stream).is_none_or(|it| row.sequence > *it) {
                sent.insert(stream, row.sequence);
                writer.send("log", &write_sent(sent), &view(row)).await?;
            }
        }
        if !is_full {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_far_streams_were_sent_reads_back_as_it_was_written() {
        let sent = Sent::from([((1, "stdout".into()), 9), ((2, "stderr".into()), 0)]);
        assert_eq!(write_sent(&sent), "2.stderr.0,1.stdout.9");
        assert_eq!(read_sent(&write_sent(&sent)), sent);
        assert!(read_sent("nonsense,1.x.1,1.stdout").is_empty());
    }
}
