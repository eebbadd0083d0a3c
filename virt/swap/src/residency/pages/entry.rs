//! Entry of one page, in 20 bytes.

/// A 4 KiB page of a guest's memory, by its number in the memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Page(pub u32);

/// A 4 KiB slot of the swap store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// A 4 KiB block of a disk whose blocks may back pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Block {
    /// Number of the disk.
    pub disk: u8,
    /// Byte offset divided by 4096.
    pub number: u32,
}

impl Block {
    /// Returns the block `count` further on; `None` past the last one that has a number.
    pub fn ahead(self, count: u32) -> Option<Self> {
        let number = self.number.checked_add(count)?;
        Some(Self { number, ..self })
    }
}

/// Location of a page's content, or of equal content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// In memory only; of an absent page: it is all zeroes.
    Nowhere,
    /// In the swap store.
    Slot(Slot),
    /// On a disk of the guest.
    Block(Block),
}

/// State of a page between memory and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its content is elsewhere, or zeroes.
    Absent,
    /// Its content is being read from its place.
    Fetching,
    /// In memory for a disk to read into, and for devices; its old content is forgotten. (A read
    /// that fails leaves zeroes, or the data read so far.)
    Filling,
    /// In memory, mapped for the guest, shown to devices. A block is its place if its content was
    /// that block's when it was last write-protected.
    Resident,
    /// In memory, but neither mapped nor shown: a second chance.
    Unmapped,
    /// As soft, and being written to its slot.
    Saving,
}

/// Entry of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    state: State,
    backing_kind: BackingKind,
    disk: u8,
    marks: u8,
    number: u32,
    /// Next page in the same chain of [`Blocks`](super::blocks::Blocks).
    chain: u32,
    /// For a page in a queue, the previous page. For all others, if they are absent and not zeroes,
    /// or on their way out or in, the CRC that their content has to match.
    previous_or_crc: u32,
    /// For a page in a queue, the next page.
    next: u32,
}

/// Flag of a page.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(super) enum Mark {
    /// The content of its block is about to change: once fetched, it is in memory only.
    LeavesBlock = 1,
    /// It is in a [`Queue`](super::queue::Queue): that of resident pages or that of unmapped ones,
    /// by its state.
    Queued = 2,
    /// The guest has discarded it: it is dropped once no vCPU and no device reaches it. For a
    /// resident page, or one that is being saved.
    Discarded = 4,
    /// A block would back it if it did not back enough other pages. For a page without a place, for
    /// a counter alone: the block may have changed since.
    Surplus = 8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BackingKind {
    Nowhere,
    Slot,
    Block,
}

impl Entry {
    /// Entry of a page that has not been accessed.
    pub const NEW: Self = Self {
        state: State::Absent,
        backing_kind: BackingKind::Nowhere,
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
    /// old state.
    pub fn set_state(&mut self, state: State) -> State {
        std::mem::replace(&mut self.state, state)
    }

    pub fn backing(&self) -> Backing {
        match self.backing_kind {
            BackingKind::Nowhere => Backing::Nowhere,
            BackingKind::Slot => Backing::Slot(Slot(self.number)),
            BackingKind::Block => Backing::Block(Block {
                disk: self.disk,
                number: self.number,
            }),
        }
    }

    /// Changes the place: for [`Pages`](super::Pages) and [`Blocks`](super::blocks::Blocks), which
    /// keep slots and chains in step with it.
    pub fn set_backing(&mut self, backing: Backing) {
        (self.backing_kind, self.disk, self.number) = match backing {
            Backing::Nowhere => (BackingKind::Nowhere, 0, 0),
            Backing::Slot(slot) => (BackingKind::Slot, 0, slot.0),
            Backing::Block(block) => (BackingKind::Block, block.disk, block.number),
        };
    }

    /// Returns the next page in the same chain.
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

    /// Returns the CRC that its content has to match.
    pub fn crc(&self) -> u32 {
        debug_assert!(!self.has(Mark::Queued), "a link stands there");
        self.previous_or_crc
    }

    /// Sets the CRC, for a page in no queue; it is lost when the page enters one.
    pub fn set_crc(&mut self, crc: u32) {
        debug_assert!(!self.has(Mark::Queued), "a link stands there");
        self.previous_or_crc = crc;
    }

    /// Puts the page into a queue between these: for [`Queue`](super::queue::Queue), as the
    /// functions below.
    pub fn enter_queue(&mut self, previous: u32, next: u32) {
        debug_assert!(!self.has(Mark::Queued), "a page is in one queue");
        self.set(Mark::Queued, true);
        (self.previous_or_crc, self.next) = (previous, next);
    }

    /// Removes it from its queue; returns its neighbours.
    pub fn leave_queue(&mut self) -> (u32, u32) {
        debug_assert!(self.has(Mark::Queued), "it is in a queue");
        self.set(Mark::Queued, false);
        (self.previous_or_crc, self.next)
    }

    /// Changes the previous page.
    pub fn set_previous(&mut self, previous: u32) {
        debug_assert!(self.has(Mark::Queued), "it is in a queue");
        self.previous_or_crc = previous;
    }

    /// Changes the next page.
    pub fn set_next(&mut self, next: u32) {
        debug_assert!(self.has(Mark::Queued), "it is in a queue");
        self.next = next;
    }
}

const _: () = assert!(size_of::<Entry>() == 20);
