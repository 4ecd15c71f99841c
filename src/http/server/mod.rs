//! The accept loop: connections with a first-byte timer, a header timer, a write timer and TCP
//! keep-alive, and a graceful end. (`axum::serve` never closes a silent socket.)

pub mod answers;
pub(crate) mod health;
pub mod late_refusals;
pub mod least_rate;
pub(crate) mod middleware;
pub mod progress;
pub(crate) mod route_group;
pub(crate) mod route_metrics;
pub(crate) mod security_headers;
pub mod security_txt;
mod undeclared;

use std::{
    collections::HashMap,
    io,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::Router;
use fencepost_config::ConnectionLimits;
use fencepost_signals::{limiter::client_of, telemetry};
use fencepost_web::{auth::ClientAddress, wire::Closing};
use hyper::{Request, body::Incoming, server::conn::http1, service::Service};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use metrics::{counter, gauge};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tokio_io_timeout::TimeoutStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::server::{
    least_rate::{IsLarge, LeastRate},
    middleware::Proxies,
    progress::{Answered, Noted, Progress},
};

/// A connection is closed if it has sent no byte by then.
pub const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection is closed if its header is not complete by then, or after an idle period this long:
/// hyper has one timer for both.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(75);
/// A client that reads nothing for this long is disconnected.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of an answer that the kernel keeps for a reader; else it may keep several MiB of each.
const SEND_BUFFER_BYTES: usize = 256 * 1024;
/// Open connections of one node: the parked polls, and as many again.
pub const MAX_CONNECTIONS: usize = 40_000;
/// Headers of one request.
const MAX_HEADERS: usize = 64;
/// Bytes of a request's head.
const MAX_HEAD_BYTES: usize = 16 * 1024;
/// The pause after `accept` failed, for example without free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// With the two above, a silent peer is disconnected after half a minute.
const KEEPALIVE_RETRIES: u32 = 3;

/// Open connections by address.
#[derive(Clone)]
struct Addresses {
    max: u32,
    proxies: Proxies,
    open: Arc<Mutex<HashMap<String, u32>>>,
}

/// One of an address's connections, until it is dropped.
struct Opened {
    addresses: Addresses,
    client: String,
}

impl Addresses {
    fn open(&self, address: IpAddr) -> Option<Opened> {
        let client = client_of(address);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let many = open.entry(client.clone()).or_default();
        // A proxy serves many clients.
        if *many >= self.max && !self.proxies.has(address) {
            return None;
        }
        *many += 1;
        drop(open);
        Some(Opened { addresses: self.clone(), client })
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let mut open = self.addresses.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(many) = open.get_mut(&self.client) {
            *many -= 1;
            if *many == 0 {
                open.remove(&self.client);
            }
        }
    }
}

/// Accepts connections until `closing`; then lets running requests finish. `connections` shows when
/// they all have.
pub async fn run(
    listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    closing: CancellationToken,
    connections: TaskTracker,
) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let addresses = Addresses {
        max: limits.per_address,
        proxies: Proxies::new(limits.proxies),
        open: Arc::default(),
    };
    loop {
        let accepted = tokio::select! {
            () = closing.cancelled() => break,
            accepted = accept(&listener, &room) => accepted,
        };
        match accepted {
            Ok((stream, address, permit)) => {
                let Some(opened) = addresses.open(address) else {
                    counter!(telemetry::CONNECTIONS_REFUSED).increment(1);
                    continue;
                };
                let answering = Answering {
                    router: TowerToHyperService::new(router.clone()),
                    address,
                    proxies: addresses.proxies.clone(),
                    is_large: IsLarge::default(),
                    progress: Progress::default(),
                    closing: closing.clone(),
                };
                connections.spawn(async move {
                    serve(stream, answering).await;
                    drop((opened, permit));
                });
            }
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "connection was not accepted"
                );
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    connections.close();
}

/// The routes, for one connection: each request knows its peer's address. (A layer of the router
/// would be built again for each connection and route.)
struct Answering {
    router: TowerToHyperService<Router>,
    address: IpAddr,
    proxies: Proxies,
    is_large: IsLarge,
    progress: Progress,
    closing: CancellationToken,
}

impl Service<Request<Incoming>> for Answering {
    type Response = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Response;
    type Error = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Error;
    type Future = Answered<<TowerToHyperService<Router> as Service<Request<Incoming>>>::Future>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        let extensions = request.extensions_mut();
        extensions.insert(ClientAddress(self.address));
        extensions.insert(self.proxies.clone());
        extensions.insert(self.is_large.clone());
        extensions.insert(Closing(self.closing.clone()));
        self.progress.answer(self.router.call(request))
    }
}

async fn accept(
    listener: &TcpListener,
    room: &Arc<Semaphore>,
) -> io::Result<(TcpStream, IpAddr, OwnedSemaphorePermit)> {
    let permit = Arc::clone(room).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, address) = listener.accept().await?;
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_RETRIES);
    let socket = SockRef::from(&stream);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(WRITE_TIMEOUT))?;
    Ok((stream, address.ip(), permit))
}

async fn serve(stream: TcpStream, answering: Answering) {
    let (progress, closing) = (answering.progress.clone(), answering.closing.clone());
    // A connection that closes before its first byte, or stays silent, was no request.
    let mut peeked_at = [0];
    let first_byte = tokio::select! {
        peeked = timeout(FIRST_BYTE_TIMEOUT, stream.peek(&mut peeked_at)) => peeked,
        () = closing.cancelled() => return,
    };
    if !matches!(first_byte, Ok(Ok(1))) {
        return;
    }
    gauge!(telemetry::CONNECTIONS).increment(1);
    let stream = Noted::new(stream, progress.clone());
    let mut stream = TimeoutStream::new(LeastRate::new(stream, answering.is_large.clone()));
    stream.set_write_timeout(Some(WRITE_TIMEOUT));
    let stream = Box::pin(stream);
    let mut connection = std::pin::pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(TokioIo::new(stream), answering)
    );
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = closing.cancelled() => {
            connection.as_mut().graceful_shutdown();
            // The rest of a head may never come.
            if progress.is_in_a_head() { Ok(()) } else { connection.await }
        }
    };
    gauge!(telemetry::CONNECTIONS).decrement(1);
    if let Err(error) = served {
        tracing::debug!(error = &error as &dyn std::error::Error, "a connection ended early");
    }
}
