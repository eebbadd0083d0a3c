//! Syncs of a file in the page cache: one at a time, and none after one that failed.
//!
//! The kernel reports an error of writing its cache to the disk to one fsync of an open file, and
//! takes the pages for clean. A later fsync succeeds though what it should have made stable is
//! lost, and so may one that runs at the same time and ends second. So syncs run one after the
//! other (those that wait share the next one), and from the first that fails all fail, until the
//! file is opened anew. Reads and writes go on.
//!
//! With O_DIRECT nothing of this is needed and nothing of it is done: there is no cache to lose
//! data from, a write that does not reach the disk fails itself, and a sync (of the disk's cache
//! and the file's metadata) that fails may be tried again. QEMU's file-posix draws the same line.

use std::fs::File;

use super::path_of;

/// Slots that wait for a sync, and the sync that runs.
#[derive(Default)]
pub(super) struct Syncs {
    /// The error number of the first that failed.
    error: Option<i32>,
    /// The slot whose sync the kernel has, or will be given.
    running: Option<u32>,
    /// Slots that share its end.
    sharing: Vec<u32>,
    /// Slots that came while it ran.
    waiting: Vec<u32>,
}

/// Answer to a slot that wants a sync.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Begin {
    /// The kernel is to be given it.
    Now,
    /// [`Syncs::ended`] will name it.
    Later,
    /// It has failed, with this error number.
    Failed(i32),
}

impl Syncs {
    /// The error number that every sync answers.
    pub(super) fn error(&self) -> Option<i32> {
        self.error
    }

    /// A slot wants everything synced that was written before.
    pub(super) fn begin(&mut self, slot: u32) -> Begin {
        if let Some(errno) = self.error {
            return Begin::Failed(errno);
        }
        if self.running.is_some() {
            self.waiting.push(slot);
            return Begin::Later;
        }
        self.running = Some(slot);
        Begin::Now
    }

    /// A slot waits no longer; false: it does not wait, but runs, or wants no sync.
    pub(super) fn give_up(&mut self, slot: u32) -> bool {
        let waits = [&mut self.sharing, &mut self.waiting];
        waits.into_iter().any(|slots| {
            let at = slots.iter().position(|&other| other == slot);
            at.map(|at| slots.remove(at)).is_some()
        })
    }

    /// The running sync has ended with `result`, 0 or less. Others that have ended with it, in
    /// `ended`; and the slot that is to be given to the kernel next.
    pub(super) fn ended(&mut self, result: i32, file: &File, ended: &mut Vec<u32>) -> Option<u32> {
        self.running = None;
        match -result {
            0 => ended.append(&mut self.sharing),
            // Stopped before it began, or interrupted because it was to be stopped: nothing is
            // known of the disk. Those that shared it have the next one.
            libc::ECANCELED | libc::EINTR => {}
            errno => {
                self.fail(errno, file);
                ended.append(&mut self.sharing);
                ended.append(&mut self.waiting);
                return None;
            }
        }
        self.sharing.append(&mut self.waiting);
        if self.sharing.is_empty() {
            return None;
        }
        self.running = Some(self.sharing.remove(0));
        self.running
    }

    fn fail(&mut self, errno: i32, file: &File) {
        self.error = Some(errno);
        tracing::error!(
            "syncing {} failed; what was written since the last sync may be lost, and every flush \
             will fail until \
             the file is opened again: {}",
            path_of(file).unwrap_or_default().display(),
            std::io::Error::from_raw_os_error(errno)
        );
    }
}
