//! `/v1/keys`: API keys. A key is shown once, when it is created. It never has more rights, or a
//! longer life, than its creator.

pub mod exchange;
pub mod revoke;
pub mod scanners;

use axum::{Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    access::{KeyPreset, Scope},
    binding::KeyBinding,
    error::Error,
    formats,
    ids::KeyId,
    lease::RequireFence,
    limits::{self, MAX_KEY_CALLS_PER_MINUTE},
    networks,
};
use fencepost_identity::accounts::{
    keys::{self, KeyOrigin, KeyRequest, MadeKey},
    oidc::Providers,
};
use fencepost_store::{self as store, people::keys::ListedKey};
use fencepost_web::{
    app::App,
    auth::{Administer, Caller},
    wire::{
        extract::{Json, KeyInPath, Object, Query, RequestBody},
        openapi::{chars, items, range},
        validate::Check,
    },
};
use ipnet::IpNet;
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    cursor::{self, List},
    error::ErrorBody,
    page::{PageSize, page},
};

const DEFAULT_PAGE_KEYS: u32 = 50;

/// State of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KeyState {
    /// Valid.
    Live,
    /// Expired.
    Expired,
    /// Revoked.
    Revoked,
}

/// Own rate limits of a key, per minute, besides those of its project.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KeyRateLimits {
    /// Calls that enqueue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, extensions(("bounds" = json!(range(1, limits::MAX_KEY_CALLS_PER_MINUTE)))))]
    pub produce_per_minute: Option<i32>,
    /// Calls of workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, extensions(("bounds" = json!(range(1, limits::MAX_KEY_CALLS_PER_MINUTE)))))]
    pub work_per_minute: Option<i32>,
    /// All other calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, extensions(("bounds" = json!(range(1, limits::MAX_KEY_CALLS_PER_MINUTE)))))]
    pub manage_per_minute: Option<i32>,
}

/// Tokens of a CI service or a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TrustedTokens {
    /// URL of the OpenID Connect issuer: one that the operator accepts.
    #[schema(example = "https://token.actions.githubusercontent.com")]
    pub issuer: String,
    /// The `sub` of its tokens. With `*` at the end, all that begin like this: name as much of it
    /// as you can, for others have tokens of the same issuer.
    #[schema(example = "repo:acme/app:ref:refs/heads/main", extensions(("bounds" = json!(chars(1, limits::MAX_SUBJECT_CHARS)))))]
    pub subject: String,
}

/// An API key, without its secret.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ApiKey {
    /// Id of the key; not the key itself.
    #[schema(example = "key_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Name.
    pub name: String,
    /// First and last characters of the key.
    #[schema(example = "fp_live_4xZq…9aBc")]
    pub shown: String,
    /// State of the key.
    pub state: KeyState,
    /// Scopes.
    pub scopes: Vec<Scope>,
    /// Own rate limits.
    pub rate_limits: KeyRateLimits,
    /// Acks and heartbeats with this key that must show `attempt` or `lease_id`.
    pub require_fence: RequireFence,
    /// True if unknown fields in bodies are refused.
    pub strict: bool,
    /// Networks from which it may be used; empty: all.
    #[schema(example = json!(["192.0.2.0/24"]))]
    pub allowed_ips: Vec<String>,
    /// Queues that it is bound to; empty: all.
    #[schema(example = json!(["mail"]))]
    pub queues: Vec<String>,
    /// Job types that it is bound to; empty: all.
    #[schema(example = json!(["mail.send"]))]
    pub job_types: Vec<String>,
    /// Tokens that are exchanged for keys with its rights; null: it is used with its secret.
    #[schema(required)]
    pub trusts: Option<TrustedTokens>,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// Creator: id of an account or key; null: an operator.
    #[schema(required)]
    pub created_by: Option<String>,
    /// When it was last used, to within some seconds.
    #[schema(required)]
    pub last_used_at: Option<DateTime<Utc>>,
    /// About how many of its calls were of deprecated operations.
    pub deprecated_calls: i64,
    /// Time of the last deprecated call, to within some seconds.
    #[schema(required)]
    pub deprecated_call_at: Option<DateTime<Utc>>,
    /// When it expires.
    #[schema(required)]
    pub expires_at: Option<DateTime<Utc>>,
    /// When it was revoked.
    #[schema(required)]
    pub revoked_at: Option<DateTime<Utc>>,
}

