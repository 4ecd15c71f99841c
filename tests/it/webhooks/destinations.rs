//! Where webhooks must not go: hostile URLs, addresses that change, and servers that misbehave.

use std::{
    collections::VecDeque,
    fmt, io,
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use fencepost_domain::outbound::{Allowed, is_public, read_url};
use fencepost_net::outbound::{Answer, CallError, Lookup, Outbound};
use reqwest::header::HeaderMap;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::harness::limited;

/// IPv4 addresses that are not on the public internet: first, last and middle ones of each network.
const PRIVATE_V4: [&str; 41] = [
    "168.63.129.16",
    "0.0.0.0",
    "0.255.255.255",
    "10.0.0.1",
    "10.255.255.255",
    "100.64.0.1",
    "100.127.255.254",
    "127.0.0.1",
    "127.1.2.3",
    "127.255.255.255",
    "169.254.0.1",
    "169.254.169.254",
    "169.254.170.2",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.1",
    "192.0.0.192",
    "192.0.2.1",
    "192.31.196.1",
    "192.88.99.1",
    "192.168.0.1",
    "192.168.255.255",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "100.100.100.200",
    "10.96.0.1",
    "172.17.0.1",
    "172.20.0.10",
    "192.168.65.2",
    "169.254.1.1",
    "127.0.0.53",
    "100.64.0.0",
    "198.18.0.0",
    "172.16.0.0",
    "240.0.0.0",
];
/// The same of IPv6, with those that lead to an IPv4 address.
const PRIVATE_V6: [&str; 28] = [
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:8.8.8.8",
    "::127.0.0.1",
    "::8.8.8.8",
    "64:ff9b::7f00:1",
    "64:ff9b::8.8.8.8",
    "64:ff9b:1::a00:1",
    "100::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:2::1",
    "2001:10::1",
    "2001:20::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:808:808::1",
    "3fff::1",
    "fc00::1",
    "fd00:ec2::254",
    "fdff::1",
    "fe80::1",
    "fec0::1",
    "ff02::1",
    "5f00::1",
];
/// Addresses that are on it, beside the ones above.
const PUBLIC: [&str; 14] = [
    "1.1.1.1",
    "8.8.8.8",
    "9.255.255.255",
    "11.0.0.0",
    "100.63.255.255",
    "100.128.0.0",
    "126.255.255.255",
    "128.0.0.1",
    "172.15.255.255",
    "172.32.0.0",
    "223.255.255.255",
    "2606:4700::1111",
    "2001:4860:4860::8888",
    "2a00:1450::1",
];

/// Other notations of addresses that are not public, and hosts that stand for them.
const NOTATIONS: [&str; 34] = [
    "2130706433",
    "017700000001",
    "0x7f000001",
    "0x7f.1",
    "127.1",
    "127.0.1",
    "0177.0.0.1",
    "0x7f.0.0.1",
    "127.0.0.1.",
    "0",
    "0.0",
    "00000000",
    "0x0",
    "2852039166",
    "0xa9fea9fe",
    "0251.0376.0251.0376",
    "169.16689662",
    "0xA9.0xFE.0xA9.0xFE",
    "[::]",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::ffff:7f00:1]",
    "[::ffff:127.0.0.1]",
    "[0:0:0:0:0:ffff:7f00:1]",
    "[64:ff9b::7f00:1]",
    "[fd00:ec2::254]",
    "[fe80::1]",
    "localhost",
    "LOCALHOST",
    "intranet",
    "metadata",
    "１２７.０.０.１",
    "①②⑦.⓪.⓪.①",
    "127。0。0。1",
];

/// URLs that break another rule.
const HOSTILE: [&str; 45] = [
    "https://example..com/hook",
    "",
    " ",
    "x",
    "//example.com",
    "example.com/hook",
    "/hook",
    "http://example.com/",
    "HTTP://example.com/",
    "ftp://example.com/",
    "file:///etc/passwd",
    "gopher://example.com/",
    "ws://example.com/",
    "wss://example.com/",
    "data:text/plain,x",
    "javascript:alert(1)",
    "mailto:a@example.com",
    "unix:/run/docker.sock",
    "https://",
    "https:///hook",
    "https://:443/",
    "https://user@example.com/",
    "https://user:password@example.com/",
    "https://example.com@10.0.0.1/",
    "https://:secret@example.com/",
    "https://example.com/#part",
    "https://example.com/#",
    "https://example.com:22/",
    "https://example.com:25/",
    "https://example.com:80/",
    "https://example.com:1023/",
    "https://example.com:0/",
    "https://example.com:2375/",
    "https://example.com:3306/",
    "https://example.com:5432/",
    "https://example.com:6379/",
    "https://example.com:11211/",
    "https://example.com:27017/",
    "https://example.com:65536/",
    "https://example.com:-1/",
    "https://exa mple.com/",
    "https://example.com/a\r\nHost: x",
    "https://example.com/a\tb",
    "https://[::1/",
    "https://example.com/\u{0}",
];

