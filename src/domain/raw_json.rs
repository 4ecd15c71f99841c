//! Well-formed JSON as a tree of its texts: each value is the bytes that were sent. Numbers of any
//! size and strings that are no text stay what they are.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
};

use crate::limits::MAX_JSON_DEPTH;

/// A value and its children. The last of several fields with one name counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawNode<'a> {
    /// The text of the value, as it was sent.
    pub text: &'a str,
    /// Position of the value in the text that was read, in bytes.
    begins: usize,
    children: Children<'a>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Children<'a> {
    None,
    Items(Vec<RawNode<'a>>),
    /// In their order; the names lead to the last one of each.
    Fields {
        values: Vec<RawNode<'a>>,
        names: HashMap<Cow<'a, str>, usize>,
    },
}

impl<'a> RawNode<'a> {
    /// Reads well-formed JSON. What is nested deeper than [`MAX_JSON_DEPTH`] has no children.
    ///
    /// ```
    /// # use fencepost_domain::raw_json::RawNode;
    /// let node = RawNode::read(r#" {"a": [1.50, {"b": 1}], "a": [18446744073709551616]} "#);
    /// let at = |path: &[&str]| node.at(path.iter().copied()).map(|it| it.text);
    /// assert_eq!(at(&["a", "0"]), Some("18446744073709551616"));
    /// assert_eq!(at(&["a", "1"]), None);
    /// assert_eq!(at(&["b"]), None);
    /// assert_eq!((at(&["a", "00"]), at(&["a", "+0"])), (None, None));
    /// let list = RawNode::read(r#"[1.50, {"b}": "\ud83d"}]"#);
    /// assert_eq!(list.at(["1", "b}"].into_iter()).map(|it| it.text), Some(r#""\ud83d""#));
    /// ```
    #[must_use]
    pub fn read(json: &'a str) -> Self {
        Reader { json, at: 0, depth: 0 }.value()
    }

    /// The value at a path of names and indexes.
    pub fn at<'p>(&self, mut path: impl Iterator<Item = &'p str>) -> Option<&Self> {
        path.try_fold(self, |node, name| match &node.children {
            Children::None => None,
            Children::Items(items) => {
                let index = name.parse::<usize>().ok().filter(|it| it.to_string() == name)?;
                items.get(index)
            }
            Children::Fields { values, names } => values.get(*names.get(name)?),
        })
    }

    /// The items of a list, in their order; none of any other value.
    #[must_use]
    pub fn items(&self) -> Option<&[Self]> {
        match &self.children {
            Children::Items(items) => Some(items),
            Children::None | Children::Fields { .. } => None,
        }
    }

    /// The fields of an object, by name; none of any other value.
    ///
    /// ```
    /// # use fencepost_domain::raw_json::RawNode;
    /// let node = RawNode::read(r#"{"b": [1], "a": 2, "b": 3.0}"#);
    /// let fields = node.fields().unwrap().into_iter().map(|(name, it)| (name, it.text));
    /// assert!(fields.eq([("a", "2"), ("b", "3.0")]));
    /// assert_eq!((RawNode::read("[]").fields(), node.items()), (None, None));
    /// ```
    #[must_use]
    pub fn fields(&self) -> Option<BTreeMap<&str, &Self>> {
        let Children::Fields { values, names } = &self.children else { return None };
        Some(names.iter().filter_map(|(name, at)| Some((&**name, values.get(*at)?))).collect())
    }

    /// The strings among its values, in their order: where each begins, and its text with quotes.
    #[must_use]
    pub fn strings(&self) -> Vec<(usize, &'a str)> {
        let mut found = Vec::new();
        self.add_strings(&mut found);
        found
    }

    fn add_strings(&self, found: &mut Vec<(usize, &'a str)>) {
        match &self.children {
            Children::None if self.text.starts_with('"') => found.push((self.begins, self.text)),
            Children::None => (),
            Children::Items(items) => items.iter().for_each(|it| it.add_strings(found)),
            Children::Fields { values, .. } => values.iter().for_each(|it| it.add_strings(found)),
        }
    }
}

/// The text of a string, whose content is given as it was sent. What is no text stays as sent.
fn decoded(sent: &str) -> Cow<'_, str> {
    if !sent.contains('\\') {
        return sent.into();
    }
    serde_json::from_str::<String>(&format!("\"{sent}\"")).map_or(sent.into(), Cow::Owned)
}

/// A text, and the position of its next value.
struct Reader<'a> {
    json: &'a str,
    at: usize,
    /// Arrays and objects around it.
    depth: usize,
}

impl<'a> Reader<'a> {
    fn byte(&self) -> Option<u8> {
        self.json.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while self.byte().is_some_and(|it| it.is_ascii_whitespace()) {
            self.at += 1;
        }
    }

