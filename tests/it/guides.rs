//! What the guides show runs as shown: the blocks of a page in their order, against a server of the
//! page's own. A Python program that ends with `worker.run()` or
//! `server.serve_forever()` works in the background.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use crate::{docs::read, harness::TestProject};
use fencepost_http::docs;
use tokio::process::{Child, Command};

/// Ends of programs that work in the background.
const BACKGROUND: [&str; 2] = ["worker.run()", "server.serve_forever()"];

/// Language and text of each block.
pub fn blocks(page: &str) -> Vec<(String, String)> {
    let mut blocks = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let Some(language) = line.strip_prefix("```") else { continue };
        let text: Vec<_> = lines.by_ref().take_while(|it| *it != "```").collect();
        blocks.push((language.to_owned(), text.join("\n")));
    }
    blocks
}

fn command(t: &TestProject, program: &str, args: &[&str]) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let binaries = Path::new(env!("CARGO_BIN_EXE_fencepost")).parent().expect("a folder");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut paths: Vec<PathBuf> = vec![binaries.to_owned()];
    paths.extend(std::env::split_paths(&path));
    let mut command = Command::new(program);
    command
        .args(args)
        .current_dir(root)
        .env("PATH", std::env::join_paths(paths).expect("paths"))
        .env("PYTHONPATH", root.join("clients/python"))
        .env("FENCEPOST_URL", &t.url)
        .env("FENCEPOST_KEY", &t.api_key)
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// Runs the blocks of a page. Returns how many.
async fn runs(t: &TestProject, name: &str) -> usize {
    let mut working: Vec<Child> = Vec::new();
    let mut ran = 0;
    for (language, text) in blocks(&read(&format!("docs/{name}.md"))) {
        let mut command = match &*language {
            "sh" => command(t, "bash", &["-eu", "-o", "pipefail", "-c", &text]),
            "python" if BACKGROUND.iter().any(|it| text.ends_with(it)) => {
                let mut worker = command(t, "python3", &["-c", &text]);
                working.push(worker.stderr(Stdio::inherit()).spawn().expect("it starts"));
                ran += 1;
                continue;
            }
            "python" => command(t, "python3", &["-c", &text]),
            "python before" => {
                let check = "import ast, sys; ast.parse(sys.argv[1])";
                command(t, "python3", &["-c", check, &text])
            }
            _ => continue,
        };
        let output = command.output().await.expect("it runs");
        let said =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {text}\n{said}");
        ran += 1;
    }
    ran
}

#[test]
fn what_the_guides_show_runs() {
    let is_guide = |it: &String| it.starts_with("guides/") || it.starts_with("migrate/");
    let guides: Vec<_> = docs::names().filter(is_guide).collect();
    assert!(guides.len() >= 14, "{guides:?}");
    crate::harness::run_for(std::time::Duration::from_secs(240), async {
        for name in guides {
            let database = crate::harness::fresh_database().await;
            let server = crate::harness::TestServer::start(database).await;
            let project = server.project("main").await;
            let ran = runs(&project, &name).await;
            assert!(ran > 0 || name.starts_with("migrate/"), "{name}");
            server.stop().await;
        }
    });
}
