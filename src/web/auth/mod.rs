//! Authentication. Having a [`Caller`] *is* the permission: a handler that takes one cannot run
//! without a live key or session that has the permission, within its limits, and takes its project
//! from nowhere else.

mod budget;
mod credential;
mod origin;
mod permit;
mod person;

use std::{marker::PhantomData, sync::Arc};

use axum::{
    extract::{FromRequestParts, MatchedPath, RawPathParams},
    http::request::Parts,
};

pub use self::{
    budget::{
        BodyMeter, Budget, CONSOLE_ACTIONS_PER_MEMBER, CONSOLE_CALLS_PER_MANAGE_CALL,
        CONSOLE_READS_PER_MEMBER, CallReport, Cost, FREE_BODY_BYTES, FromConsole, body_bytes,
        project_limits,
    },
    permit::*,
    person::{CALLS_PER_ACCOUNT, ClientAddress, Person, client_of_request},
};
pub use fencepost_identity::accounts::key;

use fencepost_domain::{
    access::{Permission, Role, Scope, key_may, role_may},
    binding::KeyBinding,
    error::Error,
    ids::{AccountId, KeyId, ProjectId, ProjectPublicId},
    lease::RequireFence,
    networks,
    plan::{Limits, Tenant},
};
use fencepost_identity::{
    accounts::{
        Client, LOOKUPS_PER_ADDRESS,
        author::{Author, Rights},
        token::Bearer,
    },
    credentials::{
        KeyGrant, MemberGrant,
        bodies::{BodyRoom, SMALL_BODY_BYTES},
        watch_key,
    },
};
use fencepost_store::{connection::deadline::bounded, people::audit::Actor};

use self::credential::{check_form, presented};

use crate::app::App;

/// Maximum bytes of a project's id or slug.
const MAX_PROJECT_BYTES: usize = 100;
/// The need of a key that is bound.
const UNBOUND: &str = "a key that is not bound to queues or job types";
/// The path parameter that names a project; it must agree with the key.
const PROJECT_PARAMETER: &str = "project";
/// The same in a route.
const PROJECT_SEGMENT: &str = "{project}";

/// In a request's extensions: its body may have fields that this API does not know.
#[derive(Debug, Clone, Copy)]
pub struct IgnoresUnknownFields;

/// A request with the permission `P`.
#[derive(Clone)]
pub struct Caller<P> {
    /// The project whose jobs this request may access.
    pub project_id: ProjectId,
    pub who: Who,
    pub limits: Limits,
    pub client: Client,
    /// Its permit among the project's parked polls, until it is dropped.
    _poll_permit: Option<Arc<budget::PollPermit>>,
    /// Of its body, if that may be large.
    _room: Option<BodyRoom>,
    report: CallReport,
    /// How many deliveries of webhooks have led to it.
    hop: Option<i16>,
    permission: PhantomData<P>,
}

/// The holder of a live key, or a member with a live session.
#[derive(Debug, Clone)]
pub enum Who {
    Key(Arc<KeyGrant>, key::SecretHash),
    Member(Arc<MemberGrant>, Bearer),
}

impl<P> Caller<P> {
    /// The project and its limits.
    #[must_use]
    pub fn tenant(&self) -> Tenant {
        Tenant { project_id: self.project_id, limits: self.limits }
    }
}

impl Who {
    /// The public id of the project.
    #[must_use]
    pub fn project(&self) -> ProjectPublicId {
        match self {
            Self::Key(it, _) => it.owner.project_public_id,
            Self::Member(it, _) => it.membership.public_id,
        }
    }

    /// The key that was presented.
    fn key(&self) -> Option<KeyId> {
        match self {
            Self::Key(it, _) => Some(it.owner.key_id),
            Self::Member(..) => None,
        }
    }

    /// The slug of the project.
    #[must_use]
    pub fn slug(&self) -> &str {
        match self {
            Self::Key(it, _) => &it.owner.project_slug,
            Self::Member(it, _) => &it.membership.slug,
        }
    }

    /// Which acks and heartbeats must show an attempt or a lease.
    #[must_use]
    pub fn require_fence(&self) -> RequireFence {
        RequireFence::of_name(match self {
            Self::Key(it, _) => &it.owner.require_fence,
            Self::Member(it, _) => &it.membership.require_fence,
        })
    }

