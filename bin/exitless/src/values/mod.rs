//! Values as people write them on a command line or in a file: sizes, lists, `key=value`.

pub mod block;
pub mod keys;
pub mod size;
