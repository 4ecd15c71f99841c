//! One row, one tenant or one dead connection stops no other.

mod held_rows;
mod poison;
mod silence;
mod turns;