impl From<ListedKey> for ApiKey {
    fn from(row: ListedKey) -> Self {
        let state = match (row.is_live, row.revoked_at) {
            (true, _) => KeyState::Live,
            (false, Some(_)) => KeyState::Revoked,
            (false, None) => KeyState::Expired,
        };
        Self {
            id: row.id.to_string(),
            name: row.name,
            shown: format!("{}…{}", row.shown_prefix, row.shown_end),
            state,
            scopes: row.scopes.iter().filter_map(|it| Scope::of_name(it)).collect(),
            rate_limits: KeyRateLimits {
                produce_per_minute: row.produce_per_minute,
                work_per_minute: row.work_per_minute,
                manage_per_minute: row.manage_per_minute,
            },
            require_fence: RequireFence::of_name(&row.require_fence),
            strict: row.strict,
            allowed_ips: row.allowed_ips,
            queues: row.queues,
            job_types: row.job_types,
            trusts: row
                .token_issuer
                .zip(row.token_subject)
                .map(|(issuer, subject)| TrustedTokens { issuer, subject }),
            created_at: row.created_at,
            created_by: row.created_by,
            last_used_at: row.last_used_at,
            deprecated_calls: row.deprecated_calls,
            deprecated_call_at: row.deprecated_call_at,
            expires_at: row.expires_at,
            revoked_at: row.revoked_at,
        }
    }
}

/// A created key.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct CreatedApiKey {
    /// The key itself. It is shown only once. Missing if the key is used with tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "fp_live_…", nullable = false)]
    pub secret: Option<String>,
    /// The key's properties.
    pub key: ApiKey,
}

impl From<MadeKey> for CreatedApiKey {
    fn from(made: MadeKey) -> Self {
        let has_secret = made.listed.token_issuer.is_none();
        let secret = has_secret.then(|| made.secret.expose_secret().to_owned());
        Self { secret, key: made.listed.into() }
    }
}

/// Page of keys.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct KeysQuery {
    /// Maximum number of keys to return. Default: 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
    /// True: only keys that tokens were exchanged for. Default: all others.
    exchanged: Option<bool>,
}

page! {
    /// A page of keys.
    KeyPage {
        /// Newest first, including expired and revoked ones.
        keys: ApiKey
    }
}

/// List keys.
#[utoipa::path(
    get, path = "/keys", tag = "keys", operation_id = "keys_list", params(KeysQuery),
    security(("api_key" = ["keys"]), ("session" = ["admin"])),
    responses(
        (status = 200, description = "A page of keys.", body = KeyPage),
    ),
)]
pub async fn list(
    caller: Caller<Administer>,
    State(app): State<App>,
    Query(query): Query<KeysQuery>,
) -> Result<Reply<KeyPage>, Error> {
    let mut check = Check::default();
    let size = PageSize::read(query.limit, DEFAULT_PAGE_KEYS, limits::MAX_PAGE_KEYS, &mut check);
    check.finish()?;
    let list = List::of(caller.project_id, "keys");
    let before = cursor::read_id(&app, list, query.cursor.as_deref())?.map(KeyId);
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let (exchanged, limit) = (query.exchanged.unwrap_or(false), size.one_more());
    let mut rows =
        store::people::keys::list(&mut conn, caller.project_id, exchanged, before, limit).await?;
    let next_cursor = size.cut(&mut rows, |it| cursor::write_id(&app, list, it.id.0));
    let keys = rows.into_iter().map(ApiKey::from).collect();
    Ok(Reply(KeyPage::of(keys, next_cursor)))
}

/// A key to create.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "billing worker", "preset": "worker"}))]
pub struct CreateKeyRequest {
    /// Name.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    name: String,
    /// Scopes. Default: all that you may grant, and a bound key may have.
    #[schema(min_items = 1, max_items = 8)]
    scopes: Option<Vec<Scope>>,
    /// A named set of scopes. Alternative to `scopes`.
    preset: Option<KeyPreset>,
    /// Expiry, at most ten years ahead. Default: never, or that of the key that creates it.
    #[serde(default, deserialize_with = "formats::optional_time")]
    expires_at: Option<DateTime<Utc>>,
    /// Own rate limits, per minute.
    #[schema(value_type = Option<KeyRateLimits>)]
    rate_limits: Option<Object<KeyRateLimits>>,
    /// Acks and heartbeats with this key that must show `attempt` or `lease_id`. Default:
    /// `ambiguous`.
    require_fence: Option<RequireFence>,
    /// False: unknown fields in the bodies of enqueues and of workers' calls are ignored, for
    /// clients that send more than this API knows. Default: true.
    strict: Option<bool>,
    /// IP addresses and networks from which it may be used, such as `192.0.2.7` and
    /// `2001:db8::/32`. Default: all, or those of the key that creates it.
    #[schema(max_items = 32)]
    allowed_ips: Option<Vec<String>>,
    /// Binds the key to these queues: it enqueues into them and works on them, in the native API
    /// alone, and its scopes are among `produce`, `work` and `payload:read`. Default: all queues.
    #[schema(extensions(("bounds" = json!(items(1, limits::MAX_KEY_QUEUES)))))]
    queues: Option<Vec<String>>,
    /// Binds the key to these job types, likewise.
    #[schema(extensions(("bounds" = json!(items(1, limits::MAX_KEY_JOB_TYPES)))))]
    job_types: Option<Vec<String>>,
    /// The key gets no secret. `POST /v1/keys/exchange` exchanges these tokens for keys of 15
    /// minutes with its rights.
    #[schema(value_type = Option<TrustedTokens>)]
    trusts: Option<Object<TrustedTokens>>,
}

