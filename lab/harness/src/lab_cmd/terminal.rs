//! Our terminal in raw mode, so that every key reaches the lab's.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use vmm_sys_util::terminal::Terminal;

/// Returns standard input as a file of its own: a thread blocked in reading it holds no lock that
/// [`RawMode`] needs.
pub fn input() -> io::Result<File> {
    Ok(File::from(io::stdin().as_fd().try_clone_to_owned()?))
}

/// Raw mode while the value lives; no effect if standard input is no terminal.
pub struct RawMode {
    entered: bool,
}

impl RawMode {
    /// Enters raw mode if there is a terminal.
    pub fn enter() -> Self {
        Self {
            entered: io::stdin().lock().set_raw_mode().is_ok(),
        }
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        if self.entered {
            // The mode of a terminal that is gone does not matter.
            let _ = io::stdin().lock().set_canon_mode();
        }
    }
}
