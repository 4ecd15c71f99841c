//! Tables for people: as wide as their widest cell.

use std::io::Write;

use anyhow::Context;
use chrono::{DateTime, Utc};
use clap::Args;
use serde_json::Value;

use super::words::{encoded, word};

/// Head and place of each column; a place is a JSON pointer in a row.
pub type Columns = &'static [(&'static str, &'static str)];

/// Which page of a list, of at most `MAX` rows.
#[derive(Debug, Args)]
pub struct Page<const MAX: u32> {
    /// Number of rows
    #[arg(long, default_value_t = DEFAULT_ROWS, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX)))]
    pub limit: u32,
    /// Where the page begins, as the previous one says
    #[arg(long, value_name = "CURSOR")]
    pub cursor: Option<String>,
}

impl<const MAX: u32> Page<MAX> {
    /// As parameters of a request.
    pub fn query(&self) -> String {
        let cursor = self.cursor.as_ref().map(|it| format!("&cursor={}", encoded(it)));
        format!("limit={}{}", self.limit, cursor.unwrap_or_default())
    }
}

/// Rows of a page, unless the command says otherwise.
const DEFAULT_ROWS: u32 = 50;
/// A cell is cut after this.
const MAX_CELL_CHARACTERS: usize = 60;

/// Prints the rows. Times are shown in whole seconds, in UTC.
pub fn print(out: &mut impl Write, rows: &Value, columns: Columns) -> std::io::Result<()> {
    let rows = rows.as_array().map_or(&[][..], Vec::as_slice);
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| columns.iter().map(|(_, place)| cell(row.pointer(place))).collect())
        .collect();
    let widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(at, (head, _))| {
            let widest = cells.iter().map(|row| shown_width(&row[at])).max().unwrap_or(0);
            widest.max(head.len())
        })
        .collect();
    let heads = columns.iter().map(|(head, _)| (*head).to_owned()).collect();
    for row in std::iter::once(&heads).chain(&cells) {
        let line: Vec<_> =
            row.iter().zip(&widths).map(|(cell, width)| padded(cell, *width)).collect();
        writeln!(out, "{}", line.join("  ").trim_end())?;
    }
    Ok(())
}

/// Characters that a terminal shows: colours take no room.
fn shown_width(cell: &str) -> usize {
    let mut is_colour = false;
    let shown = cell.chars().filter(|letter| {
        is_colour |= *letter == '\x1b';
        let is_shown = !is_colour;
        is_colour &= *letter != 'm';
        is_shown
    });
    shown.count()
}

fn padded(cell: &str, width: usize) -> String {
    format!("{cell}{}", " ".repeat(width.saturating_sub(shown_width(cell))))
}

/// The rows of a page.
///
/// # Errors
/// The answer is no such page.
pub fn rows<'a>(page: &'a Value, field: &str) -> anyhow::Result<&'a Value> {
    let rows = page.get(field).filter(|it| it.is_array());
    rows.context("the answer is not from a Fencepost server")
}

/// Says on standard error how to get the next page, if there is one.
pub fn say_more(page: &Value) -> std::io::Result<()> {
    let Some(cursor) = page["next_cursor"].as_str() else { return Ok(()) };
    let until = page["scanned_until"].as_str();
    let until = until.map_or(String::new(), |it| format!(", examined until {it}"));
    writeln!(std::io::stderr(), "there may be more{until}: --cursor {cursor}")
}

fn cell(value: Option<&Value>) -> String {
    let text = match value {
        None | Some(Value::Null) => return "-".to_owned(),
        Some(Value::Array(items)) if items.is_empty() => return "-".to_owned(),
        Some(Value::Array(items)) => items.iter().map(word).collect::<Vec<_>>().join(","),
        Some(value) => word(value),
    };
    if let Ok(time) = DateTime::parse_from_rfc3339(&text) {
        return time.with_timezone(&Utc).format("%Y-%m-%d %H:%M:%S").to_string();
    }
    let text = text.replace(['\n', '\t'], " ");
    match text.char_indices().nth(MAX_CELL_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = json!([
            {"name": "\x1b[32ma\x1b[0m", "counts": {"ready": 12}, "at": "2026-01-31T12:00:00.5Z"},
            {"name": "long\nname", "counts": {"ready": 3}, "types": ["x", "y"], "at": null},
        ]);
        let columns: Columns =
            &[("NAME", "/name"), ("READY", "/counts/ready"), ("TYPES", "/types"), ("AT", "/at")];
        let mut out = Vec::new();
        print(&mut out, &rows, columns).expect("memory");
        let text = String::from_utf8(out).expect("text");
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "NAME       READY  TYPES  AT",
                "\x1b[32ma\x1b[0m          12     -      2026-01-31 12:00:00",
                "long name  3      x,y    -",
            ]
        );
    }
}
