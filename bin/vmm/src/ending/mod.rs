//! End of the process: the requests for it, the waits that it allows, and its exit status.
//!
//! * [`signals`]: a thread that takes signals whatever else the process does. The first signal asks
//!   a guest to power off, the next one ends the process in order, and another one ends it at once.
//!   Without a guest to ask, the first ends it in order.
//! * [`storage`]: waiting for disks whose requests the host does not finish, and naming them in a
//!   message.
//!
//! Exit statuses of `run` and `serve`:
//!
//! | status | `run` | `serve` |
//! |---|---|---|
//! | 0 | the guest powered off, by itself or since a signal asked it to, or Ctrl-A x | ended in order by a signal |
//! | 1 | a crash, or a failure under way | a failure under way |
//! | 2 | nothing was started | nothing was started |
//! | 3 | the guest asked for a reset, with `--on-reboot exit` | |
//! | 4 | a sidecore stopped answering | a core panicked |
//! | 5 | a signal while the end was under way | the same |
//! | 6 | the guest's kernel has panicked, and reported it | |
//! | 7 | the guest asked for a reset, and its machine could not be started again | |
//! | 128 + n | ended in order by signal n | |

pub mod signals;
pub mod storage;

use std::time::Duration;

use crate::messages;
use crate::terminal::raw;

/// A crash, or a failure under way.
pub const STATUS_FAILED: u8 = 1;
/// A sidecore stopped answering, or panicked.
pub const STATUS_STUCK: u8 = 4;
/// A signal during the end ended the process where it was.
pub const STATUS_AT_ONCE: u8 = 5;

/// The guest's kernel has panicked, and reported it.
pub const STATUS_PANICKED: u8 = 6;
/// The machine could not be started again.
pub const STATUS_NOT_RESTARTED: u8 = 7;

/// Returns the status of an end in order by this signal.
pub fn status_of_signal(signal: i32) -> u8 {
    128u8.wrapping_add(signal as u8)
}

/// Period of the check whether waiting makes sense.
pub const LOOK: Duration = Duration::from_millis(100);

/// Time that an end waits for a reader of what was written, where it may not wait for ever.
pub const WRITE_LIMIT: Duration = Duration::from_millis(500);

/// Ends the process here and now: the terminal is given back, messages have [`WRITE_LIMIT`], and
/// nothing is joined or dropped. The kernel cancels what is in flight and takes back the rest.
pub fn leave(status: u8) -> ! {
    raw::restore();
    messages::finish(WRITE_LIMIT);
    // SAFETY: ends the process; no code of this process runs afterwards, so nothing can observe
    // what was not dropped.
    unsafe { libc::_exit(i32::from(status)) }
}
