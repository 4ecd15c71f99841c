//! A TCP proxy in front of PostgreSQL that can lose an answer on its way, or be gone.

use std::sync::{Arc, Mutex};

use super::{Database, TestServer};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixStream},
    sync::watch,
};

/// See the module's comment.
pub struct Proxy {
    url: String,
    armed: Arc<Mutex<Option<Armed>>>,
    is_cut: watch::Sender<bool>,
    silence: watch::Sender<Silence>,
    accepted: watch::Receiver<usize>,
}

/// Which connections are silent: nothing that is sent arrives, and none is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    None,
    /// Those that are open now, for ever.
    OfOpen,
    /// Those, and all that come.
    OfAll,
}

/// What the proxy is to swallow.
enum Armed {
    /// The next answer with these bytes in it.
    Answer(Vec<u8>),
    /// The answer to the next question with these bytes in it.
    AnswerTo(Vec<u8>),
}

impl Proxy {
    /// Starts a proxy in front of a database.
    pub async fn start(database: &Database) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (before, dir) = database.url.split_once("?host=").expect("a socket's folder");
        let socket = format!("{dir}/.s.PGSQL.5432");
        let url = before.replace("@localhost", &format!("@{address}"));
        let armed = Arc::new(Mutex::new(None));
        let (is_cut, cut) = watch::channel(false);
        let (silence, heard) = watch::channel(Silence::None);
        let shared = Arc::clone(&armed);
        let (count, accepted) = watch::channel(0);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = UnixStream::connect(&socket).await.expect("the database answers");
                let (shared, cut, heard) = (Arc::clone(&shared), cut.clone(), heard.clone());
                tokio::spawn(serve(client, server, shared, cut, heard));
                count.send_modify(|it| *it += 1);
            }
        });
        Self { url: format!("{url}?sslmode=disable"), armed, is_cut, silence, accepted }
    }

    /// The database behind the proxy.
    pub fn database(&self) -> Database {
        Database { url: self.url.clone() }
    }

    /// A server whose database is behind the proxy.
    pub async fn server(&self) -> TestServer {
        TestServer::start(self.database()).await
    }

    /// Waits until it has accepted this many connections.
    pub async fn until_accepted(&self, connections: usize) {
        let mut accepted = self.accepted.clone();
        accepted.wait_for(|it| *it >= connections).await.expect("it runs");
    }

    /// Cuts the connection on which the next answer with this text comes, instead of passing it on.
    /// PostgreSQL sends an answer when its transaction has ended.
    pub fn swallow_next(&self, text: &str) {
        *self.armed.lock().expect("no panic") = Some(Armed::Answer(text.into()));
    }

    /// Cuts the connection on which the next question with these bytes is asked, before it is
    /// answered.
    pub fn swallow_answer_to(&self, question: &[u8]) {
        *self.armed.lock().expect("no panic") = Some(Armed::AnswerTo(question.to_vec()));
    }

    /// Whether it has.
    pub fn has_swallowed(&self) -> bool {
        self.armed.lock().expect("no panic").is_none()
    }

    /// Makes connections silent. Those that have become silent stay so.
    pub fn silence(&self, silence: Silence) {
        self.silence.send_replace(silence);
    }

    /// Cuts all connections, and all that come, until it is called with false.
    pub fn cut(&self, is_cut: bool) {
        self.is_cut.send_replace(is_cut);
    }
}

/// Whether this is what the proxy waits for; then it waits for nothing more.
fn is_it(armed: &Mutex<Option<Armed>>, sent: &[u8], is_answer: bool) -> bool {
    let mut armed = armed.lock().expect("no panic");
    let has = |bytes: &[u8]| sent.windows(bytes.len()).any(|it| it == bytes);
    let is_it = match &*armed {
        Some(Armed::Answer(bytes)) => is_answer && has(bytes),
        Some(Armed::AnswerTo(bytes)) => !is_answer && has(bytes),
        None => false,
    };
    if is_it {
        *armed = None;
    }
    is_it
}

async fn serve(
    mut client: TcpStream,
    mut server: UnixStream,
    armed: Arc<Mutex<Option<Armed>>>,
    cut: watch::Receiver<bool>,
    mut silence: watch::Receiver<Silence>,
) {
    // A silence of those that were open does not concern one that comes.
    let is_silent = *silence.borrow_and_update() == Silence::OfAll;
    let falls_silent = async {
        while silence.changed().await.is_ok() {
            if *silence.borrow_and_update() != Silence::None {
                return;
            }
        }
        std::future::pending::<()>().await;
    };
    if !is_silent {
        tokio::select! {
            () = forward(&mut client, &mut server, armed, cut) => return,
            () = falls_silent => (),
        }
    }
    swallow(client).await;
}

/// Takes everything in, so that the sender's packets are acknowledged, and answers nothing.
async fn swallow(mut client: TcpStream) {
    let mut taken = vec![0; 65_536];
    while client.read(&mut taken).await.is_ok_and(|bytes| bytes > 0) {}
}

async fn forward(
    client: &mut TcpStream,
    server: &mut UnixStream,
    armed: Arc<Mutex<Option<Armed>>>,
    mut cut: watch::Receiver<bool>,
) {
    let mut loses_its_answer = false;
    let (mut asked, mut answered) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        tokio::select! {
            () = async { drop(cut.wait_for(|it| *it).await) } => return,
            read = client.read(&mut asked) => match read {
                Ok(bytes) if bytes > 0 => {
                    loses_its_answer |= is_it(&armed, &asked[..bytes], false);
                    server.write_all(&asked[..bytes]).await.expect("the database listens");
                }
                _ => return,
            },
            read = server.read(&mut answered) => match read {
                Ok(bytes) if bytes > 0 => {
                    if loses_its_answer
                        || is_it(&armed, &answered[..bytes], true)
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
