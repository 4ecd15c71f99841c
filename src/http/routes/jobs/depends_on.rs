//! `depends_on`: the parents of a new job, and the end of each that it waits for.

use std::fmt;

use fencepost_domain::dependency::{Dependency, When};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};
use utoipa::ToSchema;

use fencepost_web::wire::validate::Check;

/// A parent: its id, or in a workflow its key, or an object with the outcome of the parent to wait
/// for.
#[derive(Debug, Serialize, ToSchema)]
// For the schema: an untagged enum that is read by `serde` names no wrong field.
#[serde(untagged)]
pub enum DependsOn {
    /// The job runs when the parent has succeeded.
    Success(String),
    /// The job runs when the parent has ended like this.
    End(DependsOnEnd),
}

/// A parent, and the end of it that lets the job run.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DependsOnEnd {
    /// Id of the parent. In a workflow, send `key`.
    #[schema(example = "job_01m7w3ha3aextt8pkwwdmxsmqw")]
    job_id: Option<String>,
    /// In a workflow, and only there: key of the parent.
    key: Option<String>,
    /// The end of the parent that lets the job run. Default: succeeded.
    when: Option<When>,
}

impl<'de> Deserialize<'de> for DependsOn {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct StringOrObject;

        impl<'de> Visitor<'de> for StringOrObject {
            type Value = DependsOn;

            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("a string or an object")
            }

            fn visit_str<E>(self, parent: &str) -> Result<DependsOn, E> {
                Ok(DependsOn::Success(parent.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DependsOn, A::Error> {
                DependsOnEnd::deserialize(MapAccessDeserializer::new(map)).map(DependsOn::End)
            }
        }

        from.deserialize_any(StringOrObject)
    }
}

impl DependsOn {
    /// The parent by its id; `number` is its index in the request.
    pub fn by_id(self, number: usize, check: &mut Check) -> Dependency<String> {
        self.named("job_id", number, check)
    }

    /// The parent by its key; `number` is its index in the request.
    pub fn by_key(self, number: usize, check: &mut Check) -> Dependency<String> {
        self.named("key", number, check)
    }

    fn named(self, wanted: &str, number: usize, check: &mut Check) -> Dependency<String> {
        let DependsOnEnd { job_id, key, when } = match self {
            Self::Success(parent) => return Dependency::on_success(parent),
            Self::End(end) => end,
        };
        let (parent, other, out_of_place) = match wanted {
            "key" => (key, "job_id", job_id.is_some()),
            _ => (job_id, "key", key.is_some()),
        };
        if parent.is_none() {
            check.refuse(&format!("depends_on[{number}].{wanted}"), "is missing");
        }
        if out_of_place {
            let message = format!("must not be sent here: name the parent by its {wanted}");
            check.refuse(&format!("depends_on[{number}].{other}"), message);
        }
        Dependency { parent: parent.unwrap_or_default(), when: when.unwrap_or_default() }
    }
}
