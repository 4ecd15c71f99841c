//! An endpoint of webhooks: it keeps what it is sent, and answers as a test says.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode, Uri},
    response::{IntoResponse, Response},
    routing::post,
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use fencepost_domain::webhook;
use serde_json::Value;
use tokio::{
    net::TcpListener,
    sync::{Mutex as Turns, mpsc, watch},
};

/// A request that came.
#[derive(Debug, Clone)]
pub struct Received {
    /// Path and query.
    pub path: String,
    pub headers: HeaderMap,
    pub text: String,
    /// Requests that were under way when it came, with itself.
    pub at_once: usize,
}

impl Received {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("{name}")).to_str().expect("text")
    }

    pub fn body(&self) -> Value {
        serde_json::from_str(&self.text).expect("JSON")
    }

    /// Whether one of its signatures is made with this secret.
    pub fn is_signed_with(&self, secret: &str) -> bool {
        let secret = secret.strip_prefix("whsec_").expect("a secret");
        let secret = vec![BASE64_STANDARD.decode(secret).expect("base64")];
        let timestamp = self.header("webhook-timestamp").parse().expect("seconds");
        let made = webhook::signatures(&secret, self.header("webhook-id"), timestamp, &self.text);
        self.header("webhook-signature").split(' ').any(|it| it == made)
    }
}

/// What it answers next; then 200.
type Answers = Arc<Mutex<VecDeque<Response>>>;

type Shared = (mpsc::UnboundedSender<Received>, Answers, watch::Receiver<bool>, Arc<AtomicUsize>);

/// A request that is under way: until it is answered, or its client goes.
struct UnderWay(Arc<AtomicUsize>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An endpoint.
pub struct Sink {
    pub url: String,
    /// Answers wait while it is true.
    is_held: watch::Sender<bool>,
    answers: Answers,
    received: Turns<mpsc::UnboundedReceiver<Received>>,
}

impl Sink {
    /// Listens on a free port of this machine.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}/hook", listener.local_addr().expect("an address"));
        let (sender, received) = mpsc::unbounded_channel();
        let answers = Answers::default();
        let (is_held, held) = watch::channel(false);
        let state = (sender, Arc::clone(&answers), held, Arc::default());
        let router = Router::new()
            .route("/hook", post(receive))
            .route("/hook/{*below}", post(receive))
            .with_state(state);
        tokio::spawn(async move { axum_serve(listener, router).await });
        Self { url, is_held, answers, received: Turns::new(received) }
    }

    /// What it answers to the next requests, in this order.
    pub fn answer(&self, answers: impl IntoIterator<Item = (u16, &'static str)>) {
        let mut next = self.answers.lock().expect("no panic");
        next.extend(answers.into_iter().map(|(status, text)| {
            (StatusCode::from_u16(status).expect("a status"), text).into_response()
        }));
    }

    /// The same, with headers.
    pub fn answer_with(&self, answer: impl IntoResponse) {
        self.answers.lock().expect("no panic").push_back(answer.into_response());
    }

    /// Requests are kept, and not answered until it lets go.
    pub fn hold(&self, is_held: bool) {
        self.is_held.send_replace(is_held);
    }

    /// Waits for the next request.
    pub async fn next(&self) -> Received {
        self.received.lock().await.recv().await.expect("a request")
    }

    /// Whether a request came that no test has seen.
    pub async fn has_more(&self) -> bool {
        !self.received.lock().await.is_empty()
    }
}

async fn axum_serve(listener: TcpListener, router: Router) {
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        let service = hyper_util::service::TowerToHyperService::new(router.clone());
        let io = hyper_util::rt::TokioIo::new(stream);
        let serving = hyper::server::conn::http1::Builder::new().serve_connection(io, service);
        tokio::spawn(serving);
    }
}

async fn receive(
    State((sender, answers, mut held, under_way)): State<Shared>,
    uri: Uri,
    headers: HeaderMap,
    text: String,
) -> Response {
    let at_once = under_way.fetch_add(1, Ordering::SeqCst) + 1;
    let _under_way = UnderWay(under_way);
    let _ = sender.send(Received { path: uri.to_string(), headers, text, at_once });
    let _ = held.wait_for(|it| !it).await;
    let next = answers.lock().expect("no panic").pop_front();
    next.unwrap_or_else(|| "ok".into_response())
}
