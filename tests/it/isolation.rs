//! One row, one tenant or one dead connection stops no other.

mod poison;
mod turns;
