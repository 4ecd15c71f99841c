//! Cron expressions: parsing, and what they say.

mod parts;
mod words;

use croner::{
    Cron,
    parser::{CronParser, Seconds, Year},
};

pub use self::{parts::check_parts, words::in_words};

/// Why a schedule is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSchedule {
    /// The expression cannot be read.
    #[error("{0}")]
    Cron(String),
    /// No zone has this name.
    #[error("`{0}` is not an IANA time zone, such as Europe/Berlin")]
    Zone(String),
    /// The expression matches no future time.
    #[error("does not fire within ten years")]
    Never,
    /// It would fire more often than allowed.
    #[error("fires every {0} s; the shortest period allowed is {1} s")]
    TooOften(i64, i64),
    /// The job type has no part that could name the schedule.
    #[error("must end in a letter or digit")]
    Name,
}

impl InvalidSchedule {
    /// The invalid field.
    #[must_use]
    pub fn field(&self) -> &'static str {
        match self {
            Self::Cron(_) | Self::Never | Self::TooOften(..) => "cron_expression",
            Self::Zone(_) => "timezone",
            Self::Name => "job_type",
        }
    }
}

/// Parses a cron expression of five or six fields, or `@daily` and similar.
///
/// # Errors
/// [`InvalidSchedule::Cron`].
///
/// ```
/// # use fencepost_domain::cron::parse;
/// assert!(parse("0 3 * * *").is_ok());
/// assert!(parse("*/10 0 3 * * *").is_ok());
/// assert!(parse("@daily").is_ok());
/// assert!(parse("@midnight").is_ok());
/// assert!(parse("61 * * * *").is_err());
/// assert!(parse("*/61 * * * *").is_err());
/// let error = parse("0 0 0 1 1 * 2030").unwrap_err().to_string();
/// assert!(error.starts_with("must have five fields"));
/// let message = parse("0 25 * * *").unwrap_err().to_string();
/// assert_eq!(message, "the hour cannot be `25`: it must be within 0 to 23");
/// let message = parse("0 noon * * *").unwrap_err().to_string();
/// let forms = "it may be a number from 0 to 23, `*`, a list such as 1,4, a range such as 1-4, \
///              a step such as */2";
/// assert_eq!(message, format!("the hour cannot be `noon`: {forms}"));
/// let message = parse("0 22-6 * * *").unwrap_err().to_string();
/// assert_eq!(message, "the hour cannot be `22-6`: a range runs upwards, so write 22-23,0-6");
/// let message = parse("0 0 * * fri-mon").unwrap_err().to_string();
/// assert!(message.ends_with("write fri-6,0-mon"), "{message}");
/// assert!(parse("0 0 * * fri-6,0-mon").is_ok());
/// let message = parse("0 0 * * moon").unwrap_err().to_string();
/// let allowed = "a name such as mon, 5L for the last, or 2#1 for the first";
/// assert!(message.ends_with(allowed), "{message}");
/// for allowed in ["0 0 L * *", "0 0 15W * *", "0 0 * jan mon", "0 0 * * 5L", "0 0 * * 2#1"] {
///     assert!(parse(allowed).is_ok(), "{allowed}");
/// }
/// ```
pub fn parse(expression: &str) -> Result<Cron, InvalidSchedule> {
    let expression = match expression.trim() {
        it if it.eq_ignore_ascii_case("@midnight") => "@daily",
        it => it,
    };
    check_steps(expression)?;
    let parser = CronParser::builder().seconds(Seconds::Optional).year(Year::Disallowed).build();
    let read = |it: &str| parser.parse(it);
    read(expression).map_err(|error| {
        let fields: Vec<_> = expression.split_whitespace().collect();
        if !(5..=FIELDS.len()).contains(&fields.len()) {
            return InvalidSchedule::Cron(WRONG_COUNT.to_owned());
        }
        // No field alone is invalid.
        let names = FIELDS.iter().skip(FIELDS.len() - fields.len());
        let culprit = fields.iter().zip(names).enumerate().find(|(place, (field, _))| {
            let mut alone = vec!["*"; fields.len()];
            alone[*place] = field;
            read(&alone.join(" ")).is_err()
        });
        InvalidSchedule::Cron(match culprit {
            Some((_, (field, (name, min, max)))) if has_number_beyond(field, *min, *max) => {
                format!("the {name} cannot be `{field}`: it must be within {min} to {max}")
            }
            Some((_, (field, (name, min, max)))) => {
                if let Some(upwards) = upwards(field, name, *min, *max) {
                    let must = format!("a range runs upwards, so write {upwards}");
                    return InvalidSchedule::Cron(format!("the {name} cannot be `{field}`: {must}"));
                }
                let more = match *name {
                    "month" => ", or a name such as jan",
                    "day of the month" => ", L for the last day, or 15W for the nearest weekday",
                    "day of the week" => ", a name such as mon, 5L for the last, or 2#1 for the first",
                    _ => "",
                };
                format!(
                    "the {name} cannot be `{field}`: it may be a number from {min} to {max}, `*`, a \
                     list such as 1,4, a range such as 1-4, a step such as */2{more}"
                )
            }
            None => format!("cannot be read: {error}"),
        })
    })
}

