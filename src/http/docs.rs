//! The documentation, served by every node: the target of each error's `docs_url` and each alert's
//! `runbook_url`. Browsers get HTML, other clients the Markdown; nothing is loaded from other
//! sites.

use std::sync::Arc;

use axum::{
    Router,
    body::Bytes,
    http::{
        HeaderMap,
        header::{ACCEPT, CONTENT_TYPE, VARY},
    },
    response::{IntoResponse, Response},
    routing::{self, MethodRouter},
};
use pulldown_cmark::{CowStr, Event, Options, Parser, Tag, TagEnd, html};
use rust_embed::RustEmbed;

/// The pages in docs/ and their pictures, by path.
#[derive(RustEmbed)]
#[folder = "docs/"]
#[include = "*.md"]
#[include = "*.png"]
struct Pages;

/// The examples that pages link to, by path.
#[derive(RustEmbed)]
#[folder = "examples/"]
#[include = "README.md"]
#[include = "adapters/*.mjs"]
#[include = "adapters/*.py"]
#[include = "adapters/*.sh"]
#[include = "*/worker.*"]
struct Examples;

/// What browsers ask for at every page.
const ICON: &str = include_str!("../../assets/icon.svg");
const HEAD: &str = include_str!("pages/head.html");

/// The names of all pages, as paths below `/docs/`.
pub fn names() -> impl Iterator<Item = String> {
    Pages::iter().filter_map(|it| it.strip_suffix(".md").map(str::to_owned))
}

/// `/docs/errors` and similar, also with the suffix that links between pages have; the examples.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let icon = async || ([(CONTENT_TYPE, "image/svg+xml")], ICON);
    examples(pages()).route("/favicon.ico", routing::get(icon))
}

/// Each as the text that it is, so that a browser shows it.
fn examples<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    Examples::iter().fold(router, |router, name| {
        let Some(file) = Examples::get(&name) else { return router };
        let path = format!("/examples/{name}");
        if name.ends_with(".md") {
            return router.route(&path, page(&file.data));
        }
        let text = Bytes::from(file.data.into_owned());
        let text = move || async move { ([(CONTENT_TYPE, "text/plain; charset=utf-8")], text) };
        router.route(&path, routing::get(text))
    })
}

fn pages<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let pictures = Pages::iter().filter(|it| it.ends_with(".png")).filter_map(|it| {
        let file = Pages::get(&it)?;
        Some((format!("/docs/{it}"), Bytes::from(file.data.into_owned())))
    });
    let router = pictures.fold(Router::new(), |router, (path, picture)| {
        let picture = move || async move { ([(CONTENT_TYPE, "image/png")], picture) };
        router.route(&path, routing::get(picture))
    });
    names().fold(router, |router, name| {
        let Some(file) = Pages::get(&format!("{name}.md")) else { return router };
        let page = page(&file.data);
        router
            .route(&format!("/docs/{name}"), page.clone())
            .route(&format!("/docs/{name}.md"), page)
    })
}

fn page<S: Clone + Send + Sync + 'static>(markdown: &[u8]) -> MethodRouter<S> {
    let page = Arc::new(DocsPage::of(String::from_utf8_lossy(markdown).into_owned()));
    routing::get(move |headers: HeaderMap| {
        let answer = page.answer(&headers);
        async move { answer }
    })
}

/// A page in both formats.
struct DocsPage {
    markdown: Bytes,
    html: Bytes,
}

impl DocsPage {
    fn of(markdown: String) -> Self {
        let title = markdown.lines().next().unwrap_or_default().trim_start_matches("# ");
        let html = HEAD.replace("{title}", &escape(title))
            + &to_html(&markdown)
            + "</main></body></html>\n";
        Self { html: html.into(), markdown: markdown.into() }
    }

    fn answer(&self, headers: &HeaderMap) -> Response {
        let accepted = headers.get(ACCEPT).and_then(|it| it.to_str().ok()).unwrap_or_default();
        let (kind, text) = if accepted.contains("text/html") {
            ("text/html; charset=utf-8", &self.html)
        } else {
            ("text/plain; charset=utf-8", &self.markdown)
        };
        ([(CONTENT_TYPE, kind), (VARY, "accept")], text.clone()).into_response()
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Each heading gets an anchor: its words in lower case, with hyphens.
fn to_html(markdown: &str) -> String {
    let mut events: Vec<_> = Parser::new_ext(markdown, Options::ENABLE_TABLES).collect();
    for at in 0..events.len() {
        if !matches!(events[at], Event::Start(Tag::Heading { .. })) {
            continue;
        }
        let inside =
            events[at..].iter().take_while(|it| !matches!(it, Event::End(TagEnd::Heading(_))));
        let words = inside.filter_map(|it| match it {
            Event::Text(text) | Event::Code(text) => Some(text.as_ref()),
            _ => None,
        });
        let name = anchor(&words.collect::<String>());
        if let Event::Start(Tag::Heading { id, .. }) = &mut events[at] {
            *id = Some(CowStr::from(name));
        }
    }
    let mut page = String::new();
    html::push_html(&mut page, events.into_iter());
    page
}

fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|it| it.is_alphanumeric() || " -_".contains(*it));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_can_be_linked_and_tables_are_tables() {
        let page =
            to_html("# One\n\n## A `code_word`, and more\n\n| a | b |\n|---|---|\n| 1 | 2 |\n");
        assert!(page.contains("<h2 id=\"a-code_word-and-more\">"), "{page}");
        assert!(page.contains("<td>2</td>"), "{page}");
    }

    #[test]
    fn the_pages_are_all_there() {
        let names: Vec<_> = names().collect();
        for wanted in ["errors", "operations", "runbooks/queue-stuck", "adr/0001-coalesced-writes"]
        {
            assert!(names.iter().any(|it| it == wanted), "{wanted}: {names:?}");
        }
    }
}
