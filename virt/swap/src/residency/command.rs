//! Commands of the book, and the results that are reported to it.

use super::pages::{Backing, Page, Slot};

/// A request of a disk, by a number that is unique while the request is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Op(pub u64);

/// One access that waits for memory, by the number that its owner gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// Protection of a page that is mapped for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Stores are not detected.
    Writable,
    /// The first store is detected.
    Protected,
    /// Protected if the uffd-wp bit, which a PTE marker keeps while the page is not mapped, shows
    /// that no store came since it was protected; otherwise writable.
    AsMarked,
}

/// Command to the pager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Ask the owner to release these, up to [`BATCH`](super::BATCH); answered by
    /// [`Residency::answered`](super::Residency::answered).
    Ask(Vec<Page>),
    /// Unmap it from the guest; the memory, and the PTE marker that keeps its uffd-wp bit, stay.
    Unmap(Page),
    /// Examine an unmapped page; answered by [`Residency::examined`](super::Residency::examined).
    Examine(Page),
    /// Free its memory.
    Punch(Page),
    /// Give it memory that holds zeroes.
    Zero(Page),
    /// Give it memory, and read its content; answered by
    /// [`Residency::ended`](super::Residency::ended).
    Fetch(Page, Backing),
    /// Write an unmapped page to its slot; answered by
    /// [`Residency::ended`](super::Residency::ended).
    Save(Page, Slot),
    /// Discard the blocks behind so many slots from this one on, which hold nothing; answered by
    /// [`Residency::ended`](super::Residency::ended).
    Trim(Slot, u32),
    /// Map it for the guest, and wake the accesses that wait for it.
    Map(Page, Protection),
    /// Write-protect a page that is mapped.
    Protect(Page),
    /// Wake the accesses that wait for a page that is mapped; if the host has unmapped it, map it
    /// writable.
    Wake(Page),
    /// Show it to devices, which may access it from now on.
    Show(Page),
    /// Complete the ticket: all of its pages are in memory, or have been processed
    /// ([`Residency::discard`](super::Residency::discard)).
    Done(Ticket),
    /// Submit the disk's request.
    Go(Op),
    /// Pause the guest, which cannot continue; [`Residency::retry`](super::Residency::retry) when
    /// the cause has been removed.
    Stop(PauseReason),
}

/// Result of a command that ends later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandOutcome {
    /// Of [`Command::Fetch`]: the CRC of the content read, or the error.
    Fetched(Page, Result<u32, Errno>),
    /// Of [`Command::Save`]: whether the slot was written.
    Saved(Page, Slot, Result<(), Errno>),
    /// Of [`Command::Trim`]: whether the slots were trimmed. A failed trim is not retried.
    Trimmed(Slot, u32, Result<(), Errno>),
}

/// The host's error number. No decision depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// Reason why the guest is paused. No content is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseReason {
    /// The store has no free slot.
    StoreFull,
    /// A slot could not be written.
    CannotSave(Slot, Errno),
    /// The content could not be read.
    CannotFetch(Backing, Errno),
    /// The content read is not the content that was dropped: another program changed the image, or
    /// the store is broken.
    Changed(Backing),
}

/// Result of the examination of an unmapped page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageExamination {
    /// The uffd-wp bit shows that no processor stored since the page was write-protected.
    pub is_clean: bool,
    /// All its bytes are 0.
    pub is_zero: bool,
    /// CRC of its content.
    pub crc: u32,
}
