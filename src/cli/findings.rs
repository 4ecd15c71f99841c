//! What `check` and `doctor` find.

use std::{fmt, io::Write};

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Good,
    Doubtful,
    Bad,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Good => "ok",
            Self::Doubtful => "warning",
            Self::Bad => "WRONG",
        })
    }
}

#[derive(Debug, Default)]
pub(super) struct Findings(Vec<(Verdict, &'static str, String)>);

impl Findings {
    pub(super) fn good(&mut self, what: &'static str, text: impl Into<String>) {
        self.0.push((Verdict::Good, what, text.into()));
    }

    pub(super) fn doubtful(&mut self, what: &'static str, text: impl Into<String>) {
        self.0.push((Verdict::Doubtful, what, text.into()));
    }

    pub(super) fn bad(&mut self, what: &'static str, text: impl Into<String>) {
        self.0.push((Verdict::Bad, what, text.into()));
    }

    /// Prints them, a line each.
    ///
    /// # Errors
    /// When one of them is bad; a warning is no error.
    pub(super) fn print(&self) -> anyhow::Result<()> {
        let mut out = std::io::stdout();
        for (found, what, text) in &self.0 {
            writeln!(out, "{found:<8} {what:<9} {text}")?;
        }
        let wrong = self.0.iter().filter(|it| it.0 == Verdict::Bad).count();
        anyhow::ensure!(wrong == 0, "{wrong} of {} checks failed", self.0.len());
        Ok(())
    }
}