    /// The queues and job types that a bound key is bound to. Only handlers that take a [`Bound`]
    /// caller get one.
    #[must_use]
    pub fn binding(&self) -> Option<&KeyBinding> {
        match self {
            Self::Key(it, _) => it.binding.as_ref(),
            Self::Member(..) => None,
        }
    }

    /// The worker that this caller calls so: those of bound keys have names of their own.
    #[must_use]
    pub fn worker(&self, worker_id: String) -> String {
        match self.binding() {
            Some(binding) => binding.worker(&worker_id),
            None => worker_id,
        }
    }

    /// True if unknown fields in bodies are refused.
    #[must_use]
    pub fn is_strict(&self) -> bool {
        match self {
            Self::Key(it, _) => it.owner.strict,
            Self::Member(..) => true,
        }
    }

    /// Why the credential is refused now: it is no longer valid, or has lost the permission or its
    /// right to payloads, or the project was suspended. If the database does not answer, it counts
    /// as valid.
    async fn refusal<P: Permit>(&self, app: &App) -> Option<Error> {
        let now = match self {
            Self::Key(_, hash) => {
                app.credentials.key(*hash).await.map(|it| it.map(|it| Self::Key(it, *hash)))
            }
            Self::Member(grant, bearer) => {
                if matches!(app.credentials.is_session_live(*bearer).await, Ok(false)) {
                    return Some(Error::Unauthorized);
                }
                let project = grant.membership.public_id.to_string();
                let now = app.credentials.member(bearer.account_id, &project).await;
                now.map(|it| it.map(|it| Self::Member(it, *bearer)))
            }
        };
        let Ok(now) = now else { return None };
        let has_lost = |now: &Self| {
            !now.may(P::PERMISSION) || (self.may_read_payloads() && !now.may_read_payloads())
        };
        match now {
            Some(now) if has_lost(&now) => Some(Error::Unauthorized),
            Some(now) => now.suspension::<P>(),
            None => Some(Error::Unauthorized),
        }
    }

    /// The refusal of a caller whose project is suspended.
    fn suspension<P: Permit>(&self) -> Option<Error> {
        let is_suspended = match self {
            Self::Key(it, _) => it.owner.is_suspended,
            Self::Member(it, _) => it.membership.suspended_at.is_some(),
        };
        (is_suspended && !P::WHILE_SUSPENDED).then_some(Error::Suspended { what: "project" })
    }

    /// Id of the key or the account.
    #[must_use]
    pub fn id(&self) -> String {
        match self {
            Self::Key(it, _) => it.owner.key_id.to_string(),
            Self::Member(_, bearer) => bearer.account_id.to_string(),
        }
    }

    /// The account; a key has none.
    #[must_use]
    pub fn account_id(&self) -> Option<AccountId> {
        match self {
            Self::Key(..) => None,
            Self::Member(_, bearer) => Some(bearer.account_id),
        }
    }

    /// The scopes that it may grant to keys.
    #[must_use]
    pub fn scopes(&self) -> &[Scope] {
        match self {
            Self::Key(it, _) => &it.scopes,
            Self::Member(..) => &Scope::ALL,
        }
    }

    /// Whether it also has this permission.
    #[must_use]
    pub fn may(&self, permission: Permission) -> bool {
        match self {
            Self::Key(it, _) => key_may(&it.scopes, permission),
            Self::Member(it, _) => role_may(it.role, permission),
        }
    }

    /// Whether payloads, results, error messages and logs are shown to it.
    #[must_use]
    pub fn may_read_payloads(&self) -> bool {
        match self {
            Self::Key(it, _) => it.scopes.contains(&Scope::PayloadRead),
            Self::Member(it, _) => role_may(it.role, Permission::ReadPayloads),
        }
    }

    /// Its role in the project; a key has none.
    #[must_use]
    pub fn role(&self) -> Option<Role> {
        match self {
            Self::Key(..) => None,
            Self::Member(it, _) => Some(it.role),
        }
    }
}

impl<P: Permit> Caller<P> {
    /// Whether the key or session is still valid.
    pub async fn is_live(&self, app: &App) -> bool {
        self.who.refusal::<P>(app).await.is_none()
    }

