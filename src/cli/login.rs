//! `fencepost login` and `fencepost logout`: a server and its key are kept for later commands.

use std::{
    io::{IsTerminal, Write},
    time::Duration,
};

use anyhow::{Context, bail};
use clap::Args;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{api::printable, words::word};
use crate::client::{
    Client, ClientArgs, Failure,
    profile::{self, Profile, Profiles},
};

/// The name of a login's key, at a host.
const KEY_NAME: &str = "cli";
/// Characters of the host's name in it.
const MAX_HOST_CHARS: usize = 36;
/// The longest pause between two requests for the key, in seconds.
const MAX_INTERVAL_SECONDS: u64 = 60;
/// The longest wait for an approval, in seconds.
const MAX_WAIT_SECONDS: u64 = 3_600;
/// Advice about a key that a profile had.
const REVOKE: &str = "its key stays live: revoke it in the console.";

/// Options of `login`.
#[derive(Debug, Args)]
pub struct LoginArgs {
    /// The server
    #[arg(long, env = "FENCEPOST_URL", value_name = "URL")]
    url: String,

    /// Name of the profile
    #[arg(long, env = "FENCEPOST_PROFILE", value_name = "NAME", default_value = profile::DEFAULT)]
    profile: String,

    /// Read a key from standard input, in place of logging in
    #[arg(long)]
    with_key: bool,
}

/// Options of `logout`.
#[derive(Debug, Args)]
pub struct LogoutArgs {
    /// Name of the profile
    #[arg(long, env = "FENCEPOST_PROFILE", value_name = "NAME", default_value = profile::DEFAULT)]
    profile: String,
}

/// Gets a key, and keeps it.
pub async fn login(args: LoginArgs) -> anyhow::Result<()> {
    let mut err = std::io::stderr();
    // Fail before a key is created if the file of profiles cannot be read.
    Profiles::read()?;
    let api_key = if args.with_key { read_key(&args.url).await? } else { ask(&args.url).await? };
    let mut profiles = Profiles::read()?;
    if profiles.get(&args.profile).is_some() {
        writeln!(err, "It replaces the profile {} that was there; {REVOKE}", args.profile)?;
    }
    let url = args.url.trim_end_matches('/').to_owned();
    profiles.set(args.profile.clone(), Profile { url, api_key });
    let path = profiles.write().context("the key is live, but is not kept: revoke it")?;
    writeln!(err, "The profile {} is kept in {}.", args.profile, path.display())?;
    Ok(())
}

/// Reads a key, and checks it.
async fn read_key(url: &str) -> anyhow::Result<String> {
    let mut err = std::io::stderr();
    let api_key = if std::io::stdin().is_terminal() {
        writeln!(err, "Create a key in the console of {url}, under API keys.")?;
        rpassword::prompt_password("Key: ")?
    } else {
        std::io::read_to_string(std::io::stdin()).context("cannot read standard input")?
    };
    let api_key = api_key.trim().to_owned();
    if api_key.is_empty() {
        bail!("there is no key on standard input");
    }
    let client = ClientArgs {
        url: Some(url.to_owned()),
        api_key: Some(api_key.clone()),
        profile: None,
        data_dir: None,
    };
    match Client::new(&client)?.get("/v1/limits").await {
        // A key that may only produce or work is a key, too.
        Ok(_) => (),
        Err(Failure::Refused { code, .. }) if code == "forbidden" => (),
        Err(error) => return Err(error.into()),
    }
    Ok(api_key)
}

/// Shows a code, and waits until its user has approved it in the console: the device flow of
/// OAuth 2.0 (RFC 8628).
async fn ask(url: &str) -> anyhow::Result<String> {
    let mut err = std::io::stderr();
    let client = Client::without_key(url)?;
    let begun = client.post("/v1/auth/device", &json!({"name": key_name()})).await?.json();
    let text = |field: &str| {
        begun[field].as_str().map(printable).context("the answer is not from a Fencepost server")
    };
    let seconds = |field: &str, max: u64| begun[field].as_u64().unwrap_or(max).clamp(1, max);
    let pause = Duration::from_secs(seconds("interval_seconds", MAX_INTERVAL_SECONDS));
    let end = Instant::now() + Duration::from_secs(seconds("expires_in_seconds", MAX_WAIT_SECONDS));
    let body = json!({"device_code": text("device_code")?});
    writeln!(err, "Open {}", text("verification_uri_complete")?)?;
    writeln!(err, "and approve the code {} there.", text("user_code")?)?;
    let mut unanswered = None;
    while Instant::now() < end {
        sleep(pause).await;
        let collected = match client.post("/v1/auth/device/key", &body).await {
            Ok(reply) => reply.json(),
            Err(Failure::Refused { code, .. }) if code == "invalid_request" => break,
            Err(error) if error.is_transient() && !is_full(&error) => {
                unanswered = Some(error);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let (key, project) = (&collected["api_key"], &collected["project"]);
        if let Some(secret) = key["secret"].as_str() {
            let shown = |value: &Value| printable(&word(value));
            let (email, name) = (shown(&collected["email"]), shown(&project["name"]));
            writeln!(err, "Logged in as {email} to {name} ({}).", shown(&project["slug"]))?;
            let (key, expires_at) = (shown(&key["key"]["name"]), shown(&key["key"]["expires_at"]));
            writeln!(err, "The key {key} is valid until {expires_at}.")?;
            return Ok(secret.to_owned());
        }
    }
    match unanswered {
        // One of these answers may have had the key.
        Some(error) => Err(error).context(
            "the login did not complete: revoke a key of this name in the console, if there is one",
        ),
        None => bail!("the code was refused, or was not approved in time"),
    }
}

/// The name of the key, with the name of this host as far as a key's may have it.
fn key_name() -> String {
    let host = nix::unistd::gethostname().ok().and_then(|it| it.into_string().ok());
    let is_allowed = |it: &char| it.is_ascii_alphanumeric() || "._-".contains(*it);
    let host: String =
        host.unwrap_or_default().chars().filter(is_allowed).take(MAX_HOST_CHARS).collect();
    if host.is_empty() { KEY_NAME.to_owned() } else { format!("{KEY_NAME}@{host}") }
}

/// Whether the project has as many keys as it may have: asking again changes nothing.
fn is_full(error: &Failure) -> bool {
    matches!(error, Failure::Refused { code, .. } if code == "quota_exceeded")
}

/// Forgets a profile. The key stays live: revoke it in the console.
pub fn logout(args: &LogoutArgs) -> anyhow::Result<()> {
    let mut profiles = Profiles::read()?;
    if !profiles.remove(&args.profile) {
        bail!("there is no profile {}", args.profile);
    }
    profiles.write()?;
    writeln!(std::io::stderr(), "The profile is forgotten; {REVOKE}")?;
    Ok(())
}
