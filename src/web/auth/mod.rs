//! Authentication. Having a [`Caller`] *is* the permission: a handler that takes one cannot run
//! without a live key or session that has the permission, within its limits, and takes its project
//! from nowhere else.

mod budget;
mod caller_kind;
mod changes;
mod credential;
mod origin;
mod person;
mod who;

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
    caller_kind::*,
    changes::RoomForChange,
    person::{CALLS_PER_ACCOUNT, ClientAddress, Person, client_of_request},
    who::Who,
};
pub use fencepost_identity::accounts::key;

use fencepost_domain::{
    access::{key_may, role_may},
    error::Error,
    ids::ProjectId,
    networks,
    plan::{Limits, Tenant},
};
use fencepost_identity::{
    accounts::{
        Client, LOOKUPS_PER_ADDRESS,
        author::{Author, Rights},
    },
    credentials::{
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

impl<P> Caller<P> {
    /// The project and its limits.
    #[must_use]
    pub fn tenant(&self) -> Tenant {
        Tenant { project_id: self.project_id, limits: self.limits }
    }
}

impl<P: CallerKind> Caller<P> {
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
            Who::Member(_, bearer) => app.accounts.sessions.require_step_up(*bearer).await,
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

impl<P: CallerKind> FromRequestParts<App> for Caller<P> {
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
        report.of_caller((project_id, who.project()), key);
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
        if P::BUDGET == Budget::Manage {
            RoomForChange::attach(parts, app, Tenant { project_id, limits });
        }
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
            hop: origin::hop(&parts.headers)?,
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
            guesses.map_or(Ok(()), Guesses::count)?;
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
                guesses.map_or(Ok(()), Guesses::count)?;
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
