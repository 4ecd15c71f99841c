//! Signals: the first asks the process to stop, the second ends it.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// The exit code of an interrupted process.
const INTERRUPTED_EXIT_CODE: i32 = 130;

/// Cancelled by the first SIGINT or SIGTERM; a second one ends the process at once.
///
/// # Errors
/// When the handlers cannot be set.
pub fn on_signal() -> anyhow::Result<CancellationToken> {
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut terminations = signal(SignalKind::terminate())?;
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    tokio::spawn(async move {
        for is_second in [false, true] {
            tokio::select! {
                _ = interrupts.recv() => (),
                _ = terminations.recv() => (),
            }
            stopping.cancel();
            if is_second {
                std::process::exit(INTERRUPTED_EXIT_CODE);
            }
        }
    });
    Ok(stop)
}
