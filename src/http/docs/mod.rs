//! The documentation as a site, served by every node: the target of each error's `docs_url` and
//! each alert's `runbook_url`. Browsers get HTML, other clients the Markdown; nothing is loaded
//! from other sites.

mod contents;
mod reference;
mod render;

use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock},
};

use axum::{
    Router,
    body::Bytes,
    http::{
        HeaderMap,
        header::{ACCEPT, CONTENT_TYPE, VARY},
    },
    response::{IntoResponse, Redirect, Response},
    routing::{self, MethodRouter},
};
use rust_embed::RustEmbed;
use serde::Serialize;

use crate::packages;

use self::{
    contents::{GROUPS, REST, START, in_order},
    render::{Rendered, escape},
};

/// The pages in docs/ and their pictures, by path.
#[derive(RustEmbed)]
#[folder = "../../docs/"]
#[include = "*.md"]
#[include = "*.png"]
#[include = "*.svg"]
struct Pages;

/// The examples that pages link to, by path.
#[derive(RustEmbed)]
#[folder = "../../examples/"]
#[include = "README.md"]
#[include = "adapters/*.mjs"]
#[include = "adapters/*.py"]
#[include = "adapters/*.sh"]
#[include = "*/worker.*"]
struct Examples;

/// The pages of the libraries.
#[derive(RustEmbed)]
#[folder = "../../clients/"]
#[include = "*/README.md"]
struct Libraries;

/// The icon that browsers ask for at every page.
const ICON: &str = include_str!("../../../assets/icon.svg");
const SITE: &str = include_str!("site.html");
const STYLE: &str = include_str!("site.css");
const SCRIPT: &str = include_str!("site.js");

/// Longest description of a page in `/llms.txt`.
const MAX_ABOUT_CHARACTERS: usize = 200;
/// Words of a section that the search knows. Few sections have more.
const MAX_SEARCHED_CHARACTERS: usize = 3_000;

/// The names of all pages, as paths below `/docs/`.
pub fn names() -> impl Iterator<Item = String> {
    Pages::iter().filter_map(|it| it.strip_suffix(".md").map(str::to_owned))
}

/// `/docs/errors` and similar, also with the suffix that links between pages have; the examples,
/// the libraries, and what the site needs.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    // Every node of this process serves the same site.
    static ROUTES: LazyLock<Router> = LazyLock::new(rendered);
    ROUTES.clone().with_state(())
}

fn rendered() -> Router {
    let site = Site::read();
    let text = |kind: &'static str, text: Bytes| {
        routing::get(move || async move { ([(CONTENT_TYPE, kind)], text) })
    };
    let fixed = |text: &'static str| Bytes::from_static(text.as_bytes());
    site.pages()
        .route("/docs", routing::get(async || Redirect::permanent("/docs/")))
        .route("/docs/site.css", text("text/css; charset=utf-8", fixed(STYLE)))
        .route("/docs/site.js", text("text/javascript; charset=utf-8", fixed(SCRIPT)))
        .route("/docs/search.json", text("application/json", site.search().into()))
        .route("/llms.txt", text("text/plain; charset=utf-8", site.summary().into()))
        .route("/favicon.ico", text("image/svg+xml", fixed(ICON)))
}

/// All pages, rendered.
struct Site {
    pages: BTreeMap<String, DocsPage>,
}

struct DocsPage {
    /// Where it is.
    path: String,
    title: String,
    markdown: String,
    rendered: Rendered,
}

impl Site {
    fn read() -> Self {
        let pages = names().filter_map(|name| {
            let path = match &*name {
                START => "/docs/".to_owned(),
                _ => format!("/docs/{name}"),
            };
            let file = Pages::get(&format!("{name}.md"))?;
            Some((name, DocsPage::of(path, &file.data)))
        });
        let reference = reference::pages().into_iter().map(|(name, text)| {
            let page = DocsPage::of(format!("/docs/{name}"), text.as_bytes());
            (name, page)
        });
        Self { pages: pages.chain(reference).collect() }
    }

