//! This process's terminal as the console of a machine.
//!
//! * [`raw`]: raw mode, given back however the process ends.
//! * [`escape`]: Ctrl-A sequences, found in what the user types.
//! * [`input`]: the thread from the terminal to the chip. The other way is a [`console::sink`].

pub mod escape;
pub mod input;
pub mod raw;
