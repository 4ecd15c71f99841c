//! The other wires: each as its own clients speak it, and all of them on the same jobs.

mod mobius;
mod ojs;
mod orch8;
mod workflow_graph;