    fn pages(&self) -> Router {
        let mut router = Router::new();
        for path in Pages::iter() {
            let kind = match path.rsplit('.').next() {
                Some("png") => "image/png",
                Some("svg") => "image/svg+xml",
                _ => continue,
            };
            let Some(file) = Pages::get(&path) else { continue };
            let picture = Bytes::from(file.data.into_owned());
            let picture = move || async move { ([(CONTENT_TYPE, kind)], picture) };
            router = router.route(&format!("/docs/{path}"), routing::get(picture));
        }
        for (name, page) in &self.pages {
            let served = self.serve(page);
            router =
                router.route(&page.path, served.clone()).route(&format!("/docs/{name}.md"), served);
        }
        self.files(router)
    }

    /// The pages of other folders; all else as the text that it is, so that a browser shows it.
    fn files(&self, mut router: Router) -> Router {
        let examples = Examples::iter().map(|it| (format!("/examples/{it}"), Examples::get(&it)));
        let libraries = Libraries::iter().map(|it| (format!("/clients/{it}"), Libraries::get(&it)));
        let packages = DocsPage::of("/clients/".to_owned(), packages::page().as_bytes());
        router = router
            .route("/clients", routing::get(async || Redirect::permanent("/clients/")))
            .route(&packages.path, self.serve(&packages))
            .route(&packages.markdown_path(), self.serve(&packages));
        for (path, file) in examples.chain(libraries) {
            let Some(file) = file else { continue };
            if path.ends_with(".md") {
                let page = DocsPage::of(path.clone(), &file.data);
                router = router.route(&path, self.serve(&page));
                continue;
            }
            let text = Bytes::from(file.data.into_owned());
            let text = move || async move { ([(CONTENT_TYPE, "text/plain; charset=utf-8")], text) };
            router = router.route(&path, routing::get(text));
        }
        router
    }

    fn serve(&self, page: &DocsPage) -> MethodRouter {
        let html = SITE
            .replace("{title} · Fencepost", &full_title(&page.title))
            .replace("{contents}", &self.contents(&page.path))
            .replace("{neighbours}", &self.neighbours(&page.path))
            .replace("{toc}", &page.toc())
            .replace("{markdown}", &page.markdown_path())
            .replace("{page}", &page.rendered.html);
        let formats = Arc::new((Bytes::from(html), Bytes::from(page.markdown.clone())));
        routing::get(move |headers: HeaderMap| {
            let answer = choose(&formats, &headers);
            async move { answer }
        })
    }

    fn contents(&self, current: &str) -> String {
        let item = |name: &str| {
            let Some(page) = self.pages.get(name) else { return String::new() };
            let mark = if page.path == current { " aria-current=\"page\"" } else { "" };
            format!("<li><a href=\"{}\"{mark}>{}</a></li>\n", page.path, escape(&page.title))
        };
        let mut html = String::new();
        for (group, names) in GROUPS {
            let items: String = names.iter().map(|it| item(it)).collect();
            html += &format!("<h2>{group}</h2>\n<ul>\n{items}</ul>\n");
        }
        for (group, folder) in REST {
            let items: String =
                self.pages.keys().filter(|it| it.starts_with(folder)).map(|it| item(it)).collect();
            let open = if items.contains("aria-current") { " open" } else { "" };
            html += &format!(
                "<details{open}><summary>{group}</summary>\n<ul>\n{items}</ul></details>\n"
            );
        }
        html
    }

    /// The pages before and after this one.
    fn neighbours(&self, current: &str) -> String {
        let order: Vec<_> = in_order().filter_map(|it| self.pages.get(it)).collect();
        let Some(at) = order.iter().position(|it| it.path == current) else {
            return String::new();
        };
        let link = |page: Option<&&DocsPage>, rel: &str, mark: [&str; 2]| {
            page.map_or_else(
                || "<span></span>".to_owned(),
                |page| {
                    let (path, title) = (&page.path, escape(&page.title));
                    let [before, after] = mark;
                    format!("<a rel=\"{rel}\" href=\"{path}\">{before}{title}{after}</a>")
                },
            )
        };
        let before = at.checked_sub(1).and_then(|it| order.get(it));
        let previous = link(before, "prev", ["← ", ""]);
        let next = link(order.get(at + 1), "next", ["", " →"]);
        format!("<p class=\"neighbours\">{previous}{next}</p>")
    }

