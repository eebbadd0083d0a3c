//! Values as people write them on a command line or in a file: numbers with a unit, lists,
//! `key=value`; and files of them.

pub mod block;
pub mod file;
pub mod keys;
pub mod nearest;
pub mod net;
pub mod size;

/// Returns a number of things, as text: `1 device`, `2 devices`.
pub fn counted(count: usize, noun: &str) -> String {
    let ending = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{ending}")
}
