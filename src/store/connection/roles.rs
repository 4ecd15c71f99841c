//! The roles of `ops/roles.sql`: a login for each kind of work, and creating them.

use std::path::Path;

use anyhow::{Context, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use fencepost_config::read_secret;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};
use sqlx::{
    ConnectOptions, Executor, PgConnection, error::DatabaseError, postgres::PgConnectOptions,
};

use super::migrate;

/// Creates the roles and their rights. It can be run again at any time.
const ROLES_SQL: &str = include_str!("../../../ops/roles.sql");
/// Characters of a role's password, at least.
pub const MIN_PASSWORD_CHARS: usize = 16;
/// The same, at most.
pub const MAX_PASSWORD_CHARS: usize = 200;
/// PostgreSQL's own number (`scram_iterations`).
const SCRAM_ITERATIONS: u32 = 4_096;
const SALT_BYTES: usize = 16;

/// The role of the database for each kind of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Jobs, of all projects.
    Hot,
    /// Reads and settings of one project: row-level security hides the rows of others.
    Console,
    /// Accounts, members and keys.
    People,
    /// The background loops, over all projects.
    Maint,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Hot, Self::Console, Self::People, Self::Maint];

    /// Its name in the database.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hot => "fencepost_hot",
            Self::Console => "fencepost_console",
            Self::People => "fencepost_people",
            Self::Maint => "fencepost_maint",
        }
    }

    /// The file of its password.
    #[must_use]
    pub const fn file(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Console => "console",
            Self::People => "people",
            Self::Maint => "maint",
        }
    }
}

/// The passwords of all roles.
#[derive(Debug, Clone)]
pub struct Logins {
    passwords: [SecretString; Role::ALL.len()],
    /// Whether vacuums log in as the owner. Before PostgreSQL 17, no other login may vacuum.
    vacuums_as_owner: bool,
}

impl Logins {
    /// Reads the folder, if one is given.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn given(folder: Option<&Path>) -> anyhow::Result<Option<Self>> {
        folder.map(Self::read).transpose()
    }

    /// Reads a folder with a file for each role.
    ///
    /// # Errors
    /// When a file is missing, or has no usable password.
    pub fn read(folder: &Path) -> anyhow::Result<Self> {
        let read = |role: Role| {
            let file = folder.join(role.file());
            let password = read_secret(&file)?;
            ensure!(
                password.bytes().all(|it| it.is_ascii_graphic())
                    && (MIN_PASSWORD_CHARS..=MAX_PASSWORD_CHARS).contains(&password.len()),
                "the password in {} must have {MIN_PASSWORD_CHARS} to {MAX_PASSWORD_CHARS} ASCII characters and no spaces",
                file.display()
            );
            Ok(SecretString::from(password))
        };
        let [hot, console, people, maint] = Role::ALL;
        let passwords = [read(hot)?, read(console)?, read(people)?, read(maint)?];
        Ok(Self { passwords, vacuums_as_owner: false })
    }

    /// Vacuums log in as the URL says.
    #[must_use]
    pub fn with_vacuums_by_owner(self) -> Self {
        Self { vacuums_as_owner: true, ..self }
    }

    /// Whether vacuums log in as the URL says.
    #[must_use]
    pub const fn vacuums_as_owner(&self) -> bool {
        self.vacuums_as_owner
    }

    fn password(&self, role: Role) -> &str {
        self.passwords[role as usize].expose_secret()
    }

    /// The same database, as this role.
    #[must_use]
    pub fn log_in(&self, options: &PgConnectOptions, role: Role) -> PgConnectOptions {
        options.clone().username(role.name()).password(self.password(role))
    }

    /// Connects as each role, and returns those whose login is refused, with the reason.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn refused(
        &self,
        options: &PgConnectOptions,
    ) -> sqlx::Result<Vec<(Role, sqlx::Error)>> {
        let mut refused = Vec::new();
        for role in Role::ALL {
            match self.log_in(options, role).connect().await {
                Ok(_) => (),
                Err(error) if is_refusal(&error) => refused.push((role, error)),
                Err(error) => return Err(error),
            }
        }
        Ok(refused)
    }
}

/// Whether the database refused a login: an error of class 28.
#[must_use]
pub fn is_refusal(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    code.is_some_and(|it| it.starts_with("28"))
}

