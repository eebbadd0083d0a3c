//! Layouts of Intel Virtualization Technology for Directed I/O, and nothing else: no logic, no
//! policy.
//!
//! The document is *Intel Virtualization Technology for Directed I/O, Architecture Specification*,
//! revision 4.1. Names are the specification's, in lower case; the first doc line of each item
//! spells the name out. Only legacy mode is laid out (root and context entries of 16 bytes,
//! second-level tables, 128-bit descriptors, remapped but not posted interrupts); scalable mode is
//! not advertised by the unit that is built on this, so its layouts are absent.
//!
//! `vtd` re-exports this crate as `vtd::spec`; a guest's driver (`vtd-client`) and a hypervisor on
//! bare metal (`bin/exitless-hv`) write the structures that the unit reads.
//!
//! Every field has a golden-word test beside it: a literal worked out from the document goes in and
//! the field's value comes out, because building and parsing with one type proves nothing about
//! layout.

#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod fault;
pub mod invalidate;
pub mod registers;
pub mod remap;
pub mod tables;
