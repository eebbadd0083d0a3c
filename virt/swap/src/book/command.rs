//! What the book is told, and what it wants done.

use super::entry::{Page, Place, Slot};

/// A request of a disk, by a number that is its own while it is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Op(pub u64);

/// One access that waits for memory, by the number that its owner gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// How a page is mapped for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// A store goes unseen.
    Writable,
    /// The first store shows.
    Protected,
    /// As protected if the marker says that nobody stored since it was, and else writable.
    AsMarked,
}

/// What the pager is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Ask the owner to let go of these, up to [`BATCH`](super::BATCH); answered by [`Book::answered`](super::Book::answered).
    Ask(Vec<Page>),
    /// Take it from the guest; the memory, and the marker, stay.
    Unmap(Page),
    /// Look at a soft page; answered by [`Book::examined`](super::Book::examined).
    Examine(Page),
    /// Give its memory back.
    Punch(Page),
    /// Give it memory that holds zeroes.
    Zero(Page),
    /// Give it memory, and read its content; answered by [`Book::ended`](super::Book::ended).
    Fetch(Page, Place),
    /// Write a soft page to its slot; answered by [`Book::ended`](super::Book::ended).
    Save(Page, Slot),
    /// Give back what is behind so many slots from this one on, which hold nothing; answered by [`Book::ended`](super::Book::ended).
    Trim(Slot, u32),
    /// Map it for the guest, and wake who waits for it.
    Map(Page, Protection),
    /// Write-protect a page that is mapped.
    Protect(Page),
    /// Wake who waits for a page that is mapped; if the host has taken its mapping away, map it writable.
    Wake(Page),
    /// From now on devices may reach it.
    Show(Page),
    /// All pages of the ticket are there, or have been seen to ([`Book::discard`](super::Book::discard)).
    Done(Ticket),
    /// The disk's request may go down.
    Go(Op),
    /// The guest cannot go on; [`Book::retry`](super::Book::retry) when the cause has been seen to.
    Stop(Trouble),
}

/// The end of a command that took its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Of [`Command::Fetch`]: what was read has this CRC, or it could not be.
    Fetched(Page, Result<u32, Errno>),
    /// Of [`Command::Save`]: whether it was written.
    Saved(Page, Slot, Result<(), Errno>),
    /// Of [`Command::Trim`]: whether it could be done. What cannot be is not tried again.
    Trimmed(Slot, u32, Result<(), Errno>),
}

/// The host's number for why something could not be done. Nothing is decided by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// Why the guest cannot go on. No content is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The store has no free slot.
    StoreFull,
    /// A slot could not be written.
    CannotSave(Slot, Errno),
    /// The content could not be read.
    CannotFetch(Place, Errno),
    /// What was read is not what was dropped: somebody else changed the image, or the store is broken.
    Changed(Place),
}

/// What a soft page was found to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The marker says that no processor stored since the page was write-protected.
    pub is_clean: bool,
    /// All its bytes are 0.
    pub is_zero: bool,
    /// Of its content.
    pub crc: u32,
}

/// What has been done, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Left memory unwritten, since a block holds the same.
    pub dropped_to_disk: u64,
    /// Left memory unwritten, since they were zeroes.
    pub dropped_as_zeroes: u64,
    /// Left memory by way of the store.
    pub saved: u64,
    /// Read from a disk, those read ahead among them.
    pub fetched_from_disk: u64,
    /// Read from the store, those read ahead among them.
    pub fetched_from_store: u64,
    /// Came as zeroes.
    pub zeroed: u64,
    /// Came back from a second chance.
    pub rescued: u64,
    /// Were about to be overwritten as a whole, and not read although they held something.
    pub not_fetched: u64,
    /// Stood for a block that was about to change, and were read before.
    pub fetched_before_a_write: u64,
    /// Were read although a device was about to overwrite them as a whole: only after
    /// [`Book::reads_before_overwrites`](super::Book::reads_before_overwrites).
    pub stale: u64,
    /// Were to be written to the store although a disk's block held the same: nobody had stored to them since a request of whole
    /// blocks filled or wrote them. Those of a block that [`SHARERS`](super::SHARERS) other pages stood for, which may have changed
    /// since, so there were no more of these; all others only after [`Book::saves_what_blocks_hold`](super::Book::saves_what_blocks_hold).
    /// Not counted: what has been in the store since, and what moved parts of blocks or beside another request for the same.
    pub silent_writes: u64,
    /// Of silent writes whose block is known, those to a slot that is not right behind the slot of the block before: runs into which
    /// the store breaks the disk's order. Only after [`Book::saves_what_blocks_hold`](super::Book::saves_what_blocks_hold).
    pub order_breaks: u64,
    /// Were given up by the guest, and are gone unwritten.
    pub discarded: u64,
    /// Were not let go, since a device uses them.
    pub refused: u64,
}
