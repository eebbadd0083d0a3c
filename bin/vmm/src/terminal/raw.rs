//! Raw mode of the user's terminal, and its return.
//!
//! The saved settings live in one process-wide place, so that every way out can restore them: the
//! guard's drop, the panic hook, the handlers of signals that kill (SIGSEGV and friends), and
//! [`leave`](crate::ending::leave). Orderly signals (SIGINT, SIGTERM, SIGHUP, SIGQUIT) end the
//! machine through `run` and so reach the guard.
//!
//! UNSAFETY: `tcsetattr` and `sigaction` have no safe form in the standard library; the handler
//! runs only async-signal-safe calls.

use std::io::{self, IsTerminal};
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Settings before raw mode.
static SAVED: OnceLock<libc::termios> = OnceLock::new();
/// Whether the terminal is in raw mode now.
static RAW: AtomicBool = AtomicBool::new(false);

const FATAL: [libc::c_int; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGABRT,
    libc::SIGILL,
    libc::SIGFPE,
];

/// Restores the terminal when dropped.
pub struct RawMode(());

impl RawMode {
    /// Enters raw mode for standard input, if that is a terminal; `None` if it is not.
    pub fn enter() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let mut settings = MaybeUninit::uninit();
        // SAFETY: the second argument points to room for one `termios`.
        if unsafe { libc::tcgetattr(libc::STDIN_FILENO, settings.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: tcgetattr succeeded and so filled it.
        let saved: libc::termios = unsafe { settings.assume_init() };
        let saved = SAVED.get_or_init(|| saved);
        install_hooks();
        let mut raw = *saved;
        // SAFETY: changes the local copy only.
        unsafe { libc::cfmakeraw(&mut raw) };
        // Our own messages and the guest's share the screen: keep "\n" going to the line's start.
        raw.c_oflag = saved.c_oflag;
        RAW.store(true, Ordering::SeqCst);
        // SAFETY: a valid `termios` for a descriptor that is a terminal.
        if unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw) } != 0 {
            let error = io::Error::last_os_error();
            RAW.store(false, Ordering::SeqCst);
            return Err(error);
        }
        Ok(Some(Self(())))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal its settings back, once. Async-signal-safe, and never waits.
pub fn restore() {
    if RAW.swap(false, Ordering::SeqCst)
        && let Some(saved) = SAVED.get()
    {
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the set and the others use it; `saved` came from
        // tcgetattr on this descriptor.
        unsafe {
            // A process that is in the background by now would be stopped for changing the
            // terminal, and never end.
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGTTOU);
            libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, saved);
        }
    }
}

extern "C" fn on_fatal(signal: libc::c_int) {
    restore();
    // SA_RESETHAND has put the default action back: raising again dies as if we had never been
    // here.
    // SAFETY: raise is async-signal-safe.
    unsafe { libc::raise(signal) };
}

fn install_hooks() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let earlier = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            earlier(panic);
        }));
        for signal in FATAL {
            // SAFETY: an all-zero sigaction is a valid one.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            let handler: extern "C" fn(libc::c_int) = on_fatal;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_RESETHAND | libc::SA_ONSTACK;
            // SAFETY: `action` is initialised and its handler async-signal-safe; the old action is
            // not asked for.
            unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
        }
    });
}
