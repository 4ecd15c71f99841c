//! Bounds of a number in a request, as its schema documents them. A parser knows only those of the
//! number's type in the server.

use std::collections::BTreeMap;

use serde_json::{Number, Value};
use serde_path_to_error::{Path, Segment};
use utoipa::ToSchema;

use super::openapi::BOUNDS;

/// The least and the greatest value of the number at a path of a request; none: the schema has no
/// such bound.
pub struct Range {
    /// The least value.
    pub min: Option<Number>,
    /// The greatest value.
    pub max: Option<Number>,
}

/// The bounds of the number at `path`; none: no schema describes it.
#[must_use]
pub fn of<T: ToSchema>(path: &Path) -> Option<Range> {
    let mut named = Vec::new();
    T::schemas(&mut named);
    let json = |(name, schema)| Some((name, serde_json::to_value(schema).ok()?));
    let named: BTreeMap<String, Value> = named.into_iter().filter_map(json).collect();
    let root = serde_json::to_value(T::schema()).ok()?;
    let at = path.iter().try_fold(&root, |at, segment| match segment {
        Segment::Map { key } => find(at, &named, &|it| it.get("properties")?.get(key)),
        Segment::Seq { .. } => find(at, &named, &|it| it.get("items")),
        Segment::Enum { .. } | Segment::Unknown => None,
    })?;
    let bounds = at.get(BOUNDS).unwrap_or(at);
    let bound = |name: &str| bounds.get(name)?.as_number().cloned();
    Some(Range { min: bound("minimum"), max: bound("maximum") })
}

/// Returns what `part` finds in a schema, in one that it names, or in one of which it is made.
fn find<'a>(
    schema: &'a Value,
    named: &'a BTreeMap<String, Value>,
    part: &impl Fn(&'a Value) -> Option<&'a Value>,
) -> Option<&'a Value> {
    if let Some(found) = part(schema) {
        return Some(found);
    }
    let reference = schema.get("$ref").and_then(|it| it.as_str()?.rsplit('/').next());
    if let Some(referred) = reference.and_then(|it| named.get(it)) {
        return find(referred, named, part);
    }
    let parts = ["allOf", "oneOf", "anyOf"].iter().filter_map(|it| schema.get(it)?.as_array());
    parts.flatten().find_map(|it| find(it, named, part))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;
    use crate::wire::openapi::range;

    #[derive(Deserialize, ToSchema)]
    #[expect(dead_code, reason = "only their schemas are used")]
    struct Order {
        #[schema(extensions(("bounds" = json!(range(1, 9)))))]
        count: Option<u32>,
        lines: Option<Vec<Line>>,
        first: Option<Line>,
        note: u8,
    }

    #[derive(Deserialize, ToSchema)]
    #[expect(dead_code, reason = "only their schemas are used")]
    struct Line {
        #[schema(minimum = -5, maximum = 5)]
        shift: i16,
    }

    fn found(sent: &Value) -> Option<String> {
        let error = serde_path_to_error::deserialize::<_, Order>(sent).err()?;
        let range = of::<Order>(error.path())?;
        Some(format!("{} to {}", range.min?, range.max?))
    }

    #[test]
    fn the_bounds_of_a_number_are_those_of_its_schema() {
        assert_eq!(found(&json!({"count": -1, "note": 0})).expect("bounds"), "1 to 9");
        let line = json!({"shift": 99_999});
        let nested = json!({"lines": [{"shift": 0}, line], "note": 0});
        assert_eq!(found(&nested).expect("bounds"), "-5 to 5");
        assert_eq!(found(&json!({"first": line, "note": 0})).expect("bounds"), "-5 to 5");
    }

    #[test]
    fn a_number_without_bounds_has_none() {
        assert_eq!(found(&json!({"note": 300})), None);
    }
}
