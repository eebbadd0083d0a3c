//! What is known of one page, in 20 bytes.

/// A 4 KiB page of a guest's memory, by its number in the memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Page(pub u32);

/// A 4 KiB slot of the swap store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// A 4 KiB block of a disk whose blocks may stand for pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Block {
    /// Which disk.
    pub disk: u8,
    /// Byte offset divided by 4096.
    pub number: u32,
}

impl Block {
    /// The block `count` further on; none past the last one that has a number.
    pub fn ahead(self, count: u32) -> Option<Self> {
        let number = self.number.checked_add(count)?;
        Some(Self { number, ..self })
    }
}

/// Where a page's content is, or what it equals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Only in memory; of an absent page: it is all zeroes.
    Nowhere,
    /// In the swap store.
    Slot(Slot),
    /// On a disk of the guest.
    Block(Block),
}

/// Where a page is on its way between memory and elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its content is elsewhere, or zeroes.
    Absent,
    /// Its content is being read from its place.
    Fetching,
    /// In memory for a disk to read into, and for devices; its old content is forgotten. (A read
    /// that fails leaves zeroes, or what it got so far.)
    Filling,
    /// In memory, mapped for the guest, shown to devices. A block is its place if its content was
    /// that block's when it was last write-protected.
    Resident,
    /// In memory, but neither mapped nor shown: a second chance.
    Soft,
    /// As soft, and being written to its slot.
    Saving,
}

/// What is known of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    state: State,
    place_kind: PlaceKind,
    disk: u8,
    marks: u8,
    number: u32,
    /// The next page in the same chain of [`Blocks`](super::blocks::Blocks).
    chain: u32,
    /// Of a page in a queue the one before it. Of all others, if they are absent and not zeroes, or
    /// on their way out or in: what their content has to match.
    previous_or_crc: u32,
    /// Of a page in a queue the one behind it.
    next: u32,
}

/// A yes or no of a page.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(super) enum Mark {
    /// The content of its block is about to change: it is fetched to stay.
    LeavesBlock = 1,
    /// It is in a [`Queue`](super::queue::Queue): that of resident pages or that of soft ones, as
    /// its state says.
    Queued = 2,
    /// The guest does without it: it is dropped once nobody reaches it. Of a resident page, or one
    /// that is being saved.
    Discarded = 4,
    /// It would stand for a block if not enough pages did. Of a page that stands for itself, for a
    /// count alone: the block may have changed since.
    Surplus = 8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlaceKind {
    Nowhere,
    Slot,
    Block,
}

impl Entry {
    /// A page that nobody has touched.
    pub const NEW: Self = Self {
        state: State::Absent,
        place_kind: PlaceKind::Nowhere,
        disk: 0,
        marks: 0,
        number: 0,
        chain: u32::MAX,
        previous_or_crc: 0,
        next: 0,
    };

    pub fn state(&self) -> State {
        self.state
    }

    /// Changes the state: for [`Pages`](super::Pages), which counts the pages in each. Returns the
    /// old one.
    pub fn set_state(&mut self, state: State) -> State {
        std::mem::replace(&mut self.state, state)
    }

    pub fn place(&self) -> Place {
        match self.place_kind {
            PlaceKind::Nowhere => Place::Nowhere,
            PlaceKind::Slot => Place::Slot(Slot(self.number)),
            PlaceKind::Block => Place::Block(Block {
                disk: self.disk,
                number: self.number,
            }),
        }
    }

    /// Changes the place: for [`Pages`](super::Pages) and [`Blocks`](super::blocks::Blocks), which
    /// keep slots and chains in step with it.
    pub fn set_place(&mut self, place: Place) {
        (self.place_kind, self.disk, self.number) = match place {
            Place::Nowhere => (PlaceKind::Nowhere, 0, 0),
            Place::Slot(slot) => (PlaceKind::Slot, 0, slot.0),
            Place::Block(block) => (PlaceKind::Block, block.disk, block.number),
        };
    }

    /// The next page in the same chain.
    pub fn chain(&self) -> u32 {
        self.chain
    }

    /// Changes the next page in the same chain: for [`Blocks`](super::blocks::Blocks). Returns the
    /// old one.
    pub fn set_chain(&mut self, page: u32) -> u32 {
        std::mem::replace(&mut self.chain, page)
    }

    pub fn has(&self, mark: Mark) -> bool {
        self.marks & mark as u8 != 0
    }

    pub fn set(&mut self, mark: Mark, is_set: bool) {
        self.marks = self.marks & !(mark as u8) | if is_set { mark as u8 } else { 0 };
    }

    /// What its content has to match.
    pub fn crc(&self) -> u32 {
        debug_assert!(!self.has(Mark::Queued), "a link stands there");
        self.previous_or_crc
    }

    /// Of a page in no queue; forgotten when it enters one.
    pub fn set_crc(&mut self, crc: u32) {
        debug_assert!(!self.has(Mark::Queued), "a link stands there");
        self.previous_or_crc = crc;
    }

    /// For [`Queue`](super::queue::Queue), as those below: the page enters one between these.
    pub fn enter_queue(&mut self, previous: u32, next: u32) {
        debug_assert!(!self.has(Mark::Queued), "a page is in one queue");
        self.set(Mark::Queued, true);
        (self.previous_or_crc, self.next) = (previous, next);
    }

    /// It leaves its queue; the pages that it stood between.
    pub fn leave_queue(&mut self) -> (u32, u32) {
        debug_assert!(self.has(Mark::Queued), "it is in a queue");
        self.set(Mark::Queued, false);
        (self.previous_or_crc, self.next)
    }

    /// Another page stands before it now.
    pub fn set_previous(&mut self, previous: u32) {
        debug_assert!(self.has(Mark::Queued), "it is in a queue");
        self.previous_or_crc = previous;
    }

    /// Another page stands behind it now.
    pub fn set_next(&mut self, next: u32) {
        debug_assert!(self.has(Mark::Queued), "it is in a queue");
        self.next = next;
    }
}

const _: () = assert!(size_of::<Entry>() == 20);
