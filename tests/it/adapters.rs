//! The other wires: each as its own clients speak it, and all of them on the same jobs.

mod clients;
mod matrix;
mod mobius;
mod ojs;
mod orch8;
mod page;
mod surface;
mod workflow_graph;
