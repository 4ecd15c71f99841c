//! Mail: sent over SMTP in the background, with retries, and counted. Never delays a request, and
//! never logs a mail's content.

use std::{io::Write, time::Duration};

use anyhow::Context;
use lettre::{
    AsyncSmtpTransport, AsyncTransport, Message, Tokio1Executor,
    message::{Mailbox, header::ContentType},
};
use metrics::counter;
use secrecy::{ExposeSecret, SecretString};
use tokio::sync::mpsc;

use crate::telemetry;

/// Mails that may wait; more are dropped, and counted.
const MAX_WAITING_MAILS: usize = 1_000;
/// Tries of a mail.
const MAX_TRIES: u32 = 4;
/// The pause after the first try; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
/// Timeout of a conversation with the server.
const SEND_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Clone, PartialEq, Eq)]
pub struct Mail {
    pub to: String,
    pub subject: String,
    pub text: String,
}

impl std::fmt::Debug for Mail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // It may hold a secret, and personal data.
        f.debug_struct("Mail").field("subject", &self.subject).finish_non_exhaustive()
    }
}

/// Where mail is sent.
#[derive(Clone)]
pub enum Mailer {
    Smtp(mpsc::Sender<Mail>),
    Print,
    /// To a receiver in the process.
    Hand(mpsc::UnboundedSender<Mail>),
    Nowhere,
}

impl Mailer {
    /// Mail through the server at `url`, such as `smtps://user:password@host`, from an address such
    /// as `Fencepost <no-reply@example.com>`.
    ///
    /// # Errors
    /// When one of them cannot be read.
    pub fn smtp(url: &SecretString, from: &str) -> anyhow::Result<Self> {
        let from: Mailbox = from.parse().context("the sender's address is invalid")?;
        let transport = AsyncSmtpTransport::<Tokio1Executor>::from_url(url.expose_secret())
            .map_err(|_| anyhow::anyhow!("the URL of the mail server is invalid"))?
            .timeout(Some(SEND_TIMEOUT))
            .build();
        let (sender, receiver) = mpsc::channel(MAX_WAITING_MAILS);
        tokio::spawn(deliver(transport, from, receiver));
        Ok(Self::Smtp(sender))
    }

    /// Whether mail is sent.
    #[must_use]
    pub fn is_used(&self) -> bool {
        !matches!(self, Self::Nowhere)
    }

    /// Whether mail reaches other people.
    #[must_use]
    pub fn reaches_others(&self) -> bool {
        matches!(self, Self::Smtp(_) | Self::Hand(_))
    }

    /// Sends a mail in the background.
    pub fn send(&self, mail: Mail) {
        let outcome = match self {
            Self::Smtp(sender) => match sender.try_send(mail) {
                Ok(()) => return,
                Err(_) => "dropped",
            },
            Self::Print => {
                let Mail { to, subject, text } = mail;
                let mut out = std::io::stdout().lock();
                let _ = writeln!(out, "\n--- mail to {to}: {subject}\n{text}\n---");
                "printed"
            }
            Self::Hand(sender) => match sender.send(mail) {
                Ok(()) => "sent",
                Err(_) => "dropped",
            },
            Self::Nowhere => "dropped",
        };
        counter!(telemetry::MAILS, "outcome" => outcome).increment(1);
    }
}

async fn deliver(
    transport: AsyncSmtpTransport<Tokio1Executor>,
    from: Mailbox,
    mut mails: mpsc::Receiver<Mail>,
) {
    while let Some(mail) = mails.recv().await {
        let outcome = match write(&from, mail) {
            Ok(message) => hand_over(&transport, message).await,
            Err(_) => "dropped",
        };
        counter!(telemetry::MAILS, "outcome" => outcome).increment(1);
    }
}

fn write(from: &Mailbox, mail: Mail) -> anyhow::Result<Message> {
    Ok(Message::builder()
        .from(from.clone())
        .to(mail.to.parse()?)
        .subject(mail.subject)
        .header(ContentType::TEXT_PLAIN)
        .body(mail.text)?)
}

async fn hand_over(
    transport: &AsyncSmtpTransport<Tokio1Executor>,
    message: Message,
) -> &'static str {
    let mut pause = FIRST_PAUSE;
    for tried in 1..=MAX_TRIES {
        match transport.send(message.clone()).await {
            Ok(_) => return "sent",
            Err(error) => {
                // The server's message may name the recipient.
                let (code, is_permanent) =
                    (error.status().map(|it| it.to_string()), error.is_permanent());
                tracing::warn!(smtp.code = code, is_permanent, tried, "mail was not accepted");
                if is_permanent {
                    return "failed";
                }
            }
        }
        if tried < MAX_TRIES {
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }
    "failed"
}
