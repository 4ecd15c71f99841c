//! `fencepost login` and `fencepost logout`: a server and its key are kept for later commands.

use std::io::{IsTerminal, Write};

use anyhow::{Context, bail};
use clap::Args;

use crate::client::{
    Client, ClientArgs, Failure,
    profile::{self, Profile, Profiles},
};

/// Options of `login`.
#[derive(Debug, Args)]
pub struct LoginArgs {
    /// The server
    #[arg(long, env = "FENCEPOST_URL", value_name = "URL")]
    url: String,

    /// Name of the profile
    #[arg(long, env = "FENCEPOST_PROFILE", value_name = "NAME", default_value = profile::DEFAULT)]
    profile: String,
}

/// Options of `logout`.
#[derive(Debug, Args)]
pub struct LogoutArgs {
    /// Name of the profile
    #[arg(long, env = "FENCEPOST_PROFILE", value_name = "NAME", default_value = profile::DEFAULT)]
    profile: String,
}

/// Asks for a key, checks it, and keeps it.
pub async fn login(args: LoginArgs) -> anyhow::Result<()> {
    let mut err = std::io::stderr();
    let api_key = if std::io::stdin().is_terminal() {
        writeln!(err, "Create a key in the console of {}, under API keys.", args.url)?;
        rpassword::prompt_password("Key: ")?
    } else {
        std::io::read_to_string(std::io::stdin()).context("cannot read standard input")?
    };
    let api_key = api_key.trim().to_owned();
    if api_key.is_empty() {
        bail!("there is no key on standard input");
    }
    let client = ClientArgs {
        url: Some(args.url.clone()),
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
    let mut profiles = Profiles::read()?;
    if profiles.get(&args.profile).is_some() {
        writeln!(err, "It replaces the profile {} that was there.", args.profile)?;
    }
    let url = args.url.trim_end_matches('/').to_owned();
    profiles.set(args.profile.clone(), Profile { url, api_key });
    let path = profiles.write()?;
    writeln!(err, "The profile {} is kept in {}.", args.profile, path.display())?;
    Ok(())
}

/// Forgets a profile. The key stays live: revoke it in the console.
pub fn logout(args: &LogoutArgs) -> anyhow::Result<()> {
    let mut profiles = Profiles::read()?;
    if !profiles.remove(&args.profile) {
        bail!("there is no profile {}", args.profile);
    }
    profiles.write()?;
    writeln!(std::io::stderr(), "The key itself stays live: revoke it in the console.")?;
    Ok(())
}
