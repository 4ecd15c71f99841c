//! Mails wait in the database until a mail server has accepted them.

use fencepost_net::mail::Mailer;
use secrecy::SecretString;
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};

use super::{Person, accounts::open_server};
use crate::harness::{Database, Stage, TestServer, free_port, fresh_database, limited};

/// A mail as a mail server got it.
struct Received {
    to: String,
    /// Headers and text.
    text: String,
}

impl Received {
    fn header(&self, name: &str) -> &str {
        let mut lines = self.text.lines();
        lines.find_map(|it| it.strip_prefix(name)?.strip_prefix(": ")).expect("the header")
    }

    fn token(&self) -> &str {
        let after = self.text.split_once("#token=").expect("a link").1;
        after.split_whitespace().next().expect("a token")
    }
}

/// A mail server that answers mails in turn: with each of `answers` once, then with 250.
async fn mail_server(
    listener: TcpListener,
    answers: &'static [&'static str],
) -> mpsc::UnboundedReceiver<Received> {
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut answers = answers.iter();
        while let Ok((stream, _)) = listener.accept().await {
            let _ = converse(stream, &mut answers, &sender).await;
        }
    });
    receiver
}

async fn converse(
    mut stream: TcpStream,
    answers: &mut impl Iterator<Item = &&'static str>,
    received: &mpsc::UnboundedSender<Received>,
) -> std::io::Result<()> {
    let (reading, mut writing) = stream.split();
    let (mut lines, mut to) = (BufReader::new(reading).lines(), String::new());
    writing.write_all(b"220 here\r\n").await?;
    while let Some(line) = lines.next_line().await? {
        if let Some(address) = line.strip_prefix("RCPT TO:<") {
            to = address.trim_end_matches('>').to_owned();
        }
        match line.split(' ').next().unwrap_or_default() {
            "DATA" => {
                writing.write_all(b"354 go on\r\n").await?;
                let mut text = String::new();
                while let Some(line) = lines.next_line().await?.filter(|it| it != ".") {
                    text.push_str(&line);
                    text.push('\n');
                }
                let text = text.replace("=\n", "").replace("=3D", "=");
                let _ = received.send(Received { to: to.clone(), text });
                let answer = answers.next().unwrap_or(&"250 accepted");
                writing.write_all(format!("{answer}\r\n").as_bytes()).await?;
            }
            "QUIT" => return writing.write_all(b"221 bye\r\n").await,
            _ => writing.write_all(b"250 go on\r\n").await?,
        }
    }
    Ok(())
}

fn stage(port: u16) -> Stage {
    let url = SecretString::from(format!("smtp://127.0.0.1:{port}"));
    let mailer = Mailer::smtp(&url, "Fencepost <no-reply@example.com>").expect("a mail server");
    Stage { mailer: Some(mailer), ..Stage::default() }
}

/// Waits until all waiting mails have been tried as often, and makes them due.
async fn make_due(database: &Database, tries: i64) {
    let tried = format!(
        "select count(*) from mails
         where sent_at is null and tries >= {tries} and next_try_at < now() + interval '50 seconds'"
    );
    database.until(&tried, 1).await;
    database.execute("update mails set next_try_at = now() where sent_at is null").await;
}

#[test]
fn mails_wait_until_a_mail_server_is_back() {
    limited(async {
        let port = free_port();
        let (server, t) = open_server(stage(port)).await;
        let ada = Person::sign_up_unverified(&t, "ada@example.com").await;
        let database = server.database.clone();
        let stored = database.text("select content from mails").await;
        assert!(!stored.contains("fp_mail_"), "no token waits: {stored}");
        make_due(&database, 1).await;
        // The node that stored it has stopped; another one sends it.
        server.stop().await;
        let listener = TcpListener::bind(("127.0.0.1", port)).await.expect("a port");
        let mut mails = mail_server(listener, &[]).await;
        let server = TestServer::start_as(database.clone(), stage(port)).await;
        database.execute("update mails set next_try_at = now() where sent_at is null").await;
        let mail = mails.recv().await.expect("a mail");
        assert_eq!(mail.to, "ada@example.com");
        assert_eq!(mail.header("Subject"), "Verify your e-mail address");
        let verify = json!({"token": mail.token()});
        let ada = Person { url: server.url.clone(), ..ada };
        ada.post("/v1/auth/verify", verify).await.is_empty(204);
        database.until("select count(*) from mails where sent_at is null", 0).await;
        let kept = "select count(*) from mails where content <> ''";
        assert_eq!(database.number(kept).await, 0, "nothing of a sent mail is kept");
        server.stop().await;
    });
}

#[test]
fn a_mail_is_tried_again_as_the_same_unless_the_server_refuses_it() {
    limited(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        // What the operator can correct is not final.
        let answers = &[
            "451 try later",
            "550 5.7.1 not from this sender",
            "250 accepted",
            "550 5.1.1 no such mailbox",
        ];
        let mut mails = mail_server(listener, answers).await;
        let server = TestServer::start_as(fresh_database().await, stage(port)).await;
        let t = server.project("test").await;
        Person::sign_up_unverified(&t, "ada@example.com").await;
        let first = mails.recv().await.expect("a mail");
        make_due(&server.database, 1).await;
        let second = mails.recv().await.expect("a mail");
        make_due(&server.database, 2).await;
        let third = mails.recv().await.expect("a mail");
        let ids = [&first, &second, &third].map(|it| it.header("Message-ID"));
        assert!(ids.iter().all(|it| *it == ids[0]), "{ids:?}");
        server.database.until("select count(*) from mails where sent_at is null", 0).await;
        Person::sign_up_unverified(&t, "eve@example.com").await;
        assert_eq!(mails.recv().await.expect("a mail").to, "eve@example.com");
        server.database.until("select count(*) from mails where sent_at is null", 0).await;
        let tries = "select sum(tries) from mails where account_id is not null";
        assert_eq!(server.database.number(tries).await, 4, "three for ada, one for eve");
        server.stop().await;
    });
}