impl RequestBody for CreateKeyRequest {}

impl CreateKeyRequest {
    fn accept(self, own: &[Scope], providers: &Providers) -> Result<KeyRequest, Error> {
        let mut check = Check::default();
        check.name("name", &self.name, limits::MAX_NAME_CHARS);
        if self.scopes.is_some() && self.preset.is_some() {
            check.refuse("preset", "must not be sent together with scopes");
        }
        check.time("expires_at", self.expires_at);
        let Object(rates) = self.rate_limits.unwrap_or(Object(KeyRateLimits::default()));
        let fields = [
            ("rate_limits.produce_per_minute", rates.produce_per_minute),
            ("rate_limits.work_per_minute", rates.work_per_minute),
            ("rate_limits.manage_per_minute", rates.manage_per_minute),
        ];
        for (field, value) in fields {
            check.range(field, value.unwrap_or(1), 1, MAX_KEY_CALLS_PER_MINUTE);
        }
        let allowed_ips = accept_networks(&self.allowed_ips.unwrap_or_default(), &mut check);
        let origin = match self.trusts {
            None => KeyOrigin::Secret,
            Some(Object(it)) => KeyOrigin::Tokens(accept_tokens(it, providers, &mut check)),
        };
        let binding = accept_binding(self.queues, self.job_types, &mut check);
        let may_have = |it: &Scope| binding.is_none() || KeyBinding::SCOPES.contains(it);
        let preset = self.preset.map(|it| it.scopes().to_vec());
        let wanted = self.scopes.or(preset);
        let mut scopes =
            wanted.unwrap_or_else(|| own.iter().copied().filter(may_have).collect::<Vec<_>>());
        scopes.sort();
        scopes.dedup();
        if !scopes.iter().all(may_have) {
            let allowed = KeyBinding::SCOPES.map(Scope::name).join(", ");
            check.refuse("scopes", format!("of a bound key must be among {allowed}"));
        }
        if scopes.is_empty() {
            check.refuse("scopes", "must name at least one scope");
        }
        check.finish()?;
        Ok(KeyRequest {
            name: self.name,
            scopes,
            expires_at: self.expires_at,
            per_minute: [rates.produce_per_minute, rates.work_per_minute, rates.manage_per_minute],
            require_fence: self.require_fence.unwrap_or_default(),
            strict: self.strict.unwrap_or(true),
            allowed_ips,
            binding,
            origin,
        })
    }
}

fn accept_binding(
    queues: Option<Vec<String>>,
    job_types: Option<Vec<String>>,
    check: &mut Check,
) -> Option<KeyBinding> {
    let mut names = |field, names: Option<Vec<String>>, max, max_chars| {
        if names.as_ref().is_some_and(Vec::is_empty) {
            check.refuse(field, "must name at least one: leave it out for all");
        }
        let mut names = names.unwrap_or_default();
        check.names(field, &names, max, max_chars);
        names.sort();
        names.dedup();
        names
    };
    let queues = names("queues", queues, limits::MAX_KEY_QUEUES, limits::MAX_QUEUE_CHARS);
    let (max, max_chars) = (limits::MAX_KEY_JOB_TYPES, limits::MAX_JOB_TYPE_CHARS);
    KeyBinding::of(queues, names("job_types", job_types, max, max_chars))
}

