//! The documentation that every node serves: readable in a browser and in a shell, and without dead
//! ends.

use std::{
    io::Read,
    path::{Component, Path, PathBuf},
};

use fencepost_http::{docs, error::CODES};

use crate::{
    docs::read,
    harness::{Reply, TestProject, run},
};
use flate2::read::GzDecoder;

async fn in_a_browser(t: &TestProject, path: &str) -> Reply {
    let request = t.client.get(format!("{}{path}", t.url)).header("accept", "text/html,*/*");
    Reply::of(request.send().await.expect("an answer")).await
}

#[test]
fn a_page_is_html_for_a_browser_and_markdown_for_everybody_else() {
    run(async |t| {
        let page = in_a_browser(t, "/docs/errors").await;
        assert_eq!(page.headers["content-type"], "text/html; charset=utf-8");
        for (code, _) in CODES {
            // Where every error's `docs_url` leads.
            assert!(page.text.contains(&format!("id=\"{code}\"")), "{code}");
        }
        for source in [" src=\"", "<link rel=\"stylesheet\" href=\""] {
            let mut sources = page.text.split(source).skip(1);
            assert!(sources.all(|it| it.starts_with('/')), "nothing from elsewhere");
        }
        let plain = t.get("/docs/errors").await;
        assert_eq!(plain.headers["content-type"], "text/plain; charset=utf-8");
        assert_eq!(plain.text, read("docs/errors.md"));
        let runbook = in_a_browser(t, "/docs/runbooks/queue-stuck.md").await;
        assert!(runbook.text.contains("<h1 id=\"a-queue-is-stuck\">"), "{}", runbook.text);
        let picture = t.client.get(format!("{}/docs/pictures/overview.png", t.url)).send().await;
        assert_eq!(picture.expect("an answer").headers()["content-type"], "image/png");
    });
}

#[test]
fn files_are_compressed_for_clients_that_accept_it() {
    run(async |t| {
        let get = async |path: &str, accepted: &str| {
            let request = t.client.get(format!("{}{path}", t.url));
            let sent = request.header("accept-encoding", accepted).send().await;
            let answer = sent.expect("an answer").error_for_status().expect("a file");
            let headers = answer.headers().clone();
            (headers, answer.bytes().await.expect("a whole file"))
        };
        let files =
            ["/openapi.json", "/openapi/ojs.json", "/docs/errors", "/docs/api/swagger-ui.css"];
        for path in files {
            let (plain_headers, plain) = get(path, "identity").await;
            let varies = plain_headers.get_all("vary").iter().any(|it| it == "accept-encoding");
            assert!(varies && !plain_headers.contains_key("content-encoding"), "{path}");
            let (headers, small) = get(path, "gzip").await;
            assert_eq!(headers["content-encoding"], "gzip", "{path}");
            assert!(small.len() * 2 < plain.len(), "{path}: {} bytes", small.len());
            assert_eq!(get(path, "br, gzip").await.1, small, "{path}");
            let mut whole = Vec::new();
            GzDecoder::new(&*small).read_to_end(&mut whole).expect("gzip");
            assert_eq!(whole, plain, "{path}");
        }
        // Secrets are in the answers of the API.
        let limits = t.client.get(format!("{}/v1/limits", t.url)).bearer_auth(&t.api_key);
        let limits = limits.header("accept-encoding", "gzip").send().await.expect("an answer");
        assert!(!limits.headers().contains_key("content-encoding"));
        assert!(!limits.headers().contains_key("vary"), "not even considered");
    });
}

/// What a page links below this repository.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|it| it.split([')', '#']).next());
    // The reference is made from the OpenAPI file.
    targets.filter(|target| {
        let is_made = *target == "api/" || target.starts_with("reference/");
        !target.is_empty() && !target.contains("://") && !is_made
    })
}

