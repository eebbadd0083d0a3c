//! The exit ledger: the number of exits from guest mode, by cause.
//!
//! [`account`] charges exits to causes. [`kvm_stats`] and [`trace`] are the two sources in the
//! kernel, and [`reasons`] interprets the second. This module keeps the marks that a guest makes
//! (by writing the marker port), pairs them into windows, and writes the report. Figures are
//! counts; the only times in it are for idle shares and are labelled so.
//!
//! Called by vCPU threads at a marker and by the main thread at the end; one lock, held while a
//! snapshot is taken, so that two marks cannot interleave.

pub mod account;
pub mod conditions;
mod counts;
pub mod kvm_stats;
pub mod reasons;
pub mod report;
pub mod trace;

use std::sync::{Mutex, PoisonError};

use account::{Snapshot, Window};

/// Marker value that begins a window.
pub const BEGIN: u8 = 1;
/// Marker value that ends one.
pub const END: u8 = 2;
/// Windows kept: a guest that writes the marker for ever costs no memory.
const MAX_WINDOWS: usize = 4096;

/// Source of snapshots: the machine.
pub trait Source: Send + Sync {
    /// Sets up what the first window needs. Called before each window begins.
    fn prepare(&self) {}

    /// Returns a snapshot of everything, now.
    fn snapshot(&self) -> Snapshot;
}

/// The ledger of one VM.
pub struct Ledger {
    source: Box<dyn Source>,
    marks: Mutex<Marks>,
}

#[derive(Default)]
struct Marks {
    start: Snapshot,
    open: Option<Snapshot>,
    tag: u8,
    windows: Vec<(u8, Window)>,
    dropped: u64,
}

/// Windows of a whole run.
#[derive(Default)]
pub struct Account {
    /// From the first instruction to the end.
    pub whole: Window,
    /// The guest's windows in order, each with the tag (marker value above 2) set before it began.
    pub windows: Vec<(u8, Window)>,
    /// Windows beyond the number kept.
    pub dropped: u64,
}

impl Ledger {
    /// Opens the account with a first snapshot.
    pub fn new(source: Box<dyn Source>) -> Self {
        let start = source.snapshot();
        Self {
            source,
            marks: Mutex::new(Marks {
                start,
                ..Marks::default()
            }),
        }
    }

    /// Takes a write of `value` by the guest to the marker port.
    pub fn mark(&self, value: u8) {
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        match value {
            BEGIN => {
                self.source.prepare();
                marks.open = Some(self.source.snapshot());
            }
            END => {
                if let Some(begin) = marks.open.take() {
                    let window = Window::between(&begin, &self.source.snapshot());
                    if marks.windows.len() < MAX_WINDOWS {
                        let tag = marks.tag;
                        marks.windows.push((tag, window));
                    } else {
                        marks.dropped += 1;
                    }
                }
            }
            tag => marks.tag = tag,
        }
    }

    /// Closes the account. The VM has stopped running guest code, but its vCPUs' statistics still
    /// exist.
    pub fn close(&self) -> Account {
        let end = self.source.snapshot();
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        Account {
            whole: Window::between(&marks.start, &end),
            windows: std::mem::take(&mut marks.windows),
            dropped: marks.dropped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Ten exits between any two snapshots.
    struct Clockwork(AtomicU64);

    impl Source for Clockwork {
        fn snapshot(&self) -> Snapshot {
            let exits = self.0.fetch_add(10, Ordering::Relaxed);
            Snapshot {
                kvm: [exits, 0, 0, 0],
                ..Snapshot::default()
            }
        }
    }

    #[test]
    fn begin_and_end_make_a_window_with_its_tag() {
        let ledger = Ledger::new(Box::new(Clockwork(AtomicU64::new(0))));
        ledger.mark(7);
        ledger.mark(BEGIN);
        ledger.mark(END);
        ledger.mark(END); // without a beginning: nothing
        let account = ledger.close();
        assert_eq!(account.windows.len(), 1);
        assert_eq!(account.windows[0].0, 7);
        assert_eq!(account.windows[0].1.exits.total, 10);
        assert_eq!(account.whole.exits.total, 30);
    }

    #[test]
    fn a_guest_that_marks_for_ever_fills_no_memory() {
        let ledger = Ledger::new(Box::new(Clockwork(AtomicU64::new(0))));
        for _ in 0..MAX_WINDOWS + 5 {
            ledger.mark(BEGIN);
            ledger.mark(END);
        }
        let account = ledger.close();
        assert_eq!((account.windows.len(), account.dropped), (MAX_WINDOWS, 5));
    }
}