    /// Counts the rest of what this call costs, wholly or not at all: 1 was counted before its body
    /// was read. To be called before anything is written.
    ///
    /// # Errors
    /// [`Error::Invalid`] about `field` if the budget never holds as much;
    /// [`Error::RateLimited`] if it does not now.
    pub async fn charge(&self, app: &App, field: &str, cost: Cost) -> Result<(), Error> {
        budget::charge_rest(app, self, field, cost).await
    }

    /// Refuses a member whose person has not proved lately who they are. A key needs no more than
    /// its scope.
    ///
    /// # Errors
    /// [`Error::StepUpRequired`].
    pub async fn require_step_up(&self, app: &App) -> Result<(), Error> {
        match &self.who {
            Who::Key(..) => Ok(()),
            Who::Member(_, bearer) => app.accounts.require_step_up(*bearer).await,
        }
    }

    /// Resolves when the caller would be refused: the key or session was revoked, the member was
    /// removed, or the project was suspended. Returns the refusal.
    pub async fn until_revoked(&self, app: &App) -> Error {
        let mut key = match &self.who {
            Who::Key(grant, hash) => Some(watch_key(&app.credentials, *hash, grant)),
            Who::Member(..) => None,
        };
        loop {
            match &mut key {
                Some(key) => key.changed().await,
                None => app.credentials.until_recheck(None).await,
            }
            // In a task of its own: this future may be dropped at any point.
            let (app, who) = (app.clone(), self.who.clone());
            let asked = bounded(async move { who.refusal::<P>(&app).await });
            if let Ok(Ok(Some(refusal))) = tokio::spawn(asked).await {
                return refusal;
            }
        }
    }
}

impl<P> Caller<P> {
    /// Whose rights a change of members, invitations or keys is made on.
    #[must_use]
    pub fn author(&self) -> Author<'_> {
        let rights = match &self.who {
            Who::Key(it, _) => Rights::Key(it.owner.key_id, &it.scopes),
            Who::Member(_, bearer) => Rights::Member(bearer.account_id),
        };
        Author { project_id: self.project_id, actor: self.actor(), rights }
    }

    /// As the audit log names it.
    #[must_use]
    pub fn actor(&self) -> Actor {
        let kind = match self.who {
            Who::Key(..) => "key",
            Who::Member(..) => "account",
        };
        self.client.actor(kind, self.who.id())
    }
}

impl<P: Permit> FromRequestParts<App> for Caller<P> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Error> {
        let who = identify(parts, app).await?;
        let (project_id, limits) = match &who {
            Who::Key(it, _) => (it.owner.project_id, it.limits),
            Who::Member(it, _) => (it.membership.project_id, it.limits),
        };
        let may = match &who {
            Who::Key(it, _) => key_may(&it.scopes, P::PERMISSION),
            Who::Member(it, _) => role_may(it.role, P::PERMISSION),
        };
        if !may {
            return Err(Error::Forbidden { needs: P::PERMISSION.needs() });
        }
        if !P::MAY_BE_BOUND && who.binding().is_some() {
            return Err(Error::Forbidden { needs: UNBOUND });
        }
        if let Some(refusal) = who.suspension::<P>() {
            return Err(refusal);
        }
        let key = who.key();
        if let Some(key) = key {
            app.used_keys.record((project_id, key));
        }
        let report = parts.extensions.get::<CallReport>().cloned().unwrap_or_default();
        report.of_caller(project_id, key);
        // Enqueues of a page count like any other.
        let is_page =
            P::BUDGET == Budget::Manage && parts.extensions.get::<FromConsole>().is_some();
        let poll_permit = if is_page {
            let of_project = (project_id, &limits);
            budget::charge_console(app, &who, of_project, parts.method.is_safe()).await?;
            None
        } else {
            budget::charge::<P>(app, &who, project_id, &limits, &report).await?
        };
        let announced_bytes = budget::content_length(&parts.headers);
        let meter = BodyMeter::of(app, project_id, &limits, P::OVERDRAFT_WINDOWS);
        if let Some(meter) = meter {
            match announced_bytes {
                Some(bytes) => meter.count(bytes).await?,
                None if parts.method.is_safe() => (),
                // It is counted when it was read.
                None => drop(parts.extensions.insert(meter)),
            }
        }
        let may_be_large =
            announced_bytes.map_or(!parts.method.is_safe(), |it| it > SMALL_BODY_BYTES);
        let room = may_be_large.then(|| app.bodies.room_of(P::OVERDRAFT_WINDOWS > 0, project_id));
        if let Some(room) = &room {
            parts.extensions.insert(room.clone());
        }
        if P::IS_LENIENT && !who.is_strict() {
            parts.extensions.insert(IgnoresUnknownFields);
        }
        let client = parts.extensions.get::<Client>().cloned().unwrap_or_default();
        Ok(Self {
            project_id,
            who,
            limits,
            client,
            _poll_permit: poll_permit,
            _room: room,
            report,
            hop: origin::hop(&parts.headers),
            permission: PhantomData,
        })
    }
}

