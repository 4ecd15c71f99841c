//! `fencepost scaler`: an external scaler of KEDA, by gRPC. It says how much work the queues of a
//! trigger have, and at once when idle queues get their first job.

mod grpc;
mod trigger;

pub use trigger::{MAX_JOBS_PER_WORKER, MAX_QUEUES};

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context;
use clap::Args;
use hyper::server::conn::http2;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;

use crate::client::{Client, ClientArgs};

/// Open connections; KEDA's operator and its metrics server have one each.
const MAX_CONNECTIONS: usize = 64;
/// Calls of one connection at the same time: each trigger holds one.
const MAX_CALLS: u32 = 2_000;
/// A connection that is silent gets a ping after this time, and is closed when as much passes
/// again.
const PING_AFTER: Duration = Duration::from_secs(30);
/// A connection on which nothing comes for this time is closed, also one without a first request.
const READ_TIMEOUT: Duration = Duration::from_secs(3 * PING_AFTER.as_secs());
/// After a failed `accept`: the process may be out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Options of `scaler`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
The key needs the scope `read`. A trigger of the type external-push names its queues in `queues`, separated \
by commas, and in `jobsPerWorker` how many jobs one worker is for. Everyone who can connect can read backlogs: \
admit KEDA's namespace only.")]
pub struct ScalerArgs {
    #[command(flatten)]
    pub client: ClientArgs,

    /// Address for the calls of KEDA, which are not encrypted
    #[arg(
        long,
        env = "FENCEPOST_SCALER_LISTEN",
        value_name = "ADDRESS",
        default_value = "127.0.0.1:7072"
    )]
    pub scaler_listen: SocketAddr,
}

/// Answers until `stop`.
///
/// # Errors
/// When there is no key, or the address is taken.
pub async fn run(args: ScalerArgs, stop: CancellationToken) -> anyhow::Result<()> {
    let client = Client::new(&args.client)?;
    let listener = TcpListener::bind(args.scaler_listen).await;
    let listener = listener.with_context(|| format!("cannot listen on {}", args.scaler_listen))?;
    tracing::info!(scaler.address = %listener.local_addr()?, "listening");
    tokio::select! {
        () = stop.cancelled() => Ok(()),
        never = accept(listener, client) => never,
    }
}

async fn accept(listener: TcpListener, client: Client) -> anyhow::Result<()> {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await?;
        match listener.accept().await {
            Ok((socket, _)) => {
                let client = client.clone();
                tokio::spawn(async move {
                    serve(socket, client).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve(socket: TcpStream, client: Client) {
    let _ = socket.set_nodelay(true);
    let mut stream = TimeoutStream::new(socket);
    stream.set_read_timeout(Some(READ_TIMEOUT));
    let stream = TokioIo::new(Box::pin(stream));
    let served = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_CALLS)
        .keep_alive_interval(PING_AFTER)
        .keep_alive_timeout(PING_AFTER)
        .serve_connection(stream, TowerToHyperService::new(grpc::routes(client)))
        .await;
    if let Err(error) = served {
        tracing::debug!(error = &error as &dyn std::error::Error, "a connection ended early");
    }
}
