//! Payloads, compared with the schemas of their job types before they are stored.

use std::collections::HashMap;

use fencepost_domain::{
    error::{Error, FieldError},
    ids::ProjectId,
    limits,
    payload_schema::PayloadSchema,
};
use fencepost_store::{
    self as store, connection::deadline::detached_in, jobs::job_types::TypeSchema,
};

use crate::Engine;

/// Such values are stored and leased byte for byte, but a schema cannot describe them.
pub const UNREADABLE: &str =
    "has a number beyond 1.8e308 or half a character, which cannot be compared with a schema";

const NO_SCHEMA: &str = "the job type has no schema: store one, or leave this out";

/// A payload to compare with the schema of its job type.
#[derive(Debug)]
pub struct ToCheck {
    /// Where the job is in its request, as `jobs[3].`.
    pub path: String,
    /// Whose schema it is compared with.
    pub job_type: String,
    /// JSON.
    pub payload: String,
}

/// Compares payloads with the schemas of their types.
///
/// # Errors
/// [`Error::Invalid`], with the place of each mistake.
pub(super) async fn check(
    engine: &Engine,
    project_id: ProjectId,
    payloads: Vec<ToCheck>,
) -> Result<(), Error> {
    if payloads.is_empty() {
        return Ok(());
    }
    let mut job_types: Vec<_> = payloads.iter().map(|it| it.job_type.clone()).collect();
    job_types.sort();
    job_types.dedup();
    if job_types.len() > limits::MAX_CHECKED_TYPES {
        let max = limits::MAX_CHECKED_TYPES;
        let message = format!("must not check payloads of more than {max} job types");
        return Err(Error::invalid("jobs", message));
    }
    let pools = engine.pools.clone();
    let read = async move {
        let mut conn = pools.read_for(project_id).await?;
        store::jobs::job_types::schemas_of(&mut conn, project_id, &job_types).await
    };
    let schemas = detached_in(&engine.tasks, read).await??;
    // Patterns are compiled, and a bulk request can be large.
    let checked = tokio::task::spawn_blocking(move || mistakes(&schemas, &payloads));
    let mistakes = checked.await.map_err(Error::internal)??;
    if mistakes.is_empty() { Ok(()) } else { Err(Error::Invalid(mistakes)) }
}

fn mistakes(schemas: &[TypeSchema], payloads: &[ToCheck]) -> Result<Vec<FieldError>, Error> {
    let mut read = HashMap::new();
    for TypeSchema { job_type, schema, .. } in schemas {
        let schema = serde_json::from_str(schema).map_err(Error::internal)?;
        read.insert(job_type.as_str(), PayloadSchema::read(&schema));
    }
    let compared = payloads.iter().flat_map(|it| compare(read.get(it.job_type.as_str()), it));
    Ok(compared.collect())
}

/// The mistakes of one payload.
fn compare(schema: Option<&Result<PayloadSchema, String>>, job: &ToCheck) -> Vec<FieldError> {
    let refused =
        |field: &str, message: &str| vec![FieldError::new(format!("{}{field}", job.path), message)];
    let schema = match schema {
        Some(Ok(schema)) => schema,
        Some(Err(message)) => return refused("check_payload", message),
        None => return refused("check_payload", NO_SCHEMA),
    };
    let Ok(payload) = serde_json::from_str(&job.payload) else {
        return refused("payload", UNREADABLE);
    };
    let mistakes = schema.mistakes(&payload).into_iter();
    mistakes
        .map(|it| FieldError::new(format!("{}payload{}", job.path, it.place), it.message))
        .collect()
}
