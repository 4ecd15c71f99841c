//! Mail servers: one mail is handed over, and the server's answer returned. Mails wait in the
//! database until they are; see `accounts/mailing.rs`. Nothing here logs a mail's content.

use std::{io::Write, sync::Arc, time::Duration};

use anyhow::Context;
use lettre::{
    AsyncSmtpTransport, AsyncTransport, Message, Tokio1Executor,
    message::{Mailbox, header::ContentType},
};
use secrecy::{ExposeSecret, SecretString};
use tokio::sync::mpsc;

/// Timeout of a conversation with the server.
pub const SEND_TIMEOUT: Duration = Duration::from_secs(20);
/// Enhanced status codes (RFC 3463) by which a server refuses a recipient for good. Others blame
/// the sender or the settings, which an operator can correct.
const REFUSALS: [&str; 5] = ["5.1.1", "5.1.2", "5.1.3", "5.1.6", "5.2.1"];

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

/// The outcome of a mail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Sent,
    Printed,
    /// For good.
    Refused,
    /// A further try may help.
    Failed,
    /// The subject of the mail is gone.
    NotNeeded,
}

impl Outcome {
    /// Its name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sent => "sent",
            Self::Printed => "printed",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::NotNeeded => "not_needed",
        }
    }
}

/// Where mail is sent.
#[derive(Clone)]
pub enum Mailer {
    Smtp(Arc<Smtp>),
    Print,
    /// To a receiver in the process.
    Hand(mpsc::UnboundedSender<Mail>),
    Nowhere,
}

/// A mail server.
pub struct Smtp {
    transport: AsyncSmtpTransport<Tokio1Executor>,
    from: Mailbox,
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
        Ok(Self::Smtp(Arc::new(Smtp { transport, from })))
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

    /// Hands over one mail. By its id, receivers find that two are the same.
    pub async fn hand_over(&self, id: &str, mail: Mail) -> Outcome {
        match self {
            Self::Smtp(smtp) => smtp.hand_over(id, mail).await,
            Self::Print => {
                let Mail { to, subject, text } = mail;
                let mut out = std::io::stdout().lock();
                let _ = writeln!(out, "\n--- mail to {to}: {subject}\n{text}\n---");
                Outcome::Printed
            }
            Self::Hand(sender) => match sender.send(mail) {
                Ok(()) => Outcome::Sent,
                Err(_) => Outcome::Failed,
            },
            Self::Nowhere => Outcome::Failed,
        }
    }
}

impl Smtp {
    async fn hand_over(&self, id: &str, mail: Mail) -> Outcome {
        let Ok(message) = self.write(id, mail) else { return Outcome::Refused };
        // The transport's timeout is one of each step of the conversation.
        let sent = tokio::time::timeout(SEND_TIMEOUT, self.transport.send(message)).await;
        let Ok(sent) = sent else {
            tracing::warn!("the mail server did not answer in time");
            return Outcome::Failed;
        };
        match sent {
            Ok(_) => Outcome::Sent,
            Err(error) => {
                // The server's message may name the recipient: it is not logged.
                let status = error.status().map(u16::from);
                tracing::warn!(smtp.status = status, "mail was not accepted");
                let message = fencepost_domain::error::chain(&error);
                let mut words = message.split(|it: char| it.is_whitespace() || it == '-');
                match error.is_permanent() && words.any(|it| REFUSALS.contains(&it)) {
                    true => Outcome::Refused,
                    false => Outcome::Failed,
                }
            }
        }
    }

    fn write(&self, id: &str, mail: Mail) -> anyhow::Result<Message> {
        let domain = self.from.email.domain();
        Ok(Message::builder()
            .message_id(Some(format!("<{id}@{domain}>")))
            .from(self.from.clone())
            .to(mail.to.parse()?)
            .subject(mail.subject)
            .header(ContentType::TEXT_PLAIN)
            .body(mail.text)?)
    }
}
