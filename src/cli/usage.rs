//! `fencepost usage`: what projects used, for the operator's books.

use std::io;

use chrono::NaiveDate;
use clap::Args;
use fencepost_domain::usage::month;
use fencepost_store::{
    people::usage::present_month,
    sweep::usage::{ReportedDay, report},
};
use futures_util::TryStreamExt;

use super::target::TargetArgs;

/// The columns. Later versions only add some, at the end.
const COLUMNS: &[&str] = &[
    "day",
    "project",
    "slug",
    "plan",
    "is_deleted",
    "jobs_enqueued",
    "attempts",
    "jobs_succeeded",
    "jobs_dead_lettered",
    "requests",
    "poll_seconds",
    "log_bytes",
    "stored_byte_hours",
];

/// Options of `usage`.
#[derive(Debug, Args)]
pub struct UsageArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Month (UTC), as 2026-11 [default: the present one]
    #[arg(long, value_name = "MONTH", value_parser = read_month)]
    month: Option<NaiveDate>,
}

fn read_month(text: &str) -> Result<NaiveDate, &'static str> {
    month(text).ok_or("must be a month such as 2026-11")
}

/// Prints a row for each project and day, in the order of days. A row without a day has what was
/// counted on days that are not kept any more, and before days were counted.
///
/// # Errors
/// When the database does not answer.
pub async fn run(args: UsageArgs) -> anyhow::Result<()> {
    let mut conn = args.target.connect().await?;
    let month = match args.month {
        Some(month) => month,
        None => present_month(&mut conn).await?,
    };
    let mut table = csv::Writer::from_writer(io::stdout().lock());
    table.write_record(COLUMNS)?;
    let mut rows = report(&mut conn, month);
    while let Some(row) = rows.try_next().await? {
        table.write_record(fields(&row))?;
    }
    Ok(table.flush()?)
}

fn fields(row: &ReportedDay) -> Vec<String> {
    let used = &row.used;
    let amounts = [
        used.enqueued,
        used.claimed,
        used.succeeded,
        used.dead_lettered,
        used.requests,
        used.poll_seconds(),
        used.log_bytes,
        used.byte_hours,
    ];
    let names = [
        row.day.map(|it| it.to_string()).unwrap_or_default(),
        row.public_id.to_string(),
        row.slug.clone(),
        row.plan.clone(),
        row.is_deleted.to_string(),
    ];
    names.into_iter().chain(amounts.iter().map(ToString::to_string)).collect()
}
