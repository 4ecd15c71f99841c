//! A TCP proxy in front of PostgreSQL that can lose an answer on its way.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixStream},
};

use super::{Database, TestServer};

/// What a statement's answer ends with when rows were inserted.
const INSERTED: &[u8] = b"INSERT 0 ";

/// See the module's comment.
pub struct Proxy {
    url: String,
    is_armed: Arc<AtomicBool>,
}

impl Proxy {
    /// Starts a proxy in front of a database.
    pub async fn start(database: &Database) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (before, dir) = database.url.split_once("?host=").expect("a socket's folder");
        let socket = format!("{dir}/.s.PGSQL.5432");
        let url = before.replace("@localhost", &format!("@{address}"));
        let is_armed = Arc::new(AtomicBool::new(false));
        let armed = Arc::clone(&is_armed);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = UnixStream::connect(&socket).await.expect("the database answers");
                tokio::spawn(forward(client, server, Arc::clone(&armed)));
            }
        });
        Self { url: format!("{url}?sslmode=disable"), is_armed }
    }

    /// A server whose database is behind the proxy.
    pub async fn server(&self) -> TestServer {
        TestServer::start(Database { url: self.url.clone() }).await
    }

    /// Lets the next insert be committed, and cuts its connection instead of passing its answer on.
    pub fn swallow_next_insert(&self) {
        self.is_armed.store(true, Ordering::SeqCst);
    }

    /// Whether it has.
    pub fn has_swallowed(&self) -> bool {
        !self.is_armed.load(Ordering::SeqCst)
    }
}

async fn forward(mut client: TcpStream, mut server: UnixStream, is_armed: Arc<AtomicBool>) {
    let (mut asked, mut answered) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        tokio::select! {
            read = client.read(&mut asked) => match read {
                Ok(bytes) if bytes > 0 => {
                    server.write_all(&asked[..bytes]).await.expect("the database listens");
                }
                _ => return,
            },
            read = server.read(&mut answered) => match read {
                Ok(bytes) if bytes > 0 => {
                    // PostgreSQL sends an answer when its transaction has ended.
                    let is_insert = answered[..bytes].windows(INSERTED.len()).any(|it| it == INSERTED);
                    if is_insert && is_armed.swap(false, Ordering::SeqCst) {
                        return;
                    }
                    if client.write_all(&answered[..bytes]).await.is_err() {
                        return;
                    }
                }
                _ => return,
            },
        }
    }
}
