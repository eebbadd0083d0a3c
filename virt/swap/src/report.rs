//! State and counters of a pager: numbers of pages, unless another unit is given.

use crate::residency::{Counts, PauseReason};

/// State of a pager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Limit of the pages in memory.
    pub limit: usize,
    /// Pages in memory, including those on their way in or out.
    pub present: usize,
    /// Slots of the store, 4 KiB each.
    pub slots: usize,
    /// Pages that are backed by blocks of disks, in memory or not.
    pub tracked: usize,
    /// Free slots of the store.
    pub free_slots: usize,
    /// Counters of the book.
    pub counts: Counts,
    /// Requests to the store and the images.
    pub traffic: Traffic,
    /// Faults of processors.
    pub faults: u64,
    /// Absent pages that a vCPU was about to overwrite, and that were not read.
    pub prevented: u64,
    /// Times that vCPUs were stopped for a page that none of them was seen to overwrite.
    pub undecided: u64,
    /// Absent pages that were read although a vCPU was seen to be about to overwrite them: there
    /// was no room for them when that was found out, or the policy
    /// [reads them](crate::residency::IoPolicy::reads_overwritten). Not counted: faults for which
    /// no vCPU was stopped, overwriting in many instructions, pages that were read ahead.
    pub false_reads: u64,
    /// Tickets of devices.
    pub tickets: u64,
    /// Times the guest was paused.
    pub pauses: u64,
    /// Reason of the last pause.
    pub last_pause: Option<PauseReason>,
    /// It is paused now.
    pub is_paused: bool,
}

/// Number of requests, and of their pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounts {
    /// Requests.
    pub requests: u64,
    /// Pages of 4 KiB.
    pub pages: u64,
}

impl IoCounts {
    pub(crate) fn add(&mut self, pages: usize) {
        self.requests += 1;
        self.pages += pages as u64;
    }
}

/// Requests to the store and the images so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Read from the store.
    pub store_reads: IoCounts,
    /// Written to it.
    pub store_writes: IoCounts,
    /// Trims of the store's freed slots.
    pub store_trims: IoCounts,
    /// Read from images of disks.
    pub image_reads: IoCounts,
}
