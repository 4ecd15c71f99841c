//! Connections that have sent a part of a request's head. Such a connection has no request, and
//! hyper would wait for the rest of the head when the node stops.

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Progress of a connection's request. The connection's task alone changes it.
#[derive(Debug, Clone, Default)]
pub struct Progress(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    /// Bytes have come that belong to no request yet.
    has_head_begun: AtomicBool,
    /// A head is complete, and its answer is not yet written.
    has_request: AtomicBool,
    /// The answer is made; a part of its body may follow.
    is_answered: AtomicBool,
}

impl Progress {
    /// True if the connection has sent a part of a head, and nothing else is under way.
    #[must_use]
    pub fn is_in_a_head(&self) -> bool {
        let Flags { has_head_begun, has_request, .. } = &*self.0;
        has_head_begun.load(Ordering::Relaxed) && !has_request.load(Ordering::Relaxed)
    }

    /// A head is complete. `answering` makes its answer.
    pub fn answer<F: Future>(&self, answering: F) -> Answered<F> {
        self.0.has_head_begun.store(false, Ordering::Relaxed);
        self.0.is_answered.store(false, Ordering::Relaxed);
        self.0.has_request.store(true, Ordering::Relaxed);
        Answered { answering, progress: self.clone() }
    }

    fn read(&self) {
        if !self.0.has_request.load(Ordering::Relaxed) {
            self.0.has_head_begun.store(true, Ordering::Relaxed);
        }
    }

    fn flushed(&self) {
        if self.0.is_answered.load(Ordering::Relaxed) {
            self.0.has_request.store(false, Ordering::Relaxed);
        }
    }
}

pin_project! {
    /// The answer to a request, while it is made.
    pub struct Answered<F> {
        #[pin]
        answering: F,
        progress: Progress,
    }
}

impl<F: Future> Future for Answered<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let answer = ready!(this.answering.poll(cx));
        this.progress.0.is_answered.store(true, Ordering::Relaxed);
        Poll::Ready(answer)
    }
}

/// A stream whose reads and flushes are noted.
#[derive(Debug)]
pub struct Noted<S> {
    stream: S,
    progress: Progress,
}

impl<S> Noted<S> {
    /// Notes the reads and flushes of this stream.
    #[must_use]
    pub const fn new(stream: S, progress: Progress) -> Self {
        Self { stream, progress }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Noted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            self.progress.read();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Noted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.progress.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn bytes_between_requests_begin_a_head() {
        let progress = Progress::default();
        assert!(!progress.is_in_a_head(), "nothing has come");
        progress.read();
        assert!(progress.is_in_a_head());
        let answer = progress.answer(std::future::ready(()));
        progress.read();
        progress.flushed();
        assert!(!progress.is_in_a_head(), "bytes of its body, while it runs");
        answer.now_or_never().expect("it is ready");
        assert!(!progress.is_in_a_head(), "its answer is on its way");
        progress.flushed();
        assert!(!progress.is_in_a_head(), "idle");
        progress.read();
        assert!(progress.is_in_a_head(), "a part of the next head");
    }
}
