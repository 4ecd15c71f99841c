//! Connections to the database: pools with their deadlines, roles, migrations, and the nodes that
//! are connected.

pub mod deadline;
pub mod migrate;
pub mod nodes;
pub mod pools;
pub mod roles;
pub mod server;
