//! The console: a 16550 on one side, this process's terminal (or a file, or nothing) on the other.
//!
//! * [`uart`]: COM1 as vCPUs see it.
//! * [`escape`]: Ctrl-A sequences, found in what the user types.
//! * [`terminal`]: raw mode, given back however the process ends.
//! * [`input`]: the thread from the terminal to the chip. The other way is a [`crate::ending::sink`].

pub mod escape;
pub mod input;
pub mod terminal;
pub mod uart;
