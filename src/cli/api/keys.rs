//! `fencepost api-keys`.

use chrono::{DateTime, Utc};
use clap::Subcommand;
use fencepost_domain::limits;
use serde_json::json;

use super::Call;
use crate::cli::{keys::PresetArg, table::Page, words::encoded};

/// API keys of the project, with a key that has the scope `keys`.
#[derive(Debug, Subcommand)]
pub enum ApiKeys {
    /// List keys, newest first
    List {
        #[command(flatten)]
        page: Page<{ limits::MAX_PAGE_KEYS }>,
    },
    /// Show a key, without its secret
    #[command(visible_alias = "show")]
    Get {
        /// Key id
        key_id: String,
    },
    /// Create a key and print it; it is shown only once
    Create {
        /// Name of the key
        name: String,
        /// Scopes of the key [default: all that your key may grant]
        #[arg(long, value_enum, value_name = "PRESET")]
        preset: Option<PresetArg>,
        /// When it expires, such as 2030-01-31T00:00:00Z [default: never, or with your key]
        #[arg(long, value_name = "TIME")]
        expires_at: Option<DateTime<Utc>>,
        /// IP address or network from which it may be used; may be repeated [default: all]
        #[arg(long = "allowed-ip", value_name = "NETWORK")]
        allowed_ips: Vec<String>,
        /// Queue that it is bound to; may be repeated [default: all]
        #[arg(long = "queue", value_name = "QUEUE")]
        queues: Vec<String>,
        /// Job type that it is bound to; may be repeated [default: all]
        #[arg(long = "job-type", value_name = "TYPE")]
        job_types: Vec<String>,
    },
    /// Replace a key by a new one with the same rights, and print that
    Rotate {
        /// Key id
        key_id: String,
        /// Seconds for which the old key stays valid [default: 86400]
        #[arg(long, value_name = "N",
              value_parser = clap::value_parser!(i64).range(0..=limits::MAX_KEY_OVERLAP_SECONDS))]
        overlap_seconds: Option<i64>,
    },
    /// Revoke a key
    Revoke {
        /// Key id
        key_id: String,
        /// Whether keys that it has created are revoked, too; required if there are any
        #[arg(long, value_name = "BOOL")]
        revoke_keys: Option<bool>,
    },
}

impl From<ApiKeys> for Call {
    fn from(command: ApiKeys) -> Self {
        match command {
            ApiKeys::List { page } => Self::list(
                format!("/v1/keys?{}", page.query()),
                "keys",
                &[
                    ("KEY ID", "/id"),
                    ("NAME", "/name"),
                    ("KEY", "/shown"),
                    ("STATE", "/state"),
                    ("SCOPES", "/scopes"),
                    ("LAST USED", "/last_used_at"),
                    ("EXPIRES", "/expires_at"),
                ],
            ),
            ApiKeys::Get { key_id } => Self::get(format!("/v1/keys/{}", encoded(&key_id))),
            ApiKeys::Create { name, preset, expires_at, allowed_ips, queues, job_types } => {
                let mut body = json!({"name": name});
                if let Some(preset) = preset {
                    body["preset"] = json!(preset.preset());
                }
                if let Some(expires_at) = expires_at {
                    body["expires_at"] = json!(expires_at);
                }
                let lists =
                    [("allowed_ips", allowed_ips), ("queues", queues), ("job_types", job_types)];
                for (field, values) in lists {
                    if !values.is_empty() {
                        body[field] = json!(values);
                    }
                }
                Self::post("/v1/keys".to_owned(), body)
            }
            ApiKeys::Rotate { key_id, overlap_seconds } => {
                let body = overlap_seconds.map_or(json!({}), |it| json!({"overlap_seconds": it}));
                Self::post(format!("/v1/keys/{}/rotate", encoded(&key_id)), body)
            }
            ApiKeys::Revoke { key_id, revoke_keys } => {
                let query = revoke_keys.map(|it| format!("?revoke_keys={it}")).unwrap_or_default();
                Self::delete(format!("/v1/keys/{}{query}", encoded(&key_id)))
            }
        }
    }
}
