//! What the book is told, and what it wants done.

use super::pages::{Page, Place, Slot};

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
    /// Ask the owner to let go of these, up to [`BATCH`](super::BATCH); answered by
    /// [`Book::answered`](super::Book::answered).
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
    /// Give back what is behind so many slots from this one on, which hold nothing; answered by
    /// [`Book::ended`](super::Book::ended).
    Trim(Slot, u32),
    /// Map it for the guest, and wake who waits for it.
    Map(Page, Protection),
    /// Write-protect a page that is mapped.
    Protect(Page),
    /// Wake who waits for a page that is mapped; if the host has taken its mapping away, map it
    /// writable.
    Wake(Page),
    /// From now on devices may reach it.
    Show(Page),
    /// All pages of the ticket are there, or have been seen to
    /// ([`Book::discard`](super::Book::discard)).
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
    /// What was read is not what was dropped: somebody else changed the image, or the store is
    /// broken.
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