    /// The sections of all pages, for the search in the browser.
    fn search(&self) -> String {
        #[derive(Serialize)]
        struct Found<'a> {
            path: String,
            page: &'a str,
            title: &'a str,
            words: String,
            weight: u8,
        }
        let mut found = Vec::new();
        for (name, page) in &self.pages {
            // Who searches seldom means a decision of ours.
            let weight =
                if REST.iter().any(|(_, folder)| name.starts_with(folder)) { 1 } else { 3 };
            for section in &page.rendered.sections {
                let title = if section.level < 2 { &page.title } else { &section.title };
                let anchor = if section.level < 2 { "" } else { &section.anchor };
                let hash = if anchor.is_empty() { "" } else { "#" };
                let words = section.words.split_whitespace().collect::<Vec<_>>().join(" ");
                let words = words.chars().take(MAX_SEARCHED_CHARACTERS).collect();
                let path = format!("{}{hash}{anchor}", page.path);
                found.push(Found { path, page: &page.title, title, words, weight });
            }
        }
        serde_json::to_string(&found).unwrap_or_default()
    }

    /// `/llms.txt` (<https://llmstxt.org>): every page with its first sentences.
    fn summary(&self) -> String {
        let mut text = "# Fencepost\n\n> A job queue with an HTTP API.\n".to_owned();
        for (group, names) in GROUPS {
            text += &format!("\n## {group}\n\n");
            for name in names {
                let Some(page) = self.pages.get(*name) else { continue };
                let about = page.about();
                text += &format!("- [{}](/docs/{name}.md): {about}\n", page.title);
            }
        }
        text + "\n## API\n\n- [OpenAPI](/openapi.json): all operations, schemas and errors\n"
    }
}

/// The title of the start page.
const PRODUCT: &str = "Fencepost";

impl DocsPage {
    fn of(path: String, markdown: &[u8]) -> Self {
        let markdown = String::from_utf8_lossy(markdown).into_owned();
        let title = markdown.lines().next().unwrap_or_default().trim_start_matches("# ").to_owned();
        Self { path, title, rendered: Rendered::of(&markdown), markdown }
    }

    fn markdown_path(&self) -> String {
        match &*self.path {
            "/docs/" => format!("/docs/{START}.md"),
            path if path.ends_with(".md") => path.to_owned(),
            path if path.ends_with('/') => format!("{path}README.md"),
            path => format!("{path}.md"),
        }
    }

    /// Its first words.
    fn about(&self) -> String {
        let words = self.rendered.sections.first().map_or("", |it| &it.words);
        let mut about = String::new();
        for word in words.split_whitespace() {
            if about.len() + word.len() > MAX_ABOUT_CHARACTERS {
                return about + "…";
            }
            if !about.is_empty() {
                about.push(' ');
            }
            about += word;
        }
        about
    }

    /// The headings of its second and third level, if there is more than one.
    fn toc(&self) -> String {
        let headings = self.rendered.sections.iter().filter(|it| matches!(it.level, 2 | 3));
        let items: Vec<_> = headings
            .map(|heading| {
                let (level, anchor, title) =
                    (heading.level, &heading.anchor, escape(&heading.title));
                format!("<li class=\"l{level}\"><a href=\"#{anchor}\">{title}</a></li>\n")
            })
            .collect();
        if items.len() < 2 {
            return "<div></div>".to_owned();
        }
        let items = items.concat();
        format!(
            "<nav class=\"toc\" aria-label=\"On this page\"><h2>On this page</h2><ul>{items}</ul></nav>"
        )
    }
}

/// The title of a page's window.
fn full_title(title: &str) -> String {
    if title == PRODUCT { PRODUCT.to_owned() } else { format!("{} · {PRODUCT}", escape(title)) }
}

fn choose((html, markdown): &(Bytes, Bytes), headers: &HeaderMap) -> Response {
    let accepted = headers.get(ACCEPT).and_then(|it| it.to_str().ok()).unwrap_or_default();
    let (kind, text) = if accepted.contains("text/html") {
        ("text/html; charset=utf-8", html)
    } else {
        ("text/plain; charset=utf-8", markdown)
    };
    ([(CONTENT_TYPE, kind), (VARY, "accept")], text.clone()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_has_its_place_in_the_menu() {
        let names: Vec<_> = names().collect();
        for name in in_order() {
            assert!(names.iter().any(|it| it == name), "no page {name}");
        }
        for name in &names {
            let is_listed = in_order().any(|it| it == name);
            let is_grouped = REST.iter().any(|(_, folder)| name.starts_with(folder));
            assert!(is_listed || is_grouped, "{name} is in no group: http/docs/contents.rs");
        }
    }
}