fn accept_tokens(
    it: TrustedTokens,
    providers: &Providers,
    check: &mut Check,
) -> keys::TrustedTokens {
    let TrustedTokens { issuer, subject } = it;
    if !providers.token_issuers().any(|it| it == issuer) {
        let known: Vec<_> = providers.token_issuers().collect();
        let message = match known.as_slice() {
            [] => "the operator of this server accepts tokens of no issuer".to_owned(),
            known => format!("must be one that the operator accepts: {}", known.join(", ")),
        };
        check.refuse("trusts.issuer", message);
    }
    let (chars, max) = (subject.chars().count(), limits::MAX_SUBJECT_CHARS);
    if chars > max || subject.contains('\0') {
        check.refuse("trusts.subject", format!("must have 1 to {max} characters, without NUL"));
    }
    let before_end = subject.strip_suffix('*').unwrap_or(&subject);
    if before_end.is_empty() || before_end.contains('*') {
        check.refuse("trusts.subject", "must be a subject, or its beginning with one * after it");
    }
    keys::TrustedTokens { issuer, subject }
}

fn accept_networks(texts: &[String], check: &mut Check) -> Vec<IpNet> {
    let (max, count) = (limits::MAX_KEY_NETWORKS, texts.len());
    if count > max {
        check.refuse("allowed_ips", format!("must have at most {max} entries, has {count}"));
        return Vec::new();
    }
    let mut read = Vec::with_capacity(count);
    for (place, text) in texts.iter().enumerate() {
        match networks::parse(text) {
            Some(it) if read.contains(&it) => (),
            Some(it) => read.push(it),
            None => check.refuse(
                &format!("allowed_ips[{place}]"),
                "must be an IP address, or a network such as 192.0.2.0/24",
            ),
        }
    }
    read
}

/// Create a key.
///
/// The key itself is in the answer and nowhere else. Therefore this request cannot be repeated with
/// an `Idempotency-Key`.
#[utoipa::path(
    post, path = "/keys", tag = "keys", operation_id = "keys_create",
    security(("api_key" = ["keys"]), ("session" = ["admin"])),
    request_body = CreateKeyRequest,
    responses(
        (status = 201, description = "The created key. It is shown only once.", body = CreatedApiKey),
    ),
)]
pub async fn create(
    caller: Caller<Administer>,
    State(app): State<App>,
    Json(request): Json<CreateKeyRequest>,
) -> Result<(StatusCode, Reply<CreatedApiKey>), Error> {
    let request = request.accept(caller.who.scopes(), &app.accounts.providers)?;
    caller.require_step_up(&app).await?;
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let max = caller.limits.max_keys();
    let made = keys::create(&mut conn, &caller.author(), request, max).await?;
    Ok((StatusCode::CREATED, Reply(made.into())))
}

/// Read a key.
#[utoipa::path(
    get, path = "/keys/{key_id}", tag = "keys", operation_id = "keys_get",
    security(("api_key" = ["keys"]), ("session" = ["admin"])),
    params(("key_id" = String, Path, description = "The key's id.", example = "key_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "The key, without its secret.", body = ApiKey),
        (status = 404, description = "The project has no such key.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Administer>,
    State(app): State<App>,
    KeyInPath(id): KeyInPath,
) -> Result<Reply<ApiKey>, Error> {
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let row = store::people::keys::lock(&mut conn, caller.project_id, id).await?;
    Ok(Reply(row.ok_or(Error::KeyNotFound)?.into()))
}

/// A new name.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "worker on host 7"}))]
pub struct ChangeKeyRequest {
    /// Name. Rights of a key never change: create another one.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    name: String,
}

impl RequestBody for ChangeKeyRequest {}

/// Rename a key.
#[utoipa::path(
    patch, path = "/keys/{key_id}", tag = "keys", operation_id = "keys_rename",
    security(("api_key" = ["keys"]), ("session" = ["admin"])),
    params(("key_id" = String, Path, description = "The key's id.", example = "key_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body = ChangeKeyRequest,
    responses(
        (status = 200, description = "The key.", body = ApiKey),
        (status = 404, description = "The project has no such key.", body = ErrorBody),
    ),
)]
pub async fn change(
    caller: Caller<Administer>,
    State(app): State<App>,
    KeyInPath(id): KeyInPath,
    Json(request): Json<ChangeKeyRequest>,
) -> Result<Reply<ApiKey>, Error> {
    let mut check = Check::default();
    check.name("name", &request.name, limits::MAX_NAME_CHARS);
    check.finish()?;
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let key = keys::rename(&mut conn, &caller.author(), id, request.name).await?;
    Ok(Reply(key.into()))
}