/// Creates the roles with these passwords, and gives them their rights. To be run as the owner of
/// the database, after each migration.
///
/// # Errors
/// When the owner may not create roles, or the database does not answer.
pub async fn install(database_url: &str, logins: &Logins) -> anyhow::Result<()> {
    let mut conn = migrate::connect(database_url).await?;
    // A new table is locked for a moment, which live traffic may prevent.
    let created = migrate::change(&mut conn, async |conn| {
        conn.execute(sqlx::raw_sql(ROLES_SQL)).await?;
        Ok(())
    });
    created.await.context("the roles cannot be created")?;
    for role in Role::ALL {
        set_password(&mut conn, role, logins.password(role)).await?;
    }
    Ok(())
}

/// Only the verifier is sent: a statement may be logged by the server.
async fn set_password(conn: &mut PgConnection, role: Role, password: &str) -> anyhow::Result<()> {
    let verifier = scram_verifier(password, &rand::random::<[u8; SALT_BYTES]>());
    let sql = format!("alter role {} password '{verifier}'", role.name());
    let set = conn.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(sql))).await;
    set.with_context(|| format!("the password of {} cannot be set", role.name()))?;
    Ok(())
}

/// The verifier that PostgreSQL stores of a password, as of RFC 5803: SCRAM-SHA-256 with this salt.
fn scram_verifier(password: &str, salt: &[u8]) -> String {
    let mac = |key: &[u8], parts: &[&[u8]]| -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(key)
            .unwrap_or_else(|_| unreachable!("a key of any length will do"));
        parts.iter().for_each(|it| mac.update(it));
        mac.finalize().into_bytes().into()
    };
    // PBKDF2 with one block (RFC 8018).
    let mut block = mac(password.as_bytes(), &[salt, &1_u32.to_be_bytes()]);
    let mut salted = block;
    for _ in 1..SCRAM_ITERATIONS {
        block = mac(password.as_bytes(), &[&block]);
        salted.iter_mut().zip(block).for_each(|(sum, it)| *sum ^= it);
    }
    let stored_key = Sha256::digest(mac(&salted, &[b"Client Key"]));
    let server_key = mac(&salted, &[b"Server Key"]);
    let text = |bytes: &[u8]| BASE64_STANDARD.encode(bytes);
    let (salt, stored_key, server_key) = (text(salt), text(&stored_key), text(&server_key));
    format!("SCRAM-SHA-256${SCRAM_ITERATIONS}:{salt}${stored_key}:{server_key}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verifier_is_as_postgresql_computes_it() {
        // Of `create role … password 'pencil-and-paper-1'` on PostgreSQL 15.
        let stored = concat!(
            "SCRAM-SHA-256$4096:XoKsq/S3PaUR14qRG/Bvaw==",
            "$hH72vjqmA5VoEOtVAdeyUVZKNJzzHCwlffiZ7dxUeE0=",
            ":mq0YjqQkMJSDaGN7WPsJGuJK7xhNSa18QBTPuWXNfFc=",
        );
        let salt = stored.split(['$', ':']).nth(2).expect("a salt");
        let salt = BASE64_STANDARD.decode(salt).expect("base64");
        assert_eq!(scram_verifier("pencil-and-paper-1", &salt), stored);
    }

    #[test]
    fn a_folder_needs_a_usable_password_for_each_role() {
        let folder = std::env::temp_dir().join(format!("fencepost-roles-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let write = |file: &str, text: &str| std::fs::write(folder.join(file), text);
        for role in Role::ALL {
            let missing = Logins::read(&folder).expect_err("incomplete").to_string();
            assert!(missing.contains(role.file()), "{missing}");
            write(role.file(), "0123456789abcdef\n").expect("it is written");
        }
        let logins = Logins::read(&folder).expect("logins");
        assert_eq!(logins.password(Role::People), "0123456789abcdef");
        for bad in ["short", "with a space in it", "pässword-pässword", &"x".repeat(201)] {
            write("maint", bad).expect("it is written");
            let refused = Logins::read(&folder).expect_err("refused").to_string();
            assert!(refused.contains("16 to 200 ASCII characters"), "{refused}");
            assert!(!refused.contains(bad), "{refused}");
        }
        std::fs::remove_dir_all(&folder).expect("it goes");
    }
}
