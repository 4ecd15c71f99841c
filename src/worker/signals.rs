//! Signals of the terminal and the service manager.

use nix::sys::signal::Signal as Raw;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalRequest {
    /// SIGTERM or SIGINT: drain; the second time, end.
    Stop,
    Quiet,
    Resume,
}

/// Starts listening.
///
/// # Errors
/// When a handler cannot be set.
pub fn listen() -> anyhow::Result<mpsc::UnboundedReceiver<SignalRequest>> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let handled = [
        (Raw::SIGTERM, SignalRequest::Stop),
        (Raw::SIGINT, SignalRequest::Stop),
        (Raw::SIGTSTP, SignalRequest::Quiet),
        (Raw::SIGCONT, SignalRequest::Resume),
    ];
    for (raw, asked) in handled {
        let mut signals = signal(SignalKind::from_raw(raw as i32))?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() && sender.send(asked).is_ok() {}
        });
    }
    Ok(receiver)
}
