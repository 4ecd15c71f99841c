//! The certificates that servers show.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, bail, ensure};
use reqwest::{redirect::Policy, tls::TlsInfo};
use rustls::{
    ClientConfig, DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::CryptoProvider,
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;
use x509_parser::parse_x509_certificate;

/// Longest time for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The request by which a client of PostgreSQL begins TLS: its length, and its code.
const POSTGRES_TLS_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];
/// The answer of a PostgreSQL that begins TLS.
const POSTGRES_AGREES: u8 = b'S';

/// The way in which a server begins TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begins {
    AtOnce,
    AsPostgres,
}

/// When the certificate of a URL expires, since 1970; none, if the URL is not `https`.
///
/// # Errors
/// When it is not valid, or nothing answers.
pub(super) async fn expiry(url: &str) -> anyhow::Result<Option<Duration>> {
    if !url.starts_with("https://") {
        return Ok(None);
    }
    let client = reqwest::Client::builder().timeout(ANSWER_TIMEOUT).tls_info(true);
    // The answer to a redirect would show the certificate of another host.
    let client = client.redirect(Policy::none()).build()?;
    let answer = client.head(url).send().await?;
    let shown = answer.extensions().get::<TlsInfo>().and_then(TlsInfo::peer_certificate);
    expiry_of(shown.context("it shows no certificate")?).map(Some)
}

/// When the certificate that a PostgreSQL or Redis server shows expires; none, if it has no TLS.
/// Whether the certificate is valid is the affair of those that send it a password: this sends
/// nothing.
///
/// # Errors
/// When nothing answers.
pub(super) async fn expiry_of_server(
    host: &str,
    port: u16,
    begins: Begins,
) -> anyhow::Result<Option<Duration>> {
    timeout(ANSWER_TIMEOUT, shown_by(host, port, begins)).await.context("no answer")?
}

async fn shown_by(host: &str, port: u16, begins: Begins) -> anyhow::Result<Option<Duration>> {
    let mut stream = TcpStream::connect((host, port)).await?;
    if begins == Begins::AsPostgres {
        stream.write_all(&POSTGRES_TLS_REQUEST).await?;
        if stream.read_u8().await? != POSTGRES_AGREES {
            return Ok(None);
        }
    }
    let Some(provider) = CryptoProvider::get_default().cloned() else { bail!("no cryptography") };
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Reader(provider)))
        .with_no_client_auth();
    let name = ServerName::try_from(host.to_owned())?;
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
    ensure!(!shown.is_empty(), "it shows no certificate");
    expiry_of(&shown[0]).map(Some)
}

/// Servers of a Redis URL that speak TLS; none, if it has another scheme.
pub(super) fn tls_hosts(url: &str) -> Vec<(String, u16)> {
    let Some((scheme, rest)) = url.split_once("://") else { return Vec::new() };
    let default_port = match scheme {
        "rediss" | "rediss+cluster" => 6_379,
        "rediss+sentinel" => 26_379,
        _ => return Vec::new(),
    };
    let hosts = rest.rsplit_once('@').map_or(rest, |it| it.1);
    let hosts = hosts.split(['/', '?']).next().unwrap_or_default();
    let read = |text: &str| {
        let named = text.rsplit_once(':').filter(|(_, port)| !port.ends_with(']'));
        let (host, port) = named.unwrap_or((text, ""));
        (host.trim_matches(['[', ']']).to_owned(), port.parse().unwrap_or(default_port))
    };
    hosts.split(',').map(read).collect()
}

fn expiry_of(certificate: &[u8]) -> anyhow::Result<Duration> {
    let (_, certificate) =
        parse_x509_certificate(certificate).context("its certificate cannot be read")?;
    let seconds = certificate.validity().not_after.timestamp();
    Ok(Duration::from_secs(u64::try_from(seconds).unwrap_or(0)))
}

/// Takes any certificate: it is read, and nothing is sent.
#[derive(Debug)]
struct Reader(Arc<CryptoProvider>);

impl ServerCertVerifier for Reader {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use rustls::{ServerConfig, pki_types::PrivateKeyDer};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    /// A server that answers the request for TLS with this byte, if it waits for one, and shows a
    /// new certificate. Returns its port.
    async fn server(answer: Option<u8>) -> u16 {
        fencepost_net::tls::install();
        let made =
            rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("it is made");
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).expect("a key");
        let config = ServerConfig::builder().with_no_client_auth();
        let config = config.with_single_cert(vec![made.cert.der().clone()], key).expect("it fits");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            if let Some(answer) = answer {
                let mut asked = [0; 8];
                stream.read_exact(&mut asked).await.expect("a request");
                // SSLRequest, as PostgreSQL's manual has it: the length, and 80877103.
                assert_eq!(asked, [[0, 0, 0, 8], 80_877_103_u32.to_be_bytes()].concat()[..]);
                stream.write_all(&[answer]).await.expect("it is sent");
            }
            let _ = TlsAcceptor::from(Arc::new(config)).accept(stream).await;
        });
        port
    }

    #[tokio::test]
    async fn the_certificate_of_a_server_is_read_if_it_has_one() {
        /// Certificates of `rcgen` end with the year 4095.
        const END: Duration = Duration::from_secs(67_090_118_400);
        for (answer, begins) in [(None, Begins::AtOnce), (Some(b'S'), Begins::AsPostgres)] {
            let end = expiry_of_server("127.0.0.1", server(answer).await, begins).await;
            let end = end.expect("an answer").expect("a certificate");
            assert_eq!(end, END);
        }
        let refuses = server(Some(b'N')).await;
        let end = expiry_of_server("127.0.0.1", refuses, Begins::AsPostgres).await;
        assert!(end.expect("an answer").is_none());
        assert!(expiry_of_server("127.0.0.1", 1, Begins::AtOnce).await.is_err());
    }

    #[test]
    fn servers_of_a_redis_url_with_tls_are_found() {
        let hosts = |url| -> Vec<_> {
            tls_hosts(url).into_iter().map(|(host, port)| format!("{host} {port}")).collect()
        };
        assert_eq!(hosts("rediss://user:p@ss@redis.example.com/0"), ["redis.example.com 6379"]);
        assert_eq!(
            hosts("rediss+cluster://[::1]:7000,10.0.0.2:7001"),
            ["::1 7000", "10.0.0.2 7001"]
        );
        assert_eq!(hosts("rediss+sentinel://:p@a,b:1/master"), ["a 26379", "b 1"]);
        assert_eq!(hosts("rediss://[::1]"), ["::1 6379"]);
        for other in ["redis://a", "redis+unix:///tmp/socket", ""] {
            assert!(hosts(other).is_empty(), "{other}");
        }
    }
}
