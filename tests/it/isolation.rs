//! One row, one tenant or one dead connection stops no other.

mod deadlocks;
mod held_rows;
mod hints;
mod poison;
mod silence;
mod slow_readers;
mod turns;
