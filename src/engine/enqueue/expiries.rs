//! Jobs that expire before they may run.

use fencepost_domain::error::Error;
use fencepost_store::jobs::enqueue::{NewJob, StoredJob};

/// Checks, by the database's clock, that these jobs expire later than they may run. Each has the
/// path below which its fields are.
///
/// # Errors
/// [`Error::Invalid`] names the first that does not.
pub(super) fn check<'a>(
    mut jobs: impl Iterator<Item = (&'a NewJob, &'a str)>,
    stored: &[StoredJob],
) -> Result<(), Error> {
    let late = jobs.find(|(job, _)| {
        let expires_at = job.extras.as_ref().and_then(|it| it.expires_at);
        let found = stored.iter().find(|found| found.id == job.id);
        expires_at.zip(found).is_some_and(|(expires_at, found)| expires_at <= found.run_at)
    });
    let Some((_, path)) = late else { return Ok(()) };
    Err(Error::invalid(format!("{path}expires_at"), "must be later than run_at"))
}
