//! The operator's file of OpenID Connect providers.

use std::{collections::HashSet, path::Path};

use anyhow::{Context, bail, ensure};
use jsonwebtoken::jwk::JwkSet;
use reqwest::Url;
use secrecy::SecretString;
use serde::Deserialize;

use fencepost_config::read_secret;

/// Providers of one server: each is a button of the login page.
const MAX_PROVIDERS: usize = 20;
const MAX_NAME_CHARS: usize = 32;
const MAX_LABEL_CHARS: usize = 40;

/// A provider, as the operator names it.
#[derive(Debug, Clone)]
pub struct ProviderConfig {
    /// In URLs.
    pub name: String,
    /// On buttons.
    pub label: String,
    pub issuer: String,
    pub client_id: String,
    /// None: a public client.
    pub client_secret: Option<SecretString>,
    /// Domains of the addresses that may log in; empty: all.
    pub allowed_domains: Vec<String>,
}

impl ProviderConfig {
    /// Whether a person with this verified address may log in.
    #[must_use]
    pub fn allows(&self, email: Option<&str>) -> bool {
        let domain = email.and_then(|it| it.rsplit_once('@')).map(|it| it.1.to_lowercase());
        self.allowed_domains.is_empty()
            || domain.is_some_and(|it| self.allowed_domains.contains(&it))
    }
}

/// An issuer whose tokens projects may trust: a CI service, a cluster.
#[derive(Debug, Clone)]
pub struct TokenIssuerConfig {
    pub issuer: String,
    /// The `aud` of its tokens; none: the server's own URL.
    pub audience: Option<String>,
    /// Its keys; none: those that it publishes.
    pub keys: Option<JwkSet>,
}