/// The fields of an expression, with their lowest and highest values.
const FIELDS: [(&str, u32, u32); 6] = [
    ("second", 0, 59),
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day of the month", 1, 31),
    ("month", 1, 12),
    ("day of the week", 0, 7),
];

fn has_number_beyond(field: &str, min: u32, max: u32) -> bool {
    let values = field.split(',').filter_map(|it| it.split('/').next());
    let mut numbers = values.flat_map(|it| it.split('-')).filter_map(|it| it.parse::<u32>().ok());
    numbers.any(|it| !(min..=max).contains(&it))
}

/// The two ranges that were meant by one of the field that runs backwards, such as 22-6.
fn upwards(field: &str, name: &str, min: u32, max: u32) -> Option<String> {
    const MONTHS: &str = "jan feb mar apr may jun jul aug sep oct nov dec";
    const WEEKDAYS: &str = "sun mon tue wed thu fri sat";
    const SATURDAY: u32 = 6;
    let (names, max) = match name {
        "month" => (MONTHS, max),
        "day of the week" => (WEEKDAYS, SATURDAY),
        _ => ("", max),
    };
    let value = |text: &str| {
        let place = names.split(' ').position(|it| it.eq_ignore_ascii_case(text));
        let named = place.and_then(|it| u32::try_from(it).ok()).map(|it| it + min);
        text.parse().ok().or(named).filter(|_| !text.is_empty())
    };
    field.split(',').find_map(|part| {
        let (first, last) = part.split_once('-')?;
        (value(first)? > value(last)?).then(|| format!("{first}-{max},{min}-{last}"))
    })
}

const WRONG_COUNT: &str = "must have five fields, or six with seconds first, or be @hourly, @daily, @weekly, @monthly, @yearly";

/// A step larger than its field is never reached: the field was probably confused with another.
fn check_steps(expression: &str) -> Result<(), InvalidSchedule> {
    let fields: Vec<_> = expression.split_whitespace().collect();
    let skipped = FIELDS.len().saturating_sub(fields.len());
    for (field, (name, _, max)) in fields.iter().zip(FIELDS.iter().skip(skipped)) {
        for part in field.split(',') {
            let step = part.split_once('/').and_then(|it| it.1.parse::<u32>().ok());
            if let Some(step) = step.filter(|it| it > max) {
                let message = format!("the step {step} of the {name} is more than {max}");
                return Err(InvalidSchedule::Cron(message));
            }
        }
    }
    Ok(())
}

/// True if an expression has a `?` and numbers of weekdays. Quartz and AWS, which write `?`, count
/// them from 1 for Sunday.
///
/// ```
/// # use fencepost_domain::cron::counts_weekdays_otherwise;
/// for other in ["0 12 ? * 2-6", "0 0 12 ? * 1", "0 12 ? * MON,3", "0 12 ? * 2#1", "0 12 ? * 6L"] {
///     assert!(counts_weekdays_otherwise(other), "{other}");
/// }
/// for same in ["0 12 ? * MON-FRI", "0 12 ? * FRI#2", "0 12 1 * ?", "0 12 * * 1", "0 12 ? * */2"] {
///     assert!(!counts_weekdays_otherwise(same), "{same}");
/// }
/// ```
#[must_use]
pub fn counts_weekdays_otherwise(expression: &str) -> bool {
    let fields: Vec<_> = expression.split_whitespace().collect();
    let weekdays = fields.last().filter(|_| fields.contains(&"?"));
    weekdays.is_some_and(|field| {
        let days = field.split(',').filter_map(|it| it.split(['#', '/']).next());
        days.flat_map(str::chars).any(|it| it.is_ascii_digit())
    })
}

/// Whether an expression names the hours at which it fires. With `*` or `*/n` as the hour it does
/// not.
///
/// ```
/// # use fencepost_domain::cron::names_hours;
/// assert!(names_hours("0 3 * * *") && names_hours("*/5 0-23 * * *") && names_hours("@daily"));
/// assert!(!names_hours("0 * * * *") && !names_hours("0 0 */2 * * *") && !names_hours("@hourly"));
/// ```
#[must_use]
pub fn names_hours(expression: &str) -> bool {
    const WITH_SECONDS: usize = 6;
    let fields: Vec<_> = expression.split_whitespace().collect();
    let hours = if fields.len() == WITH_SECONDS { fields.get(2) } else { fields.get(1) };
    match hours {
        Some(hours) => !hours.starts_with('*'),
        None => !expression.trim().eq_ignore_ascii_case("@hourly"),
    }
}

/// The id of the schedule that a worker registers for a job type: `rjob_` and the type's last part.
///
/// # Errors
/// [`InvalidSchedule::Name`] when there is no last part.
///
/// ```
/// # use fencepost_domain::cron::registered_id;
/// let id = registered_id("MyApp.Jobs.CleanupExpiredSessions").unwrap();
/// assert_eq!(id, "rjob_CleanupExpiredSessions");
/// assert_eq!(registered_id("report").unwrap(), "rjob_report");
/// assert!(registered_id("MyApp.").is_err());
/// ```
pub fn registered_id(job_type: &str) -> Result<String, InvalidSchedule> {
    let last = job_type.rsplit(['.', ':', '/', '\\']).next().unwrap_or_default();
    if last.is_empty() {
        return Err(InvalidSchedule::Name);
    }
    Ok(format!("rjob_{last}"))
}
