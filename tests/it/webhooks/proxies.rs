//! Calls by way of the operator's proxy, and by TLS with an authority of the operator's.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use fencepost_domain::outbound::Allowed;
use fencepost_net::outbound::{Answer, CallError, Outbound, Proxy};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use reqwest::header::HeaderMap;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::TcpStream,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, pki_types::PrivateKeyDer},
};

use super::destinations::{Changing, server};
use crate::harness::{limited, scratch};

const HERE: &str = "127.0.0.1";
const PUBLIC: &str = "8.8.8.8";
/// Longer than any connection may take to be made.
const PATIENT: Duration = Duration::from_secs(20);

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
    let (port, _) = server(move |mut stream| {
        let notes = Arc::clone(&notes);
        async move {
            let request = head(&mut stream).await;
            notes.lock().expect("no panic").push(request.clone());
            // All servers are on this machine, wherever their names lead.
            let place = request.split(' ').nth(1).expect("a place");
            let port = place.rsplit(':').next().expect("a port").parse().expect("a number");
            let mut target = TcpStream::connect((HERE, port)).await.expect("a server");
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.expect("an open connection");
            let _ = copy_bidirectional(&mut stream, &mut target).await;
        }
    })
    .await;
    (port, asked)
}

/// To servers of this machine.
fn outbound(authorities: Option<&Path>) -> Outbound {
    let here = Allowed::from(vec!["127.0.0.1/32".parse().expect("a network")]);
    Outbound::new(here, authorities).expect("a file").with_lookup(Arc::new(Changing::to(HERE)))
}

/// To the public internet, through a proxy on this port.
fn proxied(at: &str, authorities: Option<&Path>, port: u16) -> Outbound {
    let public = Outbound::new(Allowed::default(), authorities).expect("a file");
    let proxy = Proxy::read(&format!("http://us:pw@{HERE}:{port}")).expect("a proxy");
    public.with_lookup(Arc::new(Changing::to(at))).with_proxy(Some(proxy))
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
        let server = server(answer_host).await.0;
        let (port, asked) = proxy().await;
        for (at, place) in [(PUBLIC, PUBLIC), ("2606:4700::1111", "[2606:4700::1111]")] {
            let url = format!("http://shop.example:{server}/hook");
            let answer = call(proxied(at, None, port), url).await;
            assert_eq!(answer.expect("an answer").text, format!("shop.example:{server}"));
            let asked = asked.lock().expect("no panic").pop().expect("a request");
            assert!(asked.starts_with(&format!("connect {place}:{server} http/1.1")), "{asked}");
            assert!(asked.contains("proxy-authorization: basic dxm6chc="), "{asked}");
            assert!(!asked.contains("shop"), "{asked}");
        }
        // Networks that the operator allows are not behind the proxy.
        let via = Proxy::read(&format!("http://{HERE}:{port}")).ok();
        let direct = call(outbound(None).with_proxy(via), format!("http://a.example:{server}/"));
        assert_eq!(direct.await.expect("an answer").status, 200);
        assert!(asked.lock().expect("no panic").is_empty());
    });
}

#[test]
fn the_proxy_gets_no_private_address_and_its_refusal_counts_as_not_connected() {
    limited(async {
        let (port, asked) = proxy().await;
        let called = call(proxied(HERE, None, port), "https://rebinding.example/hook").await;
        assert_eq!(called, Err(CallError::AddressRefused));
        assert!(asked.lock().expect("no panic").is_empty());
        let long = format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(100_000));
        for answer in ["HTTP/1.1 403 Forbidden\r\n\r\n", "HTTP/1.1 407 No\r\n\r\n", "", &long] {
            let answer = answer.to_owned();
            let refuses = server(move |mut stream| {
                let answer = answer.clone();
                async move {
                    head(&mut stream).await;
                    let _ = stream.write_all(answer.as_bytes()).await;
                }
            });
            let called = call(proxied(PUBLIC, None, refuses.await.0), "http://a.example/").await;
            assert_eq!(called, Err(CallError::NotConnected));
        }
    });
}

#[test]
fn a_connection_that_is_never_made_ends_in_time() {
    limited(async {
        // It takes connections, and says nothing: neither as a proxy nor by TLS.
        let (silent, _) = server(async |mut stream| while stream.read_u8().await.is_ok() {}).await;
        let (by_proxy, encrypted) = tokio::join!(
            call(proxied(PUBLIC, None, silent), "http://a.example/"),
            call(outbound(None), format!("https://a.example:{silent}/")),
        );
        let expected = Err(CallError::NotConnected);
        assert_eq!((by_proxy, encrypted), (expected.clone(), expected));
    });
}

/// A server by TLS whose certificate is for `shop.example`, and the file of its authority.
async fn encrypted() -> (u16, PathBuf) {
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
    let (port, _) = server(move |stream| {
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
        let by_proxy = call(proxied(PUBLIC, Some(&file), port), &shop).await;
        assert_eq!(by_proxy.expect("an answer").text, direct.text);
        assert!(asked.lock().expect("no panic")[0].starts_with("connect 8.8.8.8:"));
        // The same server under another name, and without the authority.
        let other = call(outbound(Some(&file)), shop.replace("shop", "other")).await;
        assert_eq!(other, Err(CallError::NotConnected));
        assert_eq!(call(outbound(None), &shop).await, Err(CallError::NotConnected));
    });
}
