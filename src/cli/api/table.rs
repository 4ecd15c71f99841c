//! Tables for people: as wide as their widest cell.

use std::io::Write;

use chrono::{DateTime, Utc};
use serde_json::Value;

use super::super::jobs::word;

/// Head and place of each column; a place is a JSON pointer in a row.
pub type Columns = &'static [(&'static str, &'static str)];

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
            let widest = cells.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
            widest.max(head.len())
        })
        .collect();
    let heads = columns.iter().map(|(head, _)| (*head).to_owned()).collect();
    for row in std::iter::once(&heads).chain(&cells) {
        let line: Vec<_> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        writeln!(out, "{}", line.join("  ").trim_end())?;
    }
    Ok(())
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
            {"name": "a", "counts": {"ready": 12}, "at": "2026-01-31T12:00:00.5Z"},
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
                "a          12     -      2026-01-31 12:00:00",
                "long name  3      x,y    -",
            ]
        );
    }
}
