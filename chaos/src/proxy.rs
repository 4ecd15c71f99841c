//! A socket before PostgreSQL: it points to the primary, and can delay what goes through it and cut
//! it off.

use std::{path::PathBuf, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::watch,
    time::sleep,
};

/// Bytes that are passed on at a time.
const CHUNK_BYTES: usize = 64 * 1024;

/// See the module's comment.
pub struct Proxy {
    dir: PathBuf,
    /// The folder of the primary's socket.
    target: watch::Sender<PathBuf>,
    /// How much later each answer comes.
    delay: watch::Sender<Duration>,
    /// Counts how often all connections were cut.
    cuts: watch::Sender<u64>,
    /// Answers that are cut off, of ten thousand.
    lost_answers: watch::Sender<u32>,
}

impl Proxy {
    /// Listens in a new folder, for PostgreSQL in another one.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn start(dir: PathBuf, target: PathBuf) -> anyhow::Result<Self> {
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir)?;
        let listener = UnixListener::bind(dir.join(SOCKET))?;
        let (target, targets) = watch::channel(target);
        let (delay, delays) = watch::channel(Duration::ZERO);
        let (cuts, cut) = watch::channel(0);
        let (lost_answers, lost) = watch::channel(0);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                // Before the target is read, so that no connection misses its cut.
                let mut cut = cut.clone();
                cut.mark_unchanged();
                let target = targets.borrow().join(SOCKET);
                // PostgreSQL is down: the client is refused, too.
                let Ok(server) = UnixStream::connect(target).await else { continue };
                let pipe = Pipe { delay: delays.clone(), lost: lost.clone() };
                tokio::spawn(pipe.serve(client, server, cut));
            }
        });
        Ok(Self { dir, target, delay, cuts, lost_answers })
    }

    /// The URL of PostgreSQL behind it.
    #[must_use]
    pub fn database_url(&self) -> String {
        format!("postgres://fencepost@localhost/postgres?host={}", self.dir.display())
    }

    /// Cuts all connections, and points new ones to another folder.
    pub fn point_to(&self, target: PathBuf) {
        self.target.send_replace(target);
        self.cut();
    }

    /// Cuts all connections.
    pub fn cut(&self) {
        self.cuts.send_modify(|it| *it += 1);
    }

    /// Delays each answer.
    pub fn delay(&self, by: Duration) {
        self.delay.send_replace(by);
    }

    /// Cuts this many of ten thousand answers off, with their connection.
    pub fn lose_answers(&self, of_ten_thousand: u32) {
        self.lost_answers.send_replace(of_ten_thousand);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

const SOCKET: &str = ".s.PGSQL.5432";

struct Pipe {
    delay: watch::Receiver<Duration>,
    lost: watch::Receiver<u32>,
}

impl Pipe {
    async fn serve(self, client: UnixStream, server: UnixStream, mut cut: watch::Receiver<u64>) {
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        tokio::select! {
            () = self.pass(from_client, to_server, false) => (),
            () = self.pass(from_server, to_client, true) => (),
            _ = cut.changed() => (),
        }
    }

    /// Passes on what comes, until one side ends or an answer is lost.
    async fn pass(
        &self,
        mut from: impl AsyncReadExt + Unpin,
        mut to: impl AsyncWriteExt + Unpin,
        are_answers: bool,
    ) {
        let mut chunk = vec![0; CHUNK_BYTES];
        while let Ok(read) = from.read(&mut chunk).await {
            if read == 0 || are_answers && rand::random_range(0..10_000) < *self.lost.borrow() {
                return;
            }
            let delay = *self.delay.borrow();
            if are_answers && !delay.is_zero() {
                sleep(delay).await;
            }
            if to.write_all(&chunk[..read]).await.is_err() {
                return;
            }
        }
    }
}
