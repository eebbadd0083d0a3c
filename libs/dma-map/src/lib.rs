//! IO page tables, invalidation, and the policies between map and unmap.
//!
//! * [`table`]: the tables that a device's requests walk, mapped and unmapped by many cores without locks.
//!
//! UNSAFETY: denied here and opted into by the modules that hold the memory of tables (`table::memory`,
//! `table::tree`, and the two forwarding functions of `table::radix`), because a table entry is a number that
//! is turned into a reference, on a path of nanoseconds. Everything else is safe code.
#![cfg_attr(not(test), no_std)]
#![deny(unsafe_code)]

extern crate alloc;

pub mod table;