#[test]
fn no_private_address_is_taken_for_a_public_one() {
    let read = |it: &&str| it.parse::<IpAddr>().unwrap_or_else(|_| panic!("{it}"));
    for address in PRIVATE_V4.iter().chain(&PRIVATE_V6) {
        assert!(!is_public(read(address)), "{address}");
    }
    for address in &PUBLIC {
        assert!(is_public(read(address)), "{address}");
    }
}

#[test]
fn no_hostile_url_is_stored() {
    let none = Allowed::default();
    let bare_v4 = PRIVATE_V4.iter().map(|it| format!("https://{it}/hook"));
    let bare_v6 = PRIVATE_V6.iter().map(|it| format!("https://[{it}]/hook"));
    let with_port = PRIVATE_V4.iter().map(|it| format!("https://{it}:8443/hook"));
    let notations = NOTATIONS.iter().map(|it| format!("https://{it}/hook"));
    let hostile = HOSTILE.iter().map(|it| (*it).to_owned());
    let long = format!("https://example.com/{}", "x".repeat(2_048));
    let all = bare_v4.chain(bare_v6).chain(with_port).chain(notations).chain(hostile).chain([long]);
    let all: Vec<_> = all.collect();
    assert!(all.len() >= 180, "{}", all.len());
    for url in all {
        assert!(read_url(&url, &none).is_err(), "{url:?} is accepted");
    }
    for url in [
        "https://example.com",
        "https://example.com/hook?token=abc",
        "https://example.com:8443/",
        "https://8.8.8.8/hook",
        "https://[2606:4700::1111]/",
        "https://bücher.example/",
    ] {
        assert!(read_url(url, &none).is_ok(), "{url}");
    }
}

#[test]
fn a_network_that_the_operator_allows_may_be_called_also_by_http() {
    let allowed = Allowed::from(vec!["10.1.0.0/16".parse().expect("a network")]);
    assert!(read_url("http://10.1.2.3:80/hook", &allowed).is_ok());
    assert!(read_url("https://10.1.2.3/hook", &allowed).is_ok());
    for url in ["http://10.2.0.1/", "http://localhost/", "http://example.com/", "ftp://10.1.2.3/"] {
        assert!(read_url(url, &allowed).is_err(), "{url}");
    }
}

#[test]
fn a_public_network_that_the_operator_denies_is_not_called() {
    let allowed = Allowed {
        networks: vec!["10.1.0.0/16".parse().expect("a network")],
        denied: vec!["8.8.8.0/24".parse().expect("one"), "10.1.2.3/32".parse().expect("one")],
    };
    for url in ["https://8.8.8.8/hook", "https://10.1.2.3/hook", "http://10.1.2.3/"] {
        assert!(read_url(url, &allowed).is_err(), "{url}");
    }
    for url in ["https://8.8.4.4/hook", "http://10.1.2.4/hook", "https://example.com/"] {
        assert!(read_url(url, &allowed).is_ok(), "{url}");
    }
}

/// Answers with the next of these addresses, and in the end always with the last.
pub(super) struct Changing(Mutex<VecDeque<Vec<IpAddr>>>);

impl Changing {
    /// Answers with one address.
    pub(super) fn to(address: &str) -> Self {
        Self(Mutex::new([addresses(&[address])].into()))
    }
}

impl fmt::Debug for Changing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Changing")
    }
}

impl Lookup for Changing {
    fn addresses(
        &self,
        _: String,
    ) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>> {
        let mut next = self.0.lock().expect("no panic");
        let found = if next.len() > 1 { next.pop_front() } else { next.front().cloned() };
        Box::pin(async move { Ok(found.unwrap_or_default()) })
    }
}

fn addresses(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|it| it.parse().expect("an address")).collect()
}

/// A server that counts connections, and does one thing with each.
pub(super) async fn server<F: Future<Output = ()> + Send + 'static>(
    behaves: impl Fn(TcpStream) -> F + Send + 'static,
) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            counted.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(behaves(stream));
        }
    });
    (port, count)
}

#[test]
fn a_host_with_one_address_that_is_not_public_is_never_connected_to() {
    limited(async {
        let (port, connections) = server(async |_| ()).await;
        let cases: [&[&[&str]]; 5] = [
            &[&["127.0.0.1"]],
            &[&["8.8.8.8", "127.0.0.1"]],
            &[&["::ffff:127.0.0.1"]],
            // The look-up of the connection finds another address than the one before it.
            &[&["169.254.169.254"], &["8.8.8.8"]],
            &[&[]],
        ];
        for answers in cases {
            let answers = answers.iter().map(|it| addresses(it)).collect();
            let lookup = Arc::new(Changing(Mutex::new(answers)));
            let outbound = Outbound::new(Allowed::default(), None).expect("no file");
            let url = format!("https://rebinding.example:{port}/hook").parse().expect("a URL");
            let to = outbound.with_lookup(lookup).destination(url);
            let called =
                to.post(HeaderMap::new(), "{}".to_owned(), Duration::from_secs(5), 1024).await;
            let error = called.expect_err("refused");
            assert!(
                [CallError::AddressRefused, CallError::NoAddress].contains(&error),
                "{error:?}"
            );
        }
        assert_eq!(connections.load(Ordering::SeqCst), 0);
    });
}

