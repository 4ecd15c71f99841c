//! A connection that ends when the reader of a large answer is too slow: one that takes a few bytes
//! at a time would keep it in memory for hours. Streams of events may wait: they hold little.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// For this long a reader may be slower.
const WINDOW: Duration = Duration::from_secs(10);
/// Bytes that a reader takes in a second, at least, while it keeps an answer waiting.
pub const LEAST_BYTES_PER_SECOND: u64 = 16 * 1024;

/// Whether a large answer is under way on a connection; in the extensions of its requests.
#[derive(Debug, Clone, Default)]
pub struct IsLarge(Arc<AtomicBool>);

impl IsLarge {
    /// The answer to this request is large.
    pub fn mark(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A stream whose reader must keep up.
#[derive(Debug)]
pub struct LeastRate<S> {
    stream: S,
    is_large: IsLarge,
    /// Since when the reader keeps bytes waiting, and how many it has taken.
    waiting: Option<(Instant, u64)>,
}

impl<S> LeastRate<S> {
    /// Watches the reader of this stream.
    #[must_use]
    pub const fn new(stream: S, is_large: IsLarge) -> Self {
        Self { stream, is_large, waiting: None }
    }

    fn watch(&mut self, written: &Poll<io::Result<usize>>) -> io::Result<()> {
        if !self.is_large.0.load(Ordering::Relaxed) {
            return Ok(());
        }
        match (written, &mut self.waiting) {
            (Poll::Pending, waiting @ None) => *waiting = Some((Instant::now(), 0)),
            (Poll::Ready(Ok(more)), Some((since, taken))) => {
                *taken += *more as u64;
                let elapsed = since.elapsed();
                if elapsed >= WINDOW {
                    if *taken < LEAST_BYTES_PER_SECOND * elapsed.as_secs() {
                        return Err(io::Error::new(io::ErrorKind::TimedOut, "a slow reader"));
                    }
                    self.waiting = Some((Instant::now(), 0));
                }
            }
            _ => (),
        }
        Ok(())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LeastRate<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LeastRate<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.watch(&written)?;
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.watch(&written)?;
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// Hyper flushes when nothing is left to write: the reader keeps nothing waiting.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.waiting = None;
        self.is_large.0.store(false, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn large() -> IsLarge {
        let is_large = IsLarge::default();
        is_large.mark();
        is_large
    }

    fn slow(taken: usize, for_seconds: u64) -> io::Result<()> {
        let began = Instant::now().checked_sub(Duration::from_secs(for_seconds)).expect("a time");
        let mut stream = LeastRate { waiting: Some((began, 0)), ..LeastRate::new((), large()) };
        stream.watch(&Poll::Ready(Ok(taken)))
    }

    #[test]
    fn a_reader_must_keep_up_only_while_it_keeps_bytes_waiting() {
        let rate = LEAST_BYTES_PER_SECOND as usize;
        assert!(slow(1, 9).is_ok(), "the window has not passed");
        assert!(slow(1, 11).is_err());
        assert!(slow(rate * 12, 11).is_ok());
        let mut events = LeastRate::new((), IsLarge::default());
        assert!(events.watch(&Poll::Pending).is_ok() && events.waiting.is_none());
        let mut stream = LeastRate::new((), large());
        assert!(stream.watch(&Poll::Ready(Ok(1))).is_ok() && stream.waiting.is_none());
        assert!(stream.watch(&Poll::Pending).is_ok() && stream.waiting.is_some());
    }
}