/// The content of the file.
#[derive(Debug, Clone, Default)]
pub struct OidcConfig {
    pub providers: Vec<ProviderConfig>,
    pub token_issuers: Vec<TokenIssuerConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigFile {
    #[serde(default)]
    providers: Vec<FileProvider>,
    #[serde(default)]
    token_issuers: Vec<FileTokenIssuer>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTokenIssuer {
    issuer: String,
    audience: Option<String>,
    keys_file: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileProvider {
    name: String,
    label: Option<String>,
    issuer: String,
    client_id: String,
    client_secret_file: Option<String>,
    #[serde(default)]
    allowed_domains: Vec<String>,
}

/// Reads a file in TOML, with a table `[[providers]]` for each login provider, and a table
/// `[[token_issuers]]` for each issuer of tokens.
///
/// # Errors
/// When it cannot be read, or a table breaks a rule.
pub fn open(path: &Path) -> anyhow::Result<OidcConfig> {
    let named = || path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(named)?;
    parse(&text).with_context(named)
}

/// See [`open`].
///
/// # Errors
/// As for [`open`].
pub fn parse(text: &str) -> anyhow::Result<OidcConfig> {
    let file: ConfigFile = toml::from_str(text)?;
    let (logins, issuers) = (file.providers.len(), file.token_issuers.len());
    ensure!(logins + issuers > 0, "it has neither [[providers]] nor [[token_issuers]]");
    ensure!(logins.max(issuers) <= MAX_PROVIDERS, "it has more than {MAX_PROVIDERS} of a kind");
    let providers = read_providers(file.providers)?;
    let token_issuers = read_token_issuers(file.token_issuers)?;
    Ok(OidcConfig { providers, token_issuers })
}

fn read_token_issuers(listed: Vec<FileTokenIssuer>) -> anyhow::Result<Vec<TokenIssuerConfig>> {
    let mut issuers = HashSet::new();
    let mut read = Vec::with_capacity(listed.len());
    for FileTokenIssuer { issuer, audience, keys_file } in listed {
        check_url(&issuer).with_context(|| format!("token issuer {issuer:?}"))?;
        ensure!(issuers.insert(issuer.clone()), "two token issuers are {issuer:?}");
        let keys = keys_file.map(|it| -> anyhow::Result<JwkSet> {
            let text = std::fs::read_to_string(&it).with_context(|| it.clone())?;
            serde_json::from_str(&text).with_context(|| format!("{it}: no JSON Web Key Set"))
        });
        let keys = keys.transpose().context("keys_file")?;
        read.push(TokenIssuerConfig { issuer, audience, keys });
    }
    Ok(read)
}

fn read_providers(listed: Vec<FileProvider>) -> anyhow::Result<Vec<ProviderConfig>> {
    let mut names = HashSet::new();
    let mut issuers = HashSet::new();
    let mut providers = Vec::with_capacity(listed.len());
    for it in listed {
        let name = it.name.clone();
        let provider = read(it).with_context(|| format!("provider {name:?}"))?;
        ensure!(names.insert(name.clone()), "two providers have the name {name:?}");
        // An identity is known by its issuer alone.
        ensure!(issuers.insert(provider.issuer.clone()), "two providers have one issuer");
        providers.push(provider);
    }
    Ok(providers)
}

fn read(it: FileProvider) -> anyhow::Result<ProviderConfig> {
    let is_name = |it: &str| {
        (1..=MAX_NAME_CHARS).contains(&it.len())
            && it.bytes().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-')
    };
    if !is_name(&it.name) {
        bail!("name: 1 to {MAX_NAME_CHARS} lower-case letters, digits and hyphens");
    }
    let label = it.label.unwrap_or_else(|| it.name.clone());
    let label_chars = label.chars().count();
    ensure!(
        (1..=MAX_LABEL_CHARS).contains(&label_chars),
        "label: 1 to {MAX_LABEL_CHARS} characters"
    );
    ensure!(!it.client_id.is_empty(), "client_id: must not be empty");
    check_url(&it.issuer).context("issuer")?;
    for domain in &it.allowed_domains {
        let is_domain = domain.contains('.') && !domain.contains(['@', '*', ' ']);
        ensure!(is_domain, "allowed_domains: {domain:?} is not a domain, such as example.com");
    }
    let client_secret = it.client_secret_file.map(|it| read_secret(Path::new(&it)));
    Ok(ProviderConfig {
        name: it.name,
        label,
        issuer: it.issuer,
        client_id: it.client_id,
        client_secret: client_secret.transpose().context("client_secret_file")?.map(Into::into),
        allowed_domains: it.allowed_domains.iter().map(|it| it.to_lowercase()).collect(),
    })
}

/// Whether tokens and secrets may travel to this URL: over TLS, or within this machine.
///
/// # Errors
/// When it is no such URL.
pub fn check_url(text: &str) -> anyhow::Result<Url> {
    let url: Url = text.parse()?;
    let host = url.host_str().unwrap_or_default();
    let is_local = ["127.0.0.1", "localhost", "[::1]"].contains(&host);
    let is_safe = url.scheme() == "https" || (url.scheme() == "http" && is_local);
    ensure!(is_safe && !host.is_empty(), "{text:?} must begin with https://");
    ensure!(url.username().is_empty() && url.password().is_none(), "it must have no password");
    ensure!(url.fragment().is_none(), "it must have no fragment");
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_and_what_breaks_a_rule_is_named() {
        let good = "[[providers]]\nname = \"acme\"\nissuer = \"https://id.acme.example\"\nclient_id = \"x\"\n";
        let read = parse(good).expect("it is valid").providers;
        assert_eq!(
            (read[0].label.as_str(), read[0].issuer.as_str()),
            ("acme", "https://id.acme.example")
        );
        let twice = format!("{good}{good}");
        let with = |line: &str| format!("{good}{line}\n");
        for (text, says) in [
            (String::new(), "neither [[providers]]"),
            ("[[token_issuers]]\nissuer = \"http://x.example\"".into(), "begin with https://"),
            (twice, "two providers have the name"),
            (format!("{good}{}", good.replace("acme\"\ni", "b\"\ni")), "one issuer"),
            (good.replace("https", "http"), "must begin with https://"),
            (good.replace("name = \"acme\"", "name = \"A/b\""), "name: 1 to 32"),
            (good.replace("\"x\"", "\"\""), "client_id"),
            (with("allowed_domains = [\"@acme.example\"]"), "is not a domain"),
            (with("client_secret_file = \"/nowhere\""), "client_secret_file"),
            (with("secret = \"x\""), "unknown field"),
        ] {
            let error = format!("{:#}", parse(&text).expect_err("it is refused"));
            assert!(error.contains(says), "{error}");
        }
        assert!(check_url("http://127.0.0.1:3000/x").is_ok(), "within the machine");
        assert!(check_url("https://a:b@x.example").is_err());
    }
}