async fn identify(parts: &mut Parts, app: &App) -> Result<Who, Error> {
    let secret = presented(&parts.headers)?;
    let params = match names_project(parts) {
        true => Some(RawPathParams::from_request_parts(parts, app).await),
        false => None,
    };
    let params = params.transpose().map_err(|_| Error::ProjectNotFound)?;
    let named = params.iter().flatten().find(|(name, _)| *name == PROJECT_PARAMETER);
    let named = named.map(|(_, value)| value);
    if let Some(bearer) = app.accounts.tokens.read(&secret) {
        if !app.credentials.is_session_live(bearer).await? {
            return Err(Error::Unauthorized);
        }
        let named = named.ok_or_else(|| {
            let message = "a session must name its project: /v1/projects/{project}/…";
            Error::invalid(PROJECT_PARAMETER, message)
        })?;
        // No project has such a name.
        if named.len() > MAX_PROJECT_BYTES || named.chars().any(char::is_control) {
            return Err(Error::ProjectNotFound);
        }
        let is_known = app.credentials.is_member_known(bearer.account_id, named);
        let guesses = (!is_known).then(|| Guesses::of(parts, app)).transpose()?;
        let grant = app.credentials.member(bearer.account_id, named).await?;
        if grant.is_none() {
            guesses.map_or(Ok(()), |it| it.count())?;
        }
        return Ok(Who::Member(grant.ok_or(Error::ProjectNotFound)?, bearer));
    }
    check_form(&secret)?;
    let hash = key::hash(&secret);
    let grant = match app.credentials.cached_key(&hash).await {
        Some(grant) => grant,
        None => {
            let is_known = app.credentials.was_key_found(&hash);
            let guesses = (!is_known).then(|| Guesses::of(parts, app)).transpose()?;
            let found = app.credentials.key(hash).await?;
            if found.is_none() {
                guesses.map_or(Ok(()), |it| it.count())?;
            }
            found
        }
    };
    let grant = grant.ok_or(Error::Unauthorized)?;
    if !networks::allow(&grant.allowed_ips, person::address_of(&parts.extensions)) {
        return Err(Error::Forbidden { needs: "an IP address that the key allows" });
    }
    match named {
        Some(it)
            if it != grant.owner.project_slug
                && it != grant.owner.project_public_id.to_string() =>
        {
            Err(Error::ProjectNotFound)
        }
        _ => Ok(Who::Key(grant, hash)),
    }
}

/// Whether the route has a parameter for a project.
fn names_project(parts: &Parts) -> bool {
    let route = parts.extensions.get::<MatchedPath>();
    route.is_none_or(|it| it.as_str().contains(PROJECT_SEGMENT))
}

/// Lookups of unknown things that found nothing, by address, on this node alone: junk keys and
/// made-up project names must block neither lookups of others nor clients behind the same address.
/// A lookup that the database did not answer is none: its client tries again.
struct Guesses<'a> {
    app: &'a App,
    address: Arc<str>,
}

impl<'a> Guesses<'a> {
    /// # Errors
    /// [`Error::RateLimited`] when this address has guessed too often.
    fn of(parts: &Parts, app: &'a App) -> Result<Self, Error> {
        let client = parts.extensions.get::<Client>().cloned().unwrap_or_default();
        match app.credentials.guesser_waits(&client.address) {
            Some(retry_after_seconds) => Err(Error::RateLimited { retry_after_seconds }),
            None => Ok(Self { app, address: client.address }),
        }
    }

    fn count(self) -> Result<(), Error> {
        let name = format!("lookup:{}", self.address);
        match self.app.accounts.limiter.count_here(name, LOOKUPS_PER_ADDRESS) {
            Some(retry_after_seconds) => {
                self.app.credentials.let_guesser_wait(self.address);
                Err(Error::RateLimited { retry_after_seconds })
            }
            None => Ok(()),
        }
    }
}
