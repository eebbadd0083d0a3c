//! The serial console of a virtual machine.
//!
//! * [`uart`]: COM1, a 16550A on eight ports, as vCPUs see it.
//! * [`sink`]: output of its bytes to a descriptor whose reader may be slow. A dedicated thread
//!   writes them, so that shutdown of the machine never waits for the reader. Serves any other
//!   output of that kind too.
//!
//! **Left out.** Terminals, keys and their meaning: they belong to the program.

pub mod sink;
pub mod uart;