/// What a call to a server of this machine ends with.
async fn call(port: u16, within: Duration) -> Result<Answer, CallError> {
    let here = Allowed::from(vec!["127.0.0.1/32".parse().expect("a network")]);
    let outbound = Outbound::new(here, None).expect("no file");
    let url = format!("http://127.0.0.1:{port}/hook").parse().expect("a URL");
    let to = outbound.destination(url);
    to.post(HeaderMap::new(), "{}".to_owned(), within, 1024).await
}

/// Reads a request, answers with these bytes, and waits for the other side to leave.
async fn says(mut stream: TcpStream, answer: Vec<u8>) {
    let mut head = [0; 4096];
    let _ = stream.read(&mut head).await;
    let _ = stream.write_all(&answer).await;
    let _ = stream.read(&mut head).await;
}

const QUICK: Duration = Duration::from_secs(10);

#[test]
fn what_a_server_answers_is_bounded() {
    limited(async {
        let answers: [(String, CallError); 8] = [
            ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n".to_owned() + "abc", CallError::Timeout),
            ("not HTTP at all\r\n\r\n".to_owned(), CallError::Broken),
            (
                format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(20_000)),
                CallError::HeadersTooLarge,
            ),
            // More than is read ahead.
            (
                format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(200_000)),
                CallError::HeadersTooLarge,
            ),
            ("HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n".to_owned(), CallError::Broken),
            ("HTTP/1.1 999999 OK\r\n\r\n".to_owned(), CallError::Broken),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".to_owned(),
                CallError::Broken,
            ),
            (String::new(), CallError::Timeout),
        ];
        for (answer, expected) in answers {
            let bytes = answer.clone().into_bytes();
            let (port, _) = server(move |stream| says(stream, bytes.clone())).await;
            let within = match expected {
                CallError::Timeout => Duration::from_millis(300),
                _ => QUICK,
            };
            assert_eq!(call(port, within).await, Err(expected), "{answer:.60}");
        }
    });
}

#[test]
fn a_body_without_an_end_is_read_to_its_bound() {
    limited(async {
        let (port, _) = server(async |mut stream| {
            let mut head = [0; 4096];
            let _ = stream.read(&mut head).await;
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
            while stream.write_all(&[b'x'; 4096]).await.is_ok() {}
        })
        .await;
        let answer = call(port, QUICK).await.expect("an answer");
        assert_eq!((answer.status, answer.text.len()), (200, 1024));
    });
}

#[test]
fn a_server_that_answers_a_byte_at_a_time_is_left_in_time() {
    limited(async {
        let (port, _) = server(async |mut stream| {
            let mut head = [0; 4096];
            let _ = stream.read(&mut head).await;
            for byte in b"HTTP/1.1 200 OK\r\nX-Slow: ".iter().chain(std::iter::repeat(&b'x')) {
                if stream.write_all(&[*byte]).await.is_err() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        let begun = Instant::now();
        assert_eq!(call(port, Duration::from_millis(500)).await, Err(CallError::Timeout));
        assert!(begun.elapsed() < Duration::from_secs(3));
    });
}

#[test]
fn a_redirect_leads_nowhere_and_a_closed_port_is_reported() {
    limited(async {
        let (private, connections) = server(async |_| ()).await;
        for status in ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"]
        {
            let answer = format!(
                "HTTP/1.1 {status}\r\nLocation: http://127.0.0.1:{private}/latest/meta-data\r\n\
                 Content-Length: 0\r\n\r\n"
            );
            let (port, _) = server(move |stream| says(stream, answer.clone().into_bytes())).await;
            let answer = call(port, QUICK).await.expect("an answer");
            assert_eq!(answer.status.to_string(), status[..3]);
        }
        assert_eq!(connections.load(Ordering::SeqCst), 0);
        let closed = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = closed.local_addr().expect("an address").port();
        drop(closed);
        assert_eq!(call(port, QUICK).await, Err(CallError::NotConnected));
    });
}

#[test]
fn a_server_without_a_certificate_for_the_host_is_not_spoken_to() {
    limited(async {
        let (port, connections) =
            server(|stream| says(stream, b"HTTP/1.1 200 OK\r\n\r\n".to_vec())).await;
        let here = Allowed::from(vec!["127.0.0.1/32".parse().expect("a network")]);
        let outbound = Outbound::new(here, None).expect("no file");
        let url = format!("https://127.0.0.1:{port}/hook").parse().expect("a URL");
        let to = outbound.destination(url);
        let called = to.post(HeaderMap::new(), "secret".to_owned(), QUICK, 1024).await;
        assert_eq!(called, Err(CallError::NotConnected));
        assert_eq!(connections.load(Ordering::SeqCst), 1, "it was tried");
    });
}
