//! The thread between standard input and the console's chip.
//!
//! It polls standard input, the chip and the machine's end, and waits for none of them alone. Input
//! that the guest does not read is kept here, up to [`MOST`]. Beyond that a pipe or a file is not
//! read from, so its writer waits and nothing is lost. A terminal is read on, since Ctrl-A x must
//! work, and what is typed is dropped, as on a line that overruns.
//!
//! Signals are handled elsewhere: see [`crate::ending::signals`]. No thread joins it: between poll
//! and read another process that shares the terminal may take what was there, and then it waits in
//! read until the process ends.
//!
//! UNSAFETY: `poll` and `read` on descriptors held here.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

use console::uart::Uart;
use kvm::control::{Control, End};

use super::escape::{Command, EscapeFilter, HELP};
use crate::messages;

/// Bytes that wait for the guest.
const MOST: usize = 64 << 10;

/// Destination of typing.
pub struct Keyboard {
    /// The console's chip.
    pub uart: Arc<Uart>,
    /// Ctrl-A sequences are for us: standard input is a terminal.
    pub escapes: bool,
}

/// Starts the thread, which ends with the machine, or when the input has ended and the guest has it
/// all.
///
/// # Errors
/// No thread, or no descriptor.
pub fn spawn(keyboard: Keyboard, control: Arc<Control>) -> io::Result<()> {
    // Not `std::io::stdin`, whose buffer poll cannot see.
    let stdin = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    std::thread::Builder::new()
        .name("console".into())
        .spawn(move || ConsoleInput::new(keyboard, stdin).run(&control))
        .map(drop)
}

struct ConsoleInput {
    keyboard: Keyboard,
    /// `None` after its end: the guest receives no more input.
    input: Option<File>,
    filter: EscapeFilter,
    /// Typed, and not taken by the guest.
    pending: VecDeque<u8>,
}

impl ConsoleInput {
    fn new(keyboard: Keyboard, input: File) -> Self {
        Self {
            keyboard,
            input: Some(input),
            filter: EscapeFilter::default(),
            pending: VecDeque::new(),
        }
    }

    fn run(mut self, control: &Control) {
        while self.input.is_some() || !self.pending.is_empty() {
            self.pass_on();
            let emptied = match self.pending.is_empty() {
                // poll ignores negative descriptors.
                true => -1,
                false => self.keyboard.uart.emptied_fd(),
            };
            let input = match &self.input {
                Some(input) if self.keyboard.escapes || self.pending.len() < MOST => {
                    input.as_raw_fd()
                }
                _ => -1,
            };
            let ready = match wait([control.end_fd(), emptied, input]) {
                Ok(ready) => ready,
                Err(error) => {
                    return control.end(End::Host(format!("poll of the console failed: {error}")));
                }
            };
            // First: what is typed now is for the next reader of the terminal.
            if control.is_over() {
                return;
            }
            if ready[2] {
                self.read(control);
            }
        }
    }

    /// Passes input to the guest, as much as it takes.
    fn pass_on(&mut self) {
        while !self.pending.is_empty() {
            let taken = self.keyboard.uart.offer(self.pending.make_contiguous());
            if taken == 0 {
                return;
            }
            self.pending.drain(..taken);
        }
    }

    /// Takes up one read of the input.
    fn read(&mut self, control: &Control) {
        let Some(input) = &mut self.input else { return };
        let mut buffer = [0; 256];
        let len = match input.read(&mut buffer) {
            Ok(len @ 1..) => len,
            // A descriptor that another process has made a non-blocking one, and read first.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                ) =>
            {
                return;
            }
            _ => {
                self.input = None;
                return;
            }
        };
        let mut typed = Vec::with_capacity(len);
        let command = if self.keyboard.escapes {
            self.filter.feed(&buffer[..len], &mut typed)
        } else {
            typed.extend_from_slice(&buffer[..len]);
            None
        };
        match command {
            Some(Command::Quit) => control.end(End::Quit),
            Some(Command::Help) => messages::answer(HELP),
            None => {}
        }
        typed.truncate(MOST.saturating_sub(self.pending.len()));
        self.pending.extend(typed);
    }
}

fn wait<const N: usize>(fds: [RawFd; N]) -> io::Result<[bool; N]> {
    let mut polled = fds.map(|fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    });
    // SAFETY: the array holds N entries; -1 waits without limit.
    let count = unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, -1) };
    if count < 0 {
        let error = io::Error::last_os_error();
        return match error.kind() {
            io::ErrorKind::Interrupted => Ok([false; N]),
            _ => Err(error),
        };
    }
    Ok(polled.map(|entry| entry.revents != 0))
}
