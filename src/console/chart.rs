//! Time series: as a chart, and as a table for visitors without scripts or with screen readers.

use chrono::{DateTime, Utc};
use fencepost_http::routes::metrics::{Granularity, Throughput, ThroughputBucket};
use serde::Serialize;

use super::{form::Fields, format, page::Frame};

/// Width and height of a sparkline.
const SPARK_SIZE: (i64, i64) = (120, 24);

/// Leading empty buckets are left out, but at least this many are shown.
const MIN_BUCKETS: usize = 15;

/// Periods to choose, and how captions name them; the first is the default.
const PERIODS: [(&str, &str); 4] =
    [("1h", "hour"), ("24h", "24 hours"), ("7d", "7 days"), ("30d", "30 days")];

/// A period to choose.
pub struct PeriodLink {
    pub path: String,
    pub name: &'static str,
    pub is_here: bool,
}

/// The period that a page shows.
pub struct Range {
    /// As the API names it.
    pub period: &'static str,
    words: &'static str,
    pub links: Vec<PeriodLink>,
}

impl Range {
    /// The asked one, on the page at this path.
    pub fn of(frame: &Frame, path: &str, asked: &Fields) -> Self {
        let wanted = PERIODS.iter().find(|it| asked.get("period") == Some(it.0));
        let (period, words) = *wanted.unwrap_or(&PERIODS[0]);
        let link = |(name, _): &(&'static str, &'static str)| PeriodLink {
            path: frame.to(&format!("{path}?period={name}")),
            name,
            is_here: *name == period,
        };
        Self { period, words, links: PERIODS.iter().map(link).collect() }
    }
}

/// A chart and its table.
pub struct Chart {
    pub caption: String,
    /// For the script that draws it, as JSON.
    pub data: String,
    /// Column headings of the table.
    pub columns: Vec<&'static str>,
    /// Rows of the table, newest first: a time, and a cell for each column.
    pub rows: Vec<(String, Vec<String>)>,
}

#[derive(Serialize)]
struct Data<'a> {
    unit: &'static str,
    /// Length of a bucket.
    slot: &'static str,
    x: Vec<i64>,
    series: Vec<Series<'a>>,
}

#[derive(Serialize)]
struct Series<'a> {
    name: &'a str,
    tone: &'a str,
    y: Vec<Option<i64>>,
}

type Column = (&'static str, &'static str, fn(&ThroughputBucket) -> Option<i64>);

/// Enqueued jobs, and how they ended.
pub fn throughput(numbers: &Throughput, range: &Range) -> Chart {
    let columns: [Column; 4] = [
        ("enqueued", "calm", |it| Some(it.enqueued)),
        ("succeeded", "good", |it| Some(it.succeeded)),
        ("failed attempts", "warn", |it| Some(it.failed + it.timed_out + it.lease_expired)),
        ("dead letters", "bad", |it| Some(it.dead_letter)),
    ];
    let slot = slot_name(numbers.granularity);
    let caption = format!("Jobs per {slot}, in the last {}", range.words);
    draw(caption, "jobs", numbers, &columns, format::count)
}

/// How long jobs waited for a worker.
pub fn waits(numbers: &Throughput, range: &Range) -> Chart {
    let columns: [Column; 2] =
        [("p50", "calm", |it| it.wait.p50_ms), ("p95", "warn", |it| it.wait.p95_ms)];
    let caption = format!("Wait for a worker, in the last {}", range.words);
    draw(caption, "ms", numbers, &columns, format::millis)
}

fn slot_name(granularity: Granularity) -> &'static str {
    match granularity {
        Granularity::Minute => "minute",
        Granularity::Hour => "hour",
        Granularity::Day => "day",
    }
}

fn draw(
    caption: String,
    unit: &'static str,
    numbers: &Throughput,
    columns: &[Column],
    cell: fn(i64) -> String,
) -> Chart {
    let is_empty =
        |it: &ThroughputBucket| columns.iter().all(|(_, _, of)| of(it).unwrap_or(0) == 0);
    let empty = numbers.buckets.iter().take_while(|it| is_empty(it)).count();
    let most = numbers.buckets.len().saturating_sub(MIN_BUCKETS);
    let buckets = &numbers.buckets[empty.min(most)..];
    // The last bucket is still filling: it would look like a fall.
    let whole = buckets.len().saturating_sub(1);
    let series = columns.iter().map(|(name, tone, of)| Series {
        name,
        tone,
        y: (0..).zip(buckets).map(|(place, it)| of(it).filter(|_| place < whole)).collect(),
    });
    let x = buckets.iter().map(|it| it.start_at.timestamp()).collect();
    let slot_name = slot_name(numbers.granularity);
    let data = Data { unit, slot: slot_name, x, series: series.collect() };
    let data = serde_json::to_string(&data);
    let row = |bucket: &ThroughputBucket| {
        let cells = columns.iter().map(|(_, _, of)| of(bucket).map_or("–".to_owned(), cell));
        (slot(numbers.granularity, bucket.start_at), cells.collect())
    };
    Chart {
        caption,
        data: data.unwrap_or_default(),
        columns: columns.iter().map(|it| it.0).collect(),
        rows: buckets.iter().rev().map(row).collect(),
    }
}

fn slot(granularity: Granularity, at: DateTime<Utc>) -> String {
    match granularity {
        Granularity::Minute => at.format("%H:%M UTC").to_string(),
        Granularity::Hour => at.format("%m-%d %H:00 UTC").to_string(),
        Granularity::Day => at.format("%Y-%m-%d").to_string(),
    }
}

/// Jobs enqueued in the last hour as a line, and failed ones as another, small enough for a table
/// row.
pub fn sparkline(numbers: &Throughput) -> String {
    let (width, height) = SPARK_SIZE;
    // The last bucket is still filling.
    let whole = &numbers.buckets[..numbers.buckets.len().saturating_sub(1)];
    let enqueued: Vec<_> = whole.iter().map(|it| it.enqueued).collect();
    let failed = whole.iter().map(|it| it.failed + it.timed_out + it.lease_expired);
    let failed: Vec<_> = failed.collect();
    let top = enqueued.iter().chain(&failed).copied().max().unwrap_or(0).max(1);
    let line = |values: &[i64], colour: &str| {
        let last = values.len().saturating_sub(1).max(1) as i64;
        let points: Vec<_> = (0_i64..)
            .zip(values)
            .map(|(place, value)| {
                let (x, y) = (place * width / last, height - 1 - value * (height - 2) / top);
                format!("{x},{y}")
            })
            .collect();
        let points = points.join(" ");
        format!(
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>"
        )
    };
    // Colours with enough contrast on light and dark backgrounds.
    let (calm, bad) = (line(&enqueued, "#4a86d8"), line(&failed, "#d05a4e"));
    let bad = if failed.iter().any(|it| *it > 0) { bad } else { String::new() };
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\">{calm}{bad}</svg>"
    )
}
