//! The thread that waits for the outside world: typing, and signals that ask the process to end.
//!
//! It polls standard input (if the console is on stdio), a signalfd, and the control's end event; it never
//! touches guest memory. It ends when the machine does.
//!
//! UNSAFETY: `poll`, `signalfd`, `pthread_sigmask` and `read` on descriptors held here.

use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::escape::{Command, EscapeFilter, HELP};
use super::uart::Uart;
use crate::vm::control::{Control, End};

/// Signals that end the machine in order.
const ORDERLY: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// Orderly signals, delivered through a descriptor instead of a handler.
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks the orderly signals for this thread and every thread it starts from now on: call it before
    /// any other thread exists, or a signal may still end the process at once.
    pub fn block() -> io::Result<Self> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the set, sigaddset changes it; both get valid pointers and numbers.
        let set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in ORDERLY {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            set.assume_init()
        };
        // SAFETY: a valid set; the old mask is not asked for.
        let error = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: a valid set; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: signalfd has just given us this descriptor.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn take(&self) -> Option<i32> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let len = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the buffer has room for the one record asked for.
        let read = unsafe { libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), len) };
        // SAFETY: a full record was read, so it is initialised.
        (read == len as isize).then(|| unsafe { info.assume_init() }.ssi_signo as i32)
    }
}

/// Where typing goes.
pub struct Keyboard {
    /// The console's chip.
    pub uart: Arc<Uart>,
    /// Ctrl-A sequences are for us: standard input is a terminal.
    pub escapes: bool,
}

/// Starts the thread. `keyboard` is absent when the console is not on stdio.
pub fn spawn(
    signals: Signals,
    keyboard: Option<Keyboard>,
    control: Arc<Control>,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name("console".into())
        .spawn(move || watch(&signals, keyboard, &control))
}

fn watch(signals: &Signals, mut keyboard: Option<Keyboard>, control: &Control) {
    let mut filter = EscapeFilter::default();
    while !control.is_over() {
        let stdin = match keyboard {
            Some(_) => libc::STDIN_FILENO,
            // poll ignores negative descriptors.
            None => -1,
        };
        let ready = match wait([signals.0.as_raw_fd(), control.end_fd(), stdin]) {
            Ok(ready) => ready,
            Err(error) => {
                return control.end(End::Host(format!("poll of the console failed: {error}")));
            }
        };
        if ready[0]
            && let Some(signal) = signals.take()
        {
            control.end(End::Signal(signal));
        }
        if ready[2]
            && let Some(on) = &keyboard
            && !typing(on, &mut filter, control)
        {
            // End of file: the guest simply hears nothing any more.
            keyboard = None;
        }
    }
}

/// Passes on one read of standard input; false at its end.
fn typing(keyboard: &Keyboard, filter: &mut EscapeFilter, control: &Control) -> bool {
    let mut buffer = [0u8; 256];
    // SAFETY: the buffer has room for the bytes asked for. (Not `std::io::stdin`, whose buffer poll cannot see.)
    let len = unsafe { libc::read(libc::STDIN_FILENO, buffer.as_mut_ptr().cast(), buffer.len()) };
    let Ok(len @ 1..) = usize::try_from(len) else {
        return false;
    };
    let mut typed = Vec::with_capacity(len);
    let command = if keyboard.escapes {
        filter.feed(&buffer[..len], &mut typed)
    } else {
        typed.extend_from_slice(&buffer[..len]);
        None
    };
    match command {
        Some(Command::Quit) => control.end(End::Quit),
        Some(Command::Help) => {
            // Best effort: a closed screen needs no help.
            let _ = io::stderr().write_all(HELP.as_bytes());
        }
        None => {}
    }
    keyboard.uart.type_in(&typed, || control.is_over());
    true
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
