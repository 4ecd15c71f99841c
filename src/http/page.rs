//! Lists in pages: how many rows a page has, and the shape of its answer.

use crate::wire::validate::Check;

/// Defines the answer of a list: a page with `has_more` and `next_cursor`.
macro_rules! page {
    ($(#[$doc:meta])* $name:ident { $(#[$list_doc:meta])* $list:ident: $item:ty }) => {
        $(#[$doc])*
        #[derive(Debug, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
        pub struct $name {
            $(#[$list_doc])*
            pub $list: Vec<$item>,
            /// Whether there are more.
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
        let has_more = rows.len() > self.0 as usize;
        rows.truncate(self.0 as usize);
        rows.last().filter(|_| has_more).map(cursor)
    }
}
