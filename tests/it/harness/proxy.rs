//! A TCP proxy in front of PostgreSQL that can lose an answer on its way, or be gone.

use std::sync::{Arc, Mutex};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixStream},
    sync::watch,
};

use super::{Database, TestServer};

/// See the module's comment.
pub struct Proxy {
    url: String,
    swallowed: Arc<Mutex<Option<&'static str>>>,
    is_cut: watch::Sender<bool>,
}

impl Proxy {
    /// Starts a proxy in front of a database.
    pub async fn start(database: &Database) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (before, dir) = database.url.split_once("?host=").expect("a socket's folder");
        let socket = format!("{dir}/.s.PGSQL.5432");
        let url = before.replace("@localhost", &format!("@{address}"));
        let swallowed = Arc::new(Mutex::new(None));
        let (is_cut, cut) = watch::channel(false);
        let armed = Arc::clone(&swallowed);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = UnixStream::connect(&socket).await.expect("the database answers");
                tokio::spawn(forward(client, server, Arc::clone(&armed), cut.clone()));
            }
        });
        Self { url: format!("{url}?sslmode=disable"), swallowed, is_cut }
    }

    /// A server whose database is behind the proxy.
    pub async fn server(&self) -> TestServer {
        TestServer::start(Database { url: self.url.clone() }).await
    }

    /// Cuts the connection on which the next answer with this text comes, instead of passing it on.
    /// PostgreSQL sends an answer when its transaction has ended.
    pub fn swallow_next(&self, text: &'static str) {
        *self.swallowed.lock().expect("no panic") = Some(text);
    }

    /// Whether it has.
    pub fn has_swallowed(&self) -> bool {
        self.swallowed.lock().expect("no panic").is_none()
    }

    /// Cuts all connections, and all that come, until it is called with false.
    pub fn cut(&self, is_cut: bool) {
        self.is_cut.send_replace(is_cut);
    }
}

fn is_swallowed(armed: &Mutex<Option<&'static str>>, answer: &[u8]) -> bool {
    let mut armed = armed.lock().expect("no panic");
    let is_it =
        armed.is_some_and(|text| answer.windows(text.len()).any(|it| it == text.as_bytes()));
    if is_it {
        *armed = None;
    }
    is_it
}

async fn forward(
    mut client: TcpStream,
    mut server: UnixStream,
    armed: Arc<Mutex<Option<&'static str>>>,
    mut cut: watch::Receiver<bool>,
) {
    let (mut asked, mut answered) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        tokio::select! {
            () = async { drop(cut.wait_for(|it| *it).await) } => return,
            read = client.read(&mut asked) => match read {
                Ok(bytes) if bytes > 0 => {
                    server.write_all(&asked[..bytes]).await.expect("the database listens");
                }
                _ => return,
            },
            read = server.read(&mut answered) => match read {
                Ok(bytes) if bytes > 0 => {
                    if is_swallowed(&armed, &answered[..bytes])
                        || client.write_all(&answered[..bytes]).await.is_err()
                    {
                        return;
                    }
                }
                _ => return,
            },
        }
    }
}
