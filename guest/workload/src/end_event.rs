//! The end of a run, for a thread that waits between two lines of progress.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// Event that wakes a thread that waits between two lines: the run has ended.
#[derive(Default)]
pub(crate) struct EndEvent {
    flag: Mutex<bool>,
    changed: Condvar,
}

impl EndEvent {
    pub(crate) fn set(&self) {
        *self.flag.lock().expect("setting cannot panic") = true;
        self.changed.notify_all();
    }

    /// Waits for it for at most `limit`. Returns whether it came.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let flag = self.flag.lock().expect("setting cannot panic");
        let waited = self.changed.wait_timeout_while(flag, limit, |flag| !*flag);
        *waited.expect("setting cannot panic").0
    }
}
