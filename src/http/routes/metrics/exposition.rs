//! The Prometheus text format: <https://prometheus.io/docs/instrumenting/exposition_formats/>.

use std::fmt::Write;

use fencepost_domain::histogram::{BOUNDS_MS, Histogram};

/// Metrics of a project as text, one after the other.
#[derive(Debug)]
pub struct Exposition {
    text: String,
    /// The first label of every sample.
    project: String,
}

/// A label and its value.
pub type Label<'a> = (&'a str, &'a str);

impl Exposition {
    /// No metrics yet, of the project with this slug.
    #[must_use]
    pub fn of(slug: &str) -> Self {
        Self { text: String::new(), project: format!("project=\"{}\"", escape(slug)) }
    }

    /// Begins a metric: its samples follow.
    pub fn begin(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// One sample.
    pub fn sample(&mut self, name: &str, labels: &[Label<'_>], value: impl std::fmt::Display) {
        let _ = write!(self.text, "{name}{{{}", self.project);
        for (label, value) in labels {
            let _ = write!(self.text, ",{label}=\"{}\"", escape(value));
        }
        let _ = writeln!(self.text, "}} {value}");
    }

    /// The samples of a histogram of seconds.
    pub fn histogram(&mut self, name: &str, label: Label<'_>, times: &Histogram) {
        let bucket = format!("{name}_bucket");
        let mut within = 0;
        for (bound, many) in BOUNDS_MS.iter().zip(times.buckets) {
            within += many;
            let bound = (*bound as f64 / 1_000.0).to_string();
            self.sample(&bucket, &[label, ("le", &bound)], within);
        }
        self.sample(&bucket, &[label, ("le", "+Inf")], times.count());
        self.sample(&format!("{name}_sum"), &[label], times.sum_ms as f64 / 1_000.0);
        self.sample(&format!("{name}_count"), &[label], times.count());
    }

    /// The text.
    pub fn finish(self) -> String {
        self.text
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_end_its_label() {
        let mut text = Exposition::of("p");
        text.sample("m", &[("queue", "a\"b\\c\nd"), ("state", "ready")], 3);
        text.sample("m", &[], 1.5);
        assert_eq!(
            text.finish(),
            "m{project=\"p\",queue=\"a\\\"b\\\\c\\nd\",state=\"ready\"} 3\nm{project=\"p\"} 1.5\n"
        );
    }

    #[test]
    fn the_buckets_of_a_histogram_include_those_below() {
        let mut times = Histogram::default();
        times.add(1);
        times.add(40);
        let mut text = Exposition::of("p");
        text.histogram("m_seconds", ("queue", "q"), &times);
        let text = text.finish();
        assert!(
            text.contains("m_seconds_bucket{project=\"p\",queue=\"q\",le=\"0.001\"} 1\n"),
            "{text}"
        );
        assert!(
            text.contains("m_seconds_bucket{project=\"p\",queue=\"q\",le=\"0.05\"} 2\n"),
            "{text}"
        );
        assert!(
            text.contains("m_seconds_bucket{project=\"p\",queue=\"q\",le=\"+Inf\"} 2\n"),
            "{text}"
        );
        assert!(
            text.ends_with("m_seconds_sum{project=\"p\",queue=\"q\"} 0.041\nm_seconds_count{project=\"p\",queue=\"q\"} 2\n")
        );
    }
}
