//! Types of the API's documents: two with one name would silently replace one another.

use std::collections::BTreeMap;

/// The documents, each with the folders whose types it may show.
const DOCUMENTS: &[(&str, &[&str])] = &[
    ("the native API", &["src/http", "src/domain"]),
    ("mobius", &["src/adapters/mobius", "src/adapters/work.rs", "src/domain"]),
    ("orch8", &["src/adapters/orch8", "src/adapters/work.rs", "src/domain"]),
    ("ojs", &["src/adapters/ojs", "src/adapters/work.rs", "src/domain"]),
    ("workflow-graph", &["src/adapters/workflow_graph", "src/adapters/work.rs", "src/domain"]),
];

/// The names under which a file's types appear in a document.
fn schema_names(text: &str) -> Vec<String> {
    let derives = text.split("#[derive(").skip(1);
    let derived = derives.filter_map(|part| {
        let (derived, rest) = part.split_once(")]")?;
        if !derived.split(',').any(|it| it.trim().ends_with("ToSchema")) {
            return None;
        }
        let (attributes, named) = ["pub struct ", "pub enum ", "struct ", "enum "]
            .iter()
            .filter_map(|it| rest.split_once(*it))
            .min_by_key(|(before, _)| before.len())?;
        let renamed = attributes.split_once("#[schema(as = ").map(|(_, part)| part);
        let name = renamed.unwrap_or(named);
        Some(name.split(|part: char| !part.is_alphanumeric() && part != '_').next()?.to_owned())
    });
    // A macro derives it for pages.
    let pages = text.split("page! {\n").skip(1).filter_map(|part| {
        let named = part.lines().map(str::trim).find(|it| !it.starts_with("///"))?;
        Some(named.trim_end_matches([' ', '{']).to_owned())
    });
    derived.chain(pages).collect()
}

#[test]
fn no_two_types_of_a_document_have_one_name() {
    let files = super::files("src");
    for (document, folders) in DOCUMENTS {
        let mut seen = BTreeMap::new();
        for (file, text) in files.iter().filter(|it| folders.iter().any(|at| it.0.starts_with(at)))
        {
            for name in schema_names(text) {
                let earlier = seen.insert(name.clone(), file);
                assert!(earlier.is_none(), "{document}: {name} is in {earlier:?} and in {file}");
            }
        }
        assert!(seen.len() > 5, "{document}: the types were found: {}", seen.len());
    }
}

#[test]
fn a_type_is_found_by_its_name_in_the_document() {
    let text = "#[derive(Debug, ToSchema)]\n#[schema(as = Other)]\npub struct Named {}\n\
                #[derive(utoipa::ToSchema)]\nenum Plain {}\n#[derive(Debug)]\nstruct Hidden {}\n\
                page! {\n    /// A page.\n    Page {\n";
    assert_eq!(schema_names(text), ["Other", "Plain", "Page"]);
}
