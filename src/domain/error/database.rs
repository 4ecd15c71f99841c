//! Errors of the database, by meaning.

use std::sync::Arc;

use super::Error;

/// Whether a unique key was violated.
#[must_use]
pub fn is_unique_violation(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(it) if it.is_unique_violation())
}

/// Whether a statement stopped waiting for a lock (SQLSTATE 55P03).
#[must_use]
pub fn is_lock_timeout(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(it) if it.code().as_deref() == Some("55P03"))
}

/// SQLSTATE classes in which the statement itself is at fault, not the database: data (22),
/// integrity (23), syntax and access (42).
const FAULTY_STATEMENT_CLASSES: [&str; 3] = ["22", "23", "42"];

/// Whether the database refused this very statement, so that repeating it cannot help.
#[must_use]
pub fn is_faulty_statement(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(it) => it
            .code()
            .is_some_and(|code| FAULTY_STATEMENT_CLASSES.iter().any(|it| code.starts_with(it))),
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::Encode(_) => true,
        _ => false,
    }
}

/// True if a row names an account that was deleted meanwhile, by the names of the schema.
fn is_of_deleted_account(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(error) = error else { return false };
    let names_account = |name: &str| name.ends_with("_account_id_fkey");
    error.is_foreign_key_violation() && error.constraint().is_some_and(names_account)
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        if is_of_deleted_account(&error) {
            return Self::Unauthorized;
        }
        if is_faulty_statement(&error) {
            return Self::internal(error);
        }
        if is_lock_timeout(&error) {
            return Self::JobLocked;
        }
        Self::Unavailable(Arc::new(error))
    }
}
