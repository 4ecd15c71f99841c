//! Templates of new workflows: the input that they name, and what is filled when they are stored.

use fencepost_domain::{
    dependency::Dependency,
    error::Error,
    limits,
    plan::Tenant,
    raw_json::RawNode,
    template::{self, Place, TemplateError, TemplateMode},
    text::json_depth,
};
use fencepost_engine::enqueue::NewJob;
use serde_json::value::RawValue;

use crate::wire::validate::Check;

/// The input of a workflow; null if none was sent.
///
/// # Errors
/// [`Error::FieldTooLarge`]; other broken rules are added to `check`.
pub fn read_input<'a>(
    field: &str,
    sent: Option<&'a RawValue>,
    tenant: Tenant,
    check: &mut Check,
) -> Result<RawNode<'a>, Error> {
    let Some(sent) = sent else { return Ok(RawNode::read(template::NULL)) };
    check.size(field, sent, tenant.limits.max_payload_bytes())?;
    // It may be nested too deeply to be read.
    if !check.depth(field, sent) {
        return Ok(RawNode::read(template::NULL));
    }
    Ok(RawNode::read(sent.get()))
}

/// Values that templates are filled with.
#[derive(Debug)]
pub struct Templates<'a> {
    input: &'a RawNode<'a>,
    max_payload_bytes: usize,
    /// Bytes that have filled payloads of the workflow so far.
    filled_bytes: usize,
}

impl<'a> Templates<'a> {
    /// The values of one workflow.
    #[must_use]
    pub fn new(input: &'a RawNode<'a>, tenant: Tenant) -> Self {
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
        // Refused elsewhere.
        if json_depth(&job.payload) > limits::MAX_JSON_DEPTH {
            return;
        }
        let (mut has_places, mut needs_results) = (false, false);
        let checked = template::fill(&job.payload, &mut |place| {
            has_places = true;
            match place {
                Place::Input(path) => match template::at(self.input, path) {
                    None if mode == TemplateMode::Strict => {
                        Err(TemplateError::Missing(path.to_owned()))
                    }
                    found => Ok(Some(found.unwrap_or(template::NULL))),
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
            Ok(filled) => {
                self.filled_bytes += filled.bytes;
                if self.filled_bytes > limits::MAX_BATCH_BODY_BYTES {
                    let max = limits::MAX_BATCH_BODY_BYTES;
                    check.refuse(field, format!("the input fills more than {max} bytes"));
                } else if needs_results {
                    job.extras.get_or_insert_default().is_template = true;
                } else {
                    self.keep(job, filled.payload, field, check);
                }
            }
        }
    }

    fn keep(&self, job: &mut NewJob, filled: String, field: &str, check: &mut Check) {
        let max = self.max_payload_bytes;
        if filled.len() > max {
            check.refuse(field, format!("is larger than {max} bytes when it is filled"));
        } else {
            job.payload = filled;
        }
    }
}
