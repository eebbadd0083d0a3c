//! The serial console of a virtual machine.
//!
//! * [`uart`]: COM1, a 16550A on eight ports, as vCPUs see it.
//! * [`sink`]: where its bytes go: a descriptor that somebody else may not read, written by a
//!   thread of its own, so that nobody who must end waits for the reader. Good for any other output
//!   of that kind too.
//!
//! **Left out.** Terminals, keys and what they mean: they belong to the program.

pub mod sink;
pub mod uart;