#[test]
fn no_link_of_the_documentation_leads_nowhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = docs::names().map(|it| format!("docs/{it}.md"));
    let others = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "ARCHITECTURE.md"];
    let mut seen = 0;
    for page in pages.chain(others.map(str::to_owned)) {
        let text = read(&page);
        for link in links(&text) {
            let dir = Path::new(&page).parent().expect("a folder");
            let mut target = PathBuf::from(root);
            for part in dir.join(link).components() {
                match part {
                    Component::ParentDir => assert!(target.pop()),
                    part => target.push(part),
                }
            }
            assert!(target.exists(), "{page}: {link}");
            seen += 1;
        }
    }
    assert!(seen > 80, "{seen}");
}

/// Where the links of a page lead on this server.
fn hrefs(page: &str, at: &reqwest::Url) -> Vec<reqwest::Url> {
    let targets = [" href=\"", " src=\""].into_iter().flat_map(|it| page.split(it).skip(1));
    let targets = targets.filter_map(|it| it.split('"').next());
    let found = targets.filter_map(|it| at.join(it).ok());
    found.filter(|it| it.host_str() == at.host_str() && it.port() == at.port()).collect()
}

#[test]
fn no_link_of_a_served_page_leads_nowhere() {
    run(async |t| {
        let mut seen = std::collections::BTreeSet::new();
        let pages = docs::names().map(|it| format!("/docs/{it}"));
        let others =
            ["/docs/", "/docs/api/", "/examples/README.md", "/clients/", "/clients/go/README.md"];
        for path in pages.chain(others.map(str::to_owned)) {
            let page = in_a_browser(t, &path).await;
            let at = format!("{}{path}", t.url).parse().expect("a URL");
            for mut link in hrefs(&page.text, &at) {
                link.set_fragment(None);
                if seen.insert(link.clone()) {
                    let reply = t.client.get(link.clone()).send().await.expect("an answer");
                    assert!(reply.status().is_success(), "{path}: {link} is {}", reply.status());
                }
            }
        }
        assert!(seen.len() > 40, "{}", seen.len());
    });
}

#[test]
fn the_search_knows_each_page_and_stays_small() {
    const MAX_COMPRESSED_BYTES: usize = 180 * 1024;
    run(async |t| {
        let request = t.client.get(format!("{}/docs/search.json", t.url));
        let sent = request.header("accept-encoding", "gzip").send().await.expect("an answer");
        let small = sent.bytes().await.expect("a whole file");
        assert!(small.len() <= MAX_COMPRESSED_BYTES, "{} bytes", small.len());
        let sections = t.get("/docs/search.json").await.is(200);
        let paths: Vec<_> = sections
            .as_array()
            .expect("sections")
            .iter()
            .filter_map(|it| it["path"].as_str())
            .collect();
        for name in docs::names().filter(|it| it != "index") {
            let path = format!("/docs/{name}");
            assert!(paths.contains(&&*path), "{path}");
        }
        assert!(paths.contains(&"/docs/errors#stale_lease"));
    });
}

#[test]
fn programs_that_read_find_all_pages_of_the_menu() {
    run(async |t| {
        let summary = t.get("/llms.txt").await;
        assert!(summary.text.starts_with("# Fencepost\n\n> "), "{}", summary.text);
        let mut seen = 0;
        for link in links(&summary.text) {
            assert_eq!(t.get(link).await.status, 200, "{link}");
            seen += 1;
        }
        assert!(seen > 25, "{seen}");
    });
}

#[test]
fn a_page_has_its_neighbours_and_its_headings_beside_it() {
    run(async |t| {
        let page = in_a_browser(t, "/docs/guides/cron").await.text;
        assert!(page.contains("<a rel=\"prev\" href=\"/docs/guides/limited-api\">"), "{page}");
        assert!(page.contains("aria-current=\"page\">Run jobs on a schedule</a>"), "{page}");
        let start = in_a_browser(t, "/docs").await.text;
        assert!(start.contains("<li class=\"l2\"><a href=\"#your-first-job\">"), "{start}");
        assert!(start.contains("value=\"Rust\"><label"), "{start}");
    });
}
