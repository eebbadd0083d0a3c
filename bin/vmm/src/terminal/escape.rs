//! Escape sequences in the user's typing: Ctrl-A, then a key.
//!
//! | keys | meaning |
//! |---|---|
//! | Ctrl-A x | end the machine |
//! | Ctrl-A h, Ctrl-A ? | print the help |
//! | Ctrl-A Ctrl-A | a Ctrl-A for the guest |
//!
//! After any other key nothing happens and both are dropped, so that a slip does not type into the
//! guest.

/// Ctrl-A.
const ESCAPE: u8 = 0x01;

/// Text that Ctrl-A h prints.
pub const HELP: &str = "\r\n[exitless] Ctrl-A x: end the machine   Ctrl-A h: this help   \
                        Ctrl-A Ctrl-A: send Ctrl-A\r\n";

/// Command of the user, besides typing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// End the machine.
    Quit,
    /// Print [`HELP`].
    Help,
}

/// Remembers a Ctrl-A between two reads.
#[derive(Debug, Default)]
pub struct EscapeFilter {
    escaped: bool,
}

impl EscapeFilter {
    /// Appends to `typed` what is for the guest; answers the last command in `input`, Quit before
    /// others.
    pub fn feed(&mut self, input: &[u8], typed: &mut Vec<u8>) -> Option<Command> {
        let mut command = None;
        for &byte in input {
            if !self.escaped {
                match byte {
                    ESCAPE => self.escaped = true,
                    _ => typed.push(byte),
                }
                continue;
            }
            self.escaped = false;
            match byte {
                ESCAPE => typed.push(ESCAPE),
                b'x' | b'X' => return Some(Command::Quit),
                b'h' | b'H' | b'?' => command = Some(Command::Help),
                _ => {}
            }
        }
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(chunks: &[&[u8]]) -> (Vec<u8>, Vec<Option<Command>>) {
        let mut filter = EscapeFilter::default();
        let mut typed = Vec::new();
        let commands = chunks.iter().map(|c| filter.feed(c, &mut typed)).collect();
        (typed, commands)
    }

    #[test]
    fn plain_typing_passes() {
        assert_eq!(feed(&[b"ls\r\x03"]), (b"ls\r\x03".to_vec(), vec![None]));
    }

    #[test]
    fn a_sequence_may_be_split_between_reads() {
        let (typed, commands) = feed(&[b"a\x01", b"x"]);
        assert_eq!(typed, b"a");
        assert_eq!(commands, [None, Some(Command::Quit)]);
    }

    #[test]
    fn a_doubled_escape_is_one_for_the_guest_and_a_slip_is_dropped() {
        assert_eq!(feed(&[b"\x01\x01b\x01qc"]).0, b"\x01bc");
        assert_eq!(feed(&[b"\x01h"]).1, [Some(Command::Help)]);
    }
}
