//! Lists in pages: how many rows a page has, and the shape of its answer.

use fencepost_domain::limits::MAX_PAGE_BYTES;

use fencepost_web::wire::validate::Check;

/// Defines the answer of a list: a page with `has_more` and `next_cursor`.
macro_rules! page {
    ($(#[$doc:meta])* $name:ident { $(#[$list_doc:meta])* $list:ident: $item:ty }) => {
        $(#[$doc])*
        #[derive(Debug, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
        pub struct $name {
            $(#[$list_doc])*
            pub $list: Vec<$item>,
            /// True if there are more entries.
            pub has_more: bool,
            /// Pass it as `cursor` to get the next page.
            #[schema(required)]
            pub next_cursor: Option<String>,
        }

        impl $name {
            /// A page; without a cursor it is the last one.
            #[must_use]
            pub fn of($list: Vec<$item>, next_cursor: Option<String>) -> Self {
                Self { $list, has_more: next_cursor.is_some(), next_cursor }
            }
        }
    };
}

pub(super) use page;

/// How many rows a page has. One more is read, to know whether there are more.
#[derive(Debug, Clone, Copy)]
pub struct PageSize(u32);

impl PageSize {
    /// The requested size, 1 to `max`, or else `default`.
    pub fn read(limit: Option<u32>, default: u32, max: u32, check: &mut Check) -> Self {
        let limit = limit.unwrap_or(default);
        check.range("limit", limit, 1, max);
        Self(limit)
    }

    /// This size, or a smaller one.
    pub fn at_most(self, rows: usize) -> Self {
        Self(self.0.min(u32::try_from(rows).unwrap_or(u32::MAX)))
    }

    /// How many rows it has.
    pub fn rows(self) -> u32 {
        self.0
    }

    /// How many rows to read.
    pub fn one_more(self) -> i64 {
        i64::from(self.0) + 1
    }

    /// Removes the row that is only read to know that there are more. Returns the cursor of the
    /// last row that is left, if there are.
    pub fn cut<Row>(
        self,
        rows: &mut Vec<Row>,
        cursor: impl FnOnce(&Row) -> String,
    ) -> Option<String> {
        self.cut_by_bytes(rows, |_| 0, cursor)
    }

    /// The same for rows that may be large: the page also ends where they have
    /// [`MAX_PAGE_BYTES`] together.
    pub fn cut_by_bytes<Row>(
        self,
        rows: &mut Vec<Row>,
        bytes: impl Fn(&Row) -> usize,
        cursor: impl FnOnce(&Row) -> String,
    ) -> Option<String> {
        let mut together = 0;
        let fitting = rows.iter().take_while(|row| {
            together += bytes(row);
            together <= MAX_PAGE_BYTES
        });
        let fitting = fitting.count().clamp(1, self.0 as usize);
        let has_more = rows.len() > fitting;
        rows.truncate(fitting);
        rows.last().filter(|_| has_more).map(cursor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_ends_by_rows_or_by_bytes_and_has_at_least_one_row() {
        let cut = |bytes: &[usize], size| {
            let mut rows = bytes.to_vec();
            let cursor = PageSize(size).cut_by_bytes(&mut rows, |it| *it, usize::to_string);
            (rows.len(), cursor.is_some())
        };
        let half = MAX_PAGE_BYTES / 2;
        assert_eq!(cut(&[1, 1, 1], 2), (2, true));
        assert_eq!(cut(&[1, 1], 2), (2, false));
        assert_eq!(cut(&[half, half, 1], 10), (2, true));
        assert_eq!(cut(&[MAX_PAGE_BYTES + 1, 1], 10), (1, true));
        assert_eq!(cut(&[], 10), (0, false));
    }
}
