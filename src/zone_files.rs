//! The rules of time zones of this host, which its package `tzdata` keeps up to date.

use std::{borrow::Cow, fs, path::Path};

use anyhow::Context as _;
use chrono::{DateTime, Utc};
use fencepost_domain::zones::{Release, Rules};

/// The folder in which hosts keep them.
pub const ZONE_FILES: &str = "/usr/share/zoneinfo";
/// The text of all zones; its first line names the release.
const TEXT: &str = "tzdata.zi";
/// Other forms of the same zones, and files that are no zones.
const NO_ZONES: [&str; 4] = ["posix", "right", "posixrules", "localtime"];
/// The first bytes of each file of a zone, by RFC 9636.
const MAGIC: &[u8] = b"TZif";
/// More than any zone has: the largest has 4 KiB.
const MAX_ZONE_BYTES: u64 = 64 * 1024;
/// More than IANA has: 600.
const MAX_ZONES: usize = 4_000;
/// Folders of folders: `America/Argentina`.
const MAX_DEPTH: usize = 4;

/// The rules in a folder; `None` is this host's, which may have none.
///
/// # Errors
/// A named folder cannot be read, or does not say which release it has.
pub fn read(folder: Option<&Path>) -> anyhow::Result<Option<Rules>> {
    match folder {
        Some(folder) => {
            let rules = read_folder(folder);
            rules.with_context(|| format!("--zone-files {}", folder.display())).map(Some)
        }
        None => match read_folder(Path::new(ZONE_FILES)) {
            Ok(rules) => Ok(Some(rules)),
            Err(error) => {
                tracing::debug!(error = %format!("{error:#}"), "the host has no zone files");
                Ok(None)
            }
        },
    }
}

fn read_folder(folder: &Path) -> anyhow::Result<Rules> {
    let text = folder.join(TEXT);
    let release = Release::of_text(&fs::read_to_string(&text).context(TEXT)?);
    let release = release.context("tzdata.zi names no release in its first line")?;
    // Packages keep the day on which the release was packed.
    let published = fs::metadata(&text)?.modified().map(DateTime::<Utc>::from);
    let mut zones = Vec::new();
    collect(folder, "", MAX_DEPTH, &mut zones)?;
    anyhow::ensure!(!zones.is_empty(), "has no zones");
    Ok(Rules::new(release, published.ok().map(|it| it.date_naive()), zones))
}

type Zones = Vec<(Cow<'static, str>, Cow<'static, [u8]>)>;

fn collect(folder: &Path, prefix: &str, depth: usize, zones: &mut Zones) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if prefix.is_empty() && NO_ZONES.contains(&&*name) {
            continue;
        }
        let name = format!("{prefix}{name}");
        // Through links: many zones are links to others.
        let Ok(metadata) = fs::metadata(entry.path()) else { continue };
        if metadata.is_dir() && depth > 1 {
            collect(&entry.path(), &format!("{name}/"), depth - 1, zones)?;
        } else if metadata.is_file() && metadata.len() <= MAX_ZONE_BYTES {
            let data = fs::read(entry.path())?;
            if data.starts_with(MAGIC) {
                anyhow::ensure!(zones.len() < MAX_ZONES, "has more than {MAX_ZONES} zones");
                zones.push((name.into(), data.into()));
            }
        }
    }
    Ok(())
}
