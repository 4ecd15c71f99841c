//! A connection that ends when its reader is too slow: a reader that takes a few bytes at a time
//! would keep a large answer in memory for hours.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// For this long a reader may be slower.
const WINDOW: Duration = Duration::from_secs(10);
/// Bytes that a reader takes in a second, at least, while it keeps an answer waiting.
pub const LEAST_BYTES_PER_SECOND: u64 = 16 * 1024;

/// A stream whose reader must keep up.
#[derive(Debug)]
pub struct LeastRate<S> {
    stream: S,
    /// Since when the reader keeps bytes waiting, and how many it has taken.
    waiting: Option<(Instant, u64)>,
}

impl<S> LeastRate<S> {
    /// Watches the reader of this stream.
    #[must_use]
    pub const fn new(stream: S) -> Self {
        Self { stream, waiting: None }
    }

    fn watch(&mut self, written: &Poll<io::Result<usize>>) -> io::Result<()> {
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
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slow(taken: usize, for_seconds: u64) -> io::Result<()> {
        let began = Instant::now().checked_sub(Duration::from_secs(for_seconds)).expect("a time");
        let mut stream = LeastRate { stream: (), waiting: Some((began, 0)) };
        stream.watch(&Poll::Ready(Ok(taken)))
    }

    #[test]
    fn a_reader_must_keep_up_only_while_it_keeps_bytes_waiting() {
        let rate = LEAST_BYTES_PER_SECOND as usize;
        assert!(slow(1, 9).is_ok(), "the window has not passed");
        assert!(slow(1, 11).is_err());
        assert!(slow(rate * 12, 11).is_ok());
        let mut stream = LeastRate::new(());
        assert!(stream.watch(&Poll::Ready(Ok(1))).is_ok() && stream.waiting.is_none());
        assert!(stream.watch(&Poll::Pending).is_ok() && stream.waiting.is_some());
    }
}
