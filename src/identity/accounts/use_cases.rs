//! The use cases of accounts, put together: each has only those parts of the node that it needs.

use std::{ops::Deref, sync::Arc};

use fencepost_config::Signup;
use fencepost_domain::plan::Plans;
use fencepost_net::{mail::Mailer, seal::MasterKeys};
use fencepost_signals::{limiter::Limiter, wakeups::Wake};
use fencepost_store::connection::pools::Pool;

use super::{
    address::Addresses,
    base::Base,
    device_login::DeviceLogins,
    invitation::Invitations,
    login::Logins,
    mailing::Mailing,
    oidc::{Identities, Providers, TokenExchanges},
    own_password::OwnPassword,
    passkeys::Passkeys,
    password::Passwords,
    password_change::PasswordChanges,
    projects::Projects,
    removal::Removals,
    scanners::ScannerKeys,
    second_factor::SecondFactors,
    sessions::Sessions,
    signing_keys::SigningKeys,
    signup::SignUps,
    throttle::Throttle,
    token::Tokens,
    totp::Authenticators,
};

/// The parts of a node that its accounts need.
#[derive(Clone)]
pub struct Parts {
    pub pool: Pool,
    pub limiter: Limiter,
    pub passwords: Passwords,
    pub tokens: Tokens,
    pub master_keys: Arc<MasterKeys>,
    pub mailer: Mailer,
    pub signup: Signup,
    pub public_url: String,
    /// A URI for people who have found a vulnerability.
    pub security_contact: Option<String>,
    /// A URI for people who want a larger plan.
    pub plan_contact: Option<String>,
    /// Public keys of secret scanners.
    pub scanner_keys: Arc<ScannerKeys>,
    pub providers: Arc<Providers>,
    pub default_plan: String,
    pub plans: Plans,
    /// Wakes the loop that sends mails.
    pub wake: Wake,
}

/// One node's handle on accounts: its use cases, and the parts. Cheap to clone.
#[derive(Clone)]
pub struct Accounts {
    parts: Parts,
    pub throttle: Throttle,
    pub mailing: Mailing,
    pub signing_keys: SigningKeys,
    pub sessions: Sessions,
    pub projects: Projects,
    pub invitations: Invitations,
    pub sign_ups: SignUps,
    pub logins: Logins,
    pub passkeys: Passkeys,
    pub second_factors: SecondFactors,
    pub authenticators: Authenticators,
    pub password_changes: PasswordChanges,
    pub addresses: Addresses,
    pub identities: Identities,
    pub device_logins: DeviceLogins,
    pub token_exchanges: TokenExchanges,
    pub removals: Removals,
}

impl Deref for Accounts {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl Accounts {
    /// Gives each use case its parts.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let Parts {
            pool,
            passwords,
            tokens,
            master_keys,
            public_url,
            providers,
            plans,
            default_plan,
            signup,
            ..
        } = parts.clone();
        let mailing = Mailing {
            pool: pool.clone(),
            mailer: parts.mailer.clone(),
            public_url: public_url.clone(),
            wake: parts.wake.clone(),
            throttle: Throttle { limiter: parts.limiter.clone() },
        };
        let base = Base::of(pool.clone(), tokens.clone(), mailing);
        let own = OwnPassword { pool: pool.clone(), passwords: passwords.clone() };
        let projects = Projects { pool: pool.clone(), plans: plans.clone(), default_plan };
        let invitations = Invitations { base: base.clone() };
        let passkeys =
            Passkeys { base: base.clone(), tokens: tokens.clone(), public_url: public_url.clone() };
        Self {
            signing_keys: SigningKeys {
                pool,
                tokens: tokens.clone(),
                master_keys: Arc::clone(&master_keys),
            },
            sign_ups: SignUps {
                base: base.clone(),
                signup,
                passwords: passwords.clone(),
                plans: plans.clone(),
                invitations: invitations.clone(),
                projects: projects.clone(),
            },
            logins: Logins { base: base.clone(), passwords },
            second_factors: SecondFactors {
                base: base.clone(),
                master_keys: Arc::clone(&master_keys),
                own: own.clone(),
                passkeys: passkeys.clone(),
            },
            authenticators: Authenticators { base: base.clone(), master_keys },
            password_changes: PasswordChanges { base: base.clone(), own: own.clone() },
            addresses: Addresses { base: base.clone() },
            identities: Identities {
                base: base.clone(),
                providers: Arc::clone(&providers),
                tokens,
                public_url: public_url.clone(),
            },
            device_logins: DeviceLogins { base: base.clone(), plans },
            token_exchanges: TokenExchanges { base: base.clone(), providers, public_url },
            removals: Removals { base: base.clone(), own },
            throttle: base.throttle.clone(),
            mailing: base.mailing.clone(),
            sessions: base.sessions.clone(),
            parts,
            projects,
            invitations,
            passkeys,
        }
    }
}
