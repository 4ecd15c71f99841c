//! Calls by way of the operator's proxy, and by TLS with an authority of the operator's.

use std::{
    fmt, io,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use fencepost::{
    domain::outbound::Allowed,
    outbound::{Answer, CallError, Lookup, Outbound, Proxy},
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use reqwest::header::HeaderMap;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, pki_types::PrivateKeyDer},
};

use crate::harness::{limited, scratch};

/// Longer than any connection may take to be made.
const PATIENT: Duration = Duration::from_secs(20);

/// Every host is here.
#[derive(Debug)]
struct Here;

impl Lookup for Here {
    fn addresses(
        &self,
        _: String,
    ) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>> {
        Box::pin(async { Ok(vec![IpAddr::from([127, 0, 0, 1])]) })
    }
}

/// Serves each connection to a port of its own.
async fn serve<F: Future<Output = ()> + Send + 'static>(
    behaves: impl Fn(TcpStream) -> F + Send + 'static,
) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            tokio::spawn(behaves(stream));
        }
    });
    port
}

/// The text up to an empty line.
async fn head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        text.push(stream.read_u8().await.expect("a whole head"));
    }
    String::from_utf8(text).expect("ASCII").to_lowercase()
}

/// A proxy: what it was asked, and where it is.
async fn proxy() -> (u16, Arc<Mutex<Vec<String>>>) {
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let notes = Arc::clone(&asked);
    let port = serve(move |mut stream| {
        let notes = Arc::clone(&notes);
        async move {
            let request = head(&mut stream).await;
            notes.lock().expect("no panic").push(request.clone());
            let place = request.split(' ').nth(1).expect("a place").to_owned();
            let mut target = TcpStream::connect(place).await.expect("a server");
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.expect("an open connection");
            let _ = copy_bidirectional(&mut stream, &mut target).await;
        }
    })
    .await;
    (port, asked)
}

fn outbound(authorities: Option<&std::path::Path>) -> Outbound {
    let here = Allowed(vec!["127.0.0.1/32".parse().expect("a network")]);
    Outbound::new(here, authorities).expect("a file").with_lookup(Arc::new(Here))
}

async fn call(outbound: Outbound, url: impl fmt::Display) -> Result<Answer, CallError> {
    let to = outbound.destination(url.to_string().parse().expect("a URL"));
    to.post(HeaderMap::new(), "{}".to_owned(), PATIENT, 1024).await
}

/// Answers a request with the host that it names.
async fn answer_host(mut stream: impl AsyncRead + tokio::io::AsyncWrite + Unpin) {
    let request = head(&mut stream).await;
    let host = request.lines().find_map(|it| it.strip_prefix("host: ")).expect("a host");
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{host}", host.len());
    let _ = stream.write_all(answer.as_bytes()).await;
    let _ = stream.read_u8().await;
}

#[test]
fn a_proxy_is_asked_for_the_address_that_was_checked_and_never_for_a_name() {
    limited(async {
        let server = serve(answer_host).await;
        let (port, asked) = proxy().await;
        let via = Proxy::read(&format!("http://us:pw@127.0.0.1:{port}")).expect("a proxy");
        let outbound = outbound(None).with_proxy(Some(via));
        let answer = call(outbound, format!("http://shop.example:{server}/hook")).await;
        assert_eq!(answer.expect("an answer").text, format!("shop.example:{server}"));
        let asked = asked.lock().expect("no panic").join("");
        assert!(asked.starts_with(&format!("connect 127.0.0.1:{server} http/1.1")), "{asked}");
        assert!(asked.contains("proxy-authorization: basic dxm6chc="), "{asked}");
        assert!(!asked.contains("shop"), "{asked}");
    });
}

#[test]
fn a_private_address_is_not_asked_for_and_a_refusal_of_the_proxy_is_no_connection() {
    limited(async {
        let (port, asked) = proxy().await;
        let via = |port| Proxy::read(&format!("http://127.0.0.1:{port}")).ok();
        let strict = Outbound::new(Allowed::default(), None).expect("no file");
        let strict = strict.with_lookup(Arc::new(Here)).with_proxy(via(port));
        let called = call(strict, "https://rebinding.example/hook").await;
        assert_eq!(called, Err(CallError::AddressRefused));
        assert!(asked.lock().expect("no panic").is_empty());
        let refuses = serve(async |mut stream| {
            head(&mut stream).await;
            let _ = stream.write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n").await;
        })
        .await;
        let called = call(outbound(None).with_proxy(via(refuses)), "http://a.example/").await;
        assert_eq!(called, Err(CallError::NotConnected));
    });
}

#[test]
fn a_connection_that_is_never_made_ends_in_time() {
    limited(async {
        // It takes connections, and says nothing: neither as a proxy nor by TLS.
        let silent = serve(async |mut stream| while stream.read_u8().await.is_ok() {}).await;
        let via = Proxy::read(&format!("http://127.0.0.1:{silent}")).ok();
        let (proxied, encrypted) = tokio::join!(
            call(outbound(None).with_proxy(via), "http://a.example/"),
            call(outbound(None), format!("https://a.example:{silent}/")),
        );
        let expected = Err(CallError::NotConnected);
        assert_eq!((proxied, encrypted), (expected.clone(), expected));
    });
}

/// A server by TLS whose certificate is for `shop.example`, and the file of its authority.
async fn encrypted() -> (u16, std::path::PathBuf) {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_key = KeyPair::generate().expect("a key");
    let root = authority.self_signed(&authority_key).expect("a certificate");
    let issuer = Issuer::new(authority, authority_key);
    let key = KeyPair::generate().expect("a key");
    let own = CertificateParams::new(vec!["shop.example".to_owned()]).expect("a name");
    let own = own.signed_by(&key, &issuer).expect("a certificate");
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![own.der().clone()], PrivateKeyDer::from(key))
        .expect("a fitting key");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let port = serve(move |stream| {
        let acceptor = acceptor.clone();
        async move {
            if let Ok(stream) = acceptor.accept(stream).await {
                answer_host(stream).await;
            }
        }
    })
    .await;
    let file = scratch("authority").join("ca.pem");
    std::fs::write(&file, root.pem()).expect("a file");
    (port, file)
}

#[test]
fn an_authority_of_the_operator_is_trusted_for_the_names_that_it_signs() {
    limited(async {
        let (server, file) = encrypted().await;
        let (port, asked) = proxy().await;
        let shop = format!("https://shop.example:{server}/hook");
        let direct = call(outbound(Some(&file)), &shop).await.expect("an answer");
        assert_eq!(direct.text, format!("shop.example:{server}"));
        let via = Proxy::read(&format!("http://127.0.0.1:{port}")).ok();
        let proxied = call(outbound(Some(&file)).with_proxy(via), &shop).await;
        assert_eq!(proxied.expect("an answer").text, direct.text);
        assert!(asked.lock().expect("no panic")[0].starts_with("connect 127.0.0.1:"));
        // The same server under another name, and without the authority.
        let other = call(outbound(Some(&file)), shop.replace("shop", "other")).await;
        assert_eq!(other, Err(CallError::NotConnected));
        assert_eq!(call(outbound(None), &shop).await, Err(CallError::NotConnected));
    });
}