    /// Skips this byte, if it is the next one.
    fn takes(&mut self, byte: u8) -> bool {
        self.skip_space();
        let is_next = self.byte() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    fn value(&mut self) -> RawNode<'a> {
        self.skip_space();
        let from = self.at;
        self.depth += 1;
        let children = match self.byte() {
            Some(b'{' | b'[') if self.depth > MAX_JSON_DEPTH => {
                self.skip();
                Children::None
            }
            Some(b'{') => self.fields(),
            Some(b'[') => Children::Items(self.items()),
            Some(b'"') => {
                self.string();
                Children::None
            }
            _ => {
                let is_part = |it: u8| !it.is_ascii_whitespace() && !b",]}".contains(&it);
                while self.byte().is_some_and(is_part) {
                    self.at += 1;
                }
                Children::None
            }
        };
        self.depth -= 1;
        RawNode { text: self.slice(from), begins: from, children }
    }

    /// Skips an array or object.
    fn skip(&mut self) {
        let mut open = 0_usize;
        while let Some(byte) = self.byte() {
            match byte {
                b'"' => {
                    self.string();
                    continue;
                }
                b'{' | b'[' => open += 1,
                b'}' | b']' => open = open.saturating_sub(1),
                _ => (),
            }
            self.at += 1;
            if open == 0 {
                return;
            }
        }
    }

    fn slice(&self, from: usize) -> &'a str {
        self.json.get(from..self.at.min(self.json.len())).unwrap_or_default()
    }

    fn fields(&mut self) -> Children<'a> {
        let (mut values, mut names) = (Vec::new(), HashMap::new());
        self.takes(b'{');
        // Each round skips the first quote at least, so it ends whatever the text is.
        while !self.takes(b'}') && self.byte().is_some() {
            let name = self.string();
            self.takes(b':');
            names.insert(decoded(name), values.len());
            values.push(self.value());
            self.takes(b',');
        }
        Children::Fields { values, names }
    }

    fn items(&mut self) -> Vec<RawNode<'a>> {
        let mut items = Vec::new();
        self.takes(b'[');
        while !self.takes(b']') && self.byte().is_some() {
            let begins = self.at;
            items.push(self.value());
            if !self.takes(b',') && self.at == begins {
                // Not well-formed.
                break;
            }
        }
        items
    }

    /// The content of the string that begins here.
    fn string(&mut self) -> &'a str {
        self.at += 1;
        let from = self.at;
        loop {
            match self.byte() {
                Some(b'\\') => self.at += 2,
                Some(b'"') | None => break,
                Some(_) => self.at += 1,
            }
        }
        let content = self.slice(from);
        self.at += 1;
        content
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[a-c\"\\\\{}\\[\\],:é\n]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[a-c\"\\\\.é]{0,3}", inner, 0..4)
                    .prop_map(|it| Value::Object(it.into_iter().collect())),
            ]
        })
    }

    /// Each value of the tree has the text of the value that a parser finds at the same place.
    fn agrees(node: &RawNode<'_>, value: &Value) -> bool {
        let read: Value = serde_json::from_str(node.text).expect("JSON");
        read == *value
            && match (&node.children, value) {
                (Children::Items(items), Value::Array(values)) => {
                    items.len() == values.len()
                        && items.iter().zip(values).all(|(node, value)| agrees(node, value))
                }
                (Children::Fields { names, .. }, Value::Object(values)) => {
                    names.len() == values.len()
                        && values.iter().all(|(name, value)| {
                            let found = node.at(std::iter::once(name.as_str()));
                            found.is_some_and(|it| agrees(it, value))
                        })
                }
                (Children::None, Value::Array(_) | Value::Object(_)) => false,
                (Children::None, _) => true,
                _ => false,
            }
    }

    #[test]
    fn values_nested_too_deeply_are_one_text() {
        let deep = format!("[{0}\"]\"{1},7]", "[".repeat(100_000), "]".repeat(100_000));
        let node = RawNode::read(&deep);
        assert_eq!(node.at(["1"].into_iter()).map(|it| it.text), Some("7"));
        let path = vec!["0"; MAX_JSON_DEPTH];
        assert!(node.at(path.iter().copied()).is_none_or(|it| it.children == Children::None));
        assert!(RawNode::read("[}").strings().is_empty());
        assert!(RawNode::read("{\"a").strings().is_empty());
    }

    proptest! {
        #[test]
        fn the_tree_is_what_a_parser_reads(value in json(), is_pretty in any::<bool>()) {
            let text = match is_pretty {
                true => serde_json::to_string_pretty(&value),
                false => serde_json::to_string(&value),
            };
            let text = text.expect("JSON");
            prop_assert!(agrees(&RawNode::read(&text), &value), "{text}");
        }
    }
}
