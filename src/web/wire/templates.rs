//! Templates of new workflows: the input that they name, and what is filled when they are stored.

use fencepost_domain::{
    dependency::Dependency,
    error::Error,
    limits,
    plan::Tenant,
    template::{self, Place, TemplateError, TemplateMode},
};
use fencepost_engine::enqueue::NewJob;
use serde_json::{Value, value::RawValue};

use crate::wire::validate::Check;

const UNREADABLE: &str = "has a number or text that a template cannot have";

/// The input of a workflow; null if none was sent.
///
/// # Errors
/// [`Error::FieldTooLarge`]; other broken rules are added to `check`.
pub fn read_input(
    field: &str,
    sent: Option<&RawValue>,
    tenant: Tenant,
    check: &mut Check,
) -> Result<Value, Error> {
    let Some(sent) = sent else { return Ok(Value::Null) };
    check.size(field, sent, tenant.limits.max_payload_bytes())?;
    check.depth(field, sent);
    let read = serde_json::from_str(sent.get());
    if read.is_err() {
        check.refuse(field, UNREADABLE);
    }
    Ok(read.unwrap_or_default())
}

/// Values that templates are filled with.
#[derive(Debug)]
pub struct Templates<'a> {
    input: &'a Value,
    max_payload_bytes: usize,
    /// Bytes that have filled payloads of the workflow so far.
    filled_bytes: usize,
}

impl<'a> Templates<'a> {
    /// The values of one workflow.
    #[must_use]
    pub fn new(input: &'a Value, tenant: Tenant) -> Self {
        let max_payload_bytes = tenant.limits.max_payload_bytes();
        Self { input, max_payload_bytes, filled_bytes: 0 }
    }

    /// Checks a template, and fills it, unless it needs results of parents: then it is filled when
    /// it is delivered, so that nothing that was filled in is read again.
    pub fn accept(
        &mut self,
        job: &mut NewJob,
        mode: TemplateMode,
        parents: &[Dependency<String>],
        field: &str,
        check: &mut Check,
    ) {
        if self.filled_bytes > limits::MAX_BATCH_BODY_BYTES {
            return;
        }
        let Ok(mut payload) = serde_json::from_str::<Value>(&job.payload) else {
            check.refuse(field, UNREADABLE);
            return;
        };
        let (mut has_places, mut needs_results) = (false, false);
        let checked = template::fill(&mut payload, &mut |place| {
            has_places = true;
            match place {
                Place::Input(path) => match template::at(self.input, path) {
                    None if mode == TemplateMode::Strict => {
                        Err(TemplateError::Missing(path.to_owned()))
                    }
                    found => Ok(Some(found.unwrap_or(&Value::Null))),
                },
                Place::Step { key, .. } if parents.iter().any(|it| it.parent == key) => {
                    needs_results = true;
                    Ok(None)
                }
                Place::Step { key, .. } => Err(TemplateError::NoParent(key.to_owned())),
            }
        });
        match checked {
            // Its bytes stay as they were sent.
            Ok(_) if !has_places => (),
            Err(error) => check.refuse(field, error.to_string()),
            Ok(bytes) => {
                self.filled_bytes += bytes;
                if self.filled_bytes > limits::MAX_BATCH_BODY_BYTES {
                    let max = limits::MAX_BATCH_BODY_BYTES;
                    check.refuse(field, format!("the input fills more than {max} bytes"));
                } else if needs_results {
                    job.extras.get_or_insert_default().is_template = true;
                } else {
                    self.keep(job, &payload, field, check);
                }
            }
        }
    }

    fn keep(&self, job: &mut NewJob, payload: &Value, field: &str, check: &mut Check) {
        let (filled, max) = (payload.to_string(), self.max_payload_bytes);
        if filled.len() > max {
            check.refuse(field, format!("is larger than {max} bytes when it is filled"));
        } else {
            job.payload = filled;
        }
    }
}
