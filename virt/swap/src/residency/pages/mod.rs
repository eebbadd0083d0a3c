//! Pages: the state of each between memory and its place, and the place of its content.
//!
//! ```text
//!          fetch               settle           unmap           save
//!    ┌────────────▶ Fetching ────────┐     ┌────────────▶ Unmapped ──────▶ Saving
//!    │     fill                settle▼     │                │◀───────────┤ save_failed
//!  Absent ────────▶ Filling ───────▶ Resident               │            │
//!    │▲                settle        ▲  ▲  │     settle     │            │
//!    └┼──────────────────────────────┘  └──┼────────────────┼────────────┤
//!     │                evict               ▼                ▼            │
//!     └────────────────────────────────────┴────────────────┴────────────┘
//!
//!  Resident: queued ── next_resident, discard_when_released ──▶ taken ── unmap, evict
//!              ▲────────────────────── keep ──────────────────────┘
//!  Unmapped:     queued ── next_soft ──▶ being examined ── save, evict, settle
//!              ▲── save, without a slot ─┘
//! ```
//! Only a resident page that was taken from its queue, and that the owner has released, is unmapped
//! or evicted.
//!
//! The place of a page changes by [`leave_backing`](Pages::leave_backing),
//! [`back_by_block`](Pages::back_by_block) and the transitions to and from [`State::Saving`], and
//! with it the slots' owners and the blocks' chains. States, queues, owners and chains are private
//! to this module, so no decision bypasses these functions.

mod blocks;
mod entry;
mod queue;
mod slots;

pub use blocks::{Blocks, SHARERS};
pub use entry::{Backing, Block, Page, Slot, State};
use entry::{Entry, Mark};
use queue::Queue;
pub use slots::Slots;

/// All pages of a guest, the slots and blocks that back them, and the queues in which they leave.
#[derive(Debug)]
pub struct Pages {
    entries: Box<[Entry]>,
    in_state: StateCounts,
    /// Resident pages, except those that were taken for the owner: the longest resident first.
    resident: Queue,
    /// Unmapped pages, except those that are being examined.
    unmapped: Queue,
    /// Number of examinations that have not been answered.
    examining: usize,
    blocks: Blocks,
    slots: Slots,
}

/// Number of pages in each state.
#[derive(Debug)]
struct StateCounts([usize; State::Saving as usize + 1]);

impl StateCounts {
    fn of(&self, state: State) -> usize {
        self.0[state as usize]
    }

    fn moved(&mut self, from: State, to: State) {
        self.0[from as usize] -= 1;
        self.0[to as usize] += 1;
    }
}

impl Pages {
    /// Creates `pages` pages of zeroes, none of them in memory, and `slots` free slots.
    pub fn new(pages: u32, slots: usize) -> Self {
        let mut in_state = StateCounts(Default::default());
        in_state.0[State::Absent as usize] = pages as usize;
        let mut all = Slots::default();
        all.add(slots);
        Self {
            entries: vec![Entry::NEW; pages as usize].into(),
            in_state,
            resident: Queue::EMPTY,
            unmapped: Queue::EMPTY,
            examining: 0,
            blocks: Blocks::new(pages as usize),
            slots: all,
        }
    }

    pub fn len(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Returns the bytes that are allocated for all pages.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.entries) + self.blocks.bytes()
    }

    /// Returns the number of pages that take memory, including those on their way in or out.
    pub fn present(&self) -> usize {
        self.entries.len() - self.in_state.of(State::Absent)
    }

    /// Returns the number of pages in this state.
    pub fn count(&self, state: State) -> usize {
        self.in_state.of(state)
    }

    /// Returns the number of examinations that have not been answered, including those of pages
    /// that have come back meanwhile.
    pub fn examining(&self) -> usize {
        self.examining
    }

    /// Returns the number of resident pages that were not taken for the owner.
    pub fn queued(&self) -> usize {
        self.resident.len()
    }

    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    pub fn slots_mut(&mut self) -> &mut Slots {
        &mut self.slots
    }

    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    fn entry(&self, page: Page) -> &Entry {
        &self.entries[page.0 as usize]
    }

    fn entry_mut(&mut self, page: Page) -> &mut Entry {
        &mut self.entries[page.0 as usize]
    }

    pub fn state(&self, page: Page) -> State {
        self.entry(page).state()
    }

    pub fn backing(&self, page: Page) -> Backing {
        self.entry(page).backing()
    }

    /// Returns whether the page is neither in memory nor anywhere else: it is all zeroes.
    pub fn is_absent_zeroes(&self, page: Page) -> bool {
        (self.state(page), self.backing(page)) == (State::Absent, Backing::Nowhere)
    }

    /// Returns the CRC that the content has to match, of a page that is absent, or on its way.
    pub fn crc(&self, page: Page) -> u32 {
        self.entry(page).crc()
    }

    /// Changes the page's state, and the counts.
    fn change(&mut self, page: Page, to: State) {
        let from = self.entry_mut(page).set_state(to);
        self.in_state.moved(from, to);
    }
}

/// Page-in.
impl Pages {
    /// Begins to read the content of an absent page from its place, which is returned.
    pub fn fetch(&mut self, page: Page) -> Backing {
        debug_assert_eq!(self.state(page), State::Absent);
        self.change(page, State::Fetching);
        self.backing(page)
    }

    /// Makes an absent page present for a disk to read into.
    pub fn fill(&mut self, page: Page) {
        debug_assert_eq!(self.state(page), State::Absent);
        self.change(page, State::Filling);
    }

    /// Makes a page whose content is in memory resident, whatever its state was.
    pub fn settle(&mut self, page: Page) {
        debug_assert_ne!(self.state(page), State::Resident);
        match self.state(page) {
            State::Unmapped => self.leave_unmapped_queue(page),
            State::Saving => {
                // The slot is freed when it has been written.
                let entry = self.entry_mut(page);
                entry.set_backing(Backing::Nowhere);
                // Stores to it from now on are kept.
                entry.set(Mark::Discarded, false);
            }
            _ => {}
        }
        self.change(page, State::Resident);
        self.entry_mut(page).set(Mark::LeavesBlock, false);
        self.resident.push_back(&mut self.entries, page);
    }

    /// Marks that the content of the block that backs the page is about to change: once it has been
    /// fetched it is in memory only.
    pub fn mark_leaves_block(&mut self, page: Page) {
        self.entry_mut(page).set(Mark::LeavesBlock, true);
    }

    pub fn leaves_block(&self, page: Page) -> bool {
        self.entry(page).has(Mark::LeavesBlock)
    }
}

/// Page-out.
impl Pages {
    /// Takes the page that has been resident for longest, for the owner to be asked for.
    pub fn next_resident(&mut self) -> Option<Page> {
        self.resident.pop_front(&mut self.entries)
    }

    /// Puts back a page that the owner was to be asked for, or has not released.
    pub fn keep(&mut self, page: Page) {
        debug_assert_eq!(self.state(page), State::Resident);
        self.entry_mut(page).set(Mark::Discarded, false);
        self.resident.push_back(&mut self.entries, page);
    }

    /// Makes a page that the owner has released unmapped.
    pub fn unmap(&mut self, page: Page) {
        debug_assert_eq!(self.state(page), State::Resident);
        self.change(page, State::Unmapped);
        self.unmapped.push_back(&mut self.entries, page);
    }

    /// Takes the page that has been unmapped for longest, to be examined.
    pub fn next_soft(&mut self) -> Option<Page> {
        let page = self.unmapped.pop_front(&mut self.entries)?;
        self.examining += 1;
        Some(page)
    }

    /// Records the CRC of a page that has been examined. Returns whether it is still unmapped: one
    /// that came back meanwhile may be changing.
    pub fn examined(&mut self, page: Page, crc: u32) -> bool {
        self.examining -= 1;
        let is_unmapped = self.state(page) == State::Unmapped;
        if is_unmapped {
            self.entry_mut(page).set_crc(crc);
        }
        is_unmapped
    }

    /// Unlinks a page that has been examined from its place, and takes a slot for it, which is
    /// returned. Without a free slot it is the first to be examined again.
    pub fn save(&mut self, page: Page) -> Option<Slot> {
        debug_assert_eq!(self.state(page), State::Unmapped);
        self.leave_backing(page);
        let Some(slot) = self.slots.take(page) else {
            self.unmapped.push_front(&mut self.entries, page);
            return None;
        };
        self.entry_mut(page).set_backing(Backing::Slot(slot));
        self.change(page, State::Saving);
        Some(slot)
    }

    /// Makes a page that could not be written unmapped again, and the first to be examined.
    pub fn save_failed(&mut self, page: Page) {
        debug_assert_eq!(self.state(page), State::Saving);
        self.leave_backing(page);
        self.change(page, State::Unmapped);
        self.unmapped.push_front(&mut self.entries, page);
    }

    /// Returns whether the page is being written to this slot, and has not come back since.
    pub fn is_saving_to(&self, page: Page, slot: Slot) -> bool {
        (self.state(page), self.backing(page)) == (State::Saving, Backing::Slot(slot))
    }

    /// Frees a slot that has been written for a page that came back meanwhile.
    pub fn give_back(&mut self, slot: Slot) {
        self.slots.give_back(slot);
    }

    /// Makes a page that no vCPU and no device reaches absent.
    pub fn evict(&mut self, page: Page) {
        match self.state(page) {
            State::Unmapped => self.leave_unmapped_queue(page),
            state => debug_assert!(matches!(state, State::Resident | State::Saving)),
        }
        self.change(page, State::Absent);
    }

    /// Removes the page from the queue; one that is being examined is in no queue.
    fn leave_unmapped_queue(&mut self, page: Page) {
        if self.entry(page).has(Mark::Queued) {
            self.unmapped.remove(&mut self.entries, page);
        }
    }
}

/// Pages that the guest has discarded, until they are dropped.
impl Pages {
    pub fn is_discarded(&self, page: Page) -> bool {
        self.entry(page).has(Mark::Discarded)
    }

    /// Marks a queued resident page to be dropped once the owner has released it.
    pub fn discard_when_released(&mut self, page: Page) {
        debug_assert_eq!(self.state(page), State::Resident);
        self.resident.remove(&mut self.entries, page);
        self.entry_mut(page).set(Mark::Discarded, true);
    }

    /// Marks a page that is being written to be dropped after that.
    pub fn discard_when_saved(&mut self, page: Page) {
        debug_assert_eq!(self.state(page), State::Saving);
        self.entry_mut(page).set(Mark::Discarded, true);
    }

    /// Makes a discarded page that no vCPU and no device reaches absent, and zeroes.
    pub fn drop_discarded(&mut self, page: Page) {
        self.entry_mut(page).set(Mark::Discarded, false);
        self.leave_backing(page);
        self.evict(page);
    }
}

/// Places of contents.
impl Pages {
    /// Unlinks the page from its place: its content is not there any more, or need not be.
    pub fn leave_backing(&mut self, page: Page) {
        match self.backing(page) {
            Backing::Nowhere => self.entry_mut(page).set(Mark::Surplus, false),
            Backing::Slot(slot) => {
                self.slots.give_back(slot);
                self.entry_mut(page).set_backing(Backing::Nowhere);
            }
            Backing::Block(block) => self.blocks.unlink(&mut self.entries, page, block),
        }
    }

    /// Makes a block back a page in memory without a place, unless it backs [`SHARERS`] pages.
    pub fn back_by_block(&mut self, page: Page, block: Block) {
        let is_backed = self.blocks.link(&mut self.entries, page, block);
        self.entry_mut(page).set(Mark::Surplus, !is_backed);
    }

    /// Returns whether a block held the same, and backed enough other pages.
    pub fn is_surplus(&self, page: Page) -> bool {
        self.entry(page).has(Mark::Surplus)
    }

    /// Returns the pages that the block backs, at most [`SHARERS`].
    pub fn backed_by(&self, block: Block) -> impl Iterator<Item = Page> {
        self.blocks.pages(&self.entries, block)
    }

    /// Returns the pages that these blocks back. The time is proportional to the number of blocks,
    /// or of pages, whichever is smaller.
    pub fn backed_by_any(&self, first: Block, count: u32) -> Vec<Page> {
        if self.blocks.is_empty() {
            return Vec::new();
        }
        if count > self.len() {
            let last = first.number.saturating_add(count - 1);
            let is_among = |entry: &Entry| match entry.backing() {
                Backing::Block(block) => {
                    block.disk == first.disk && (first.number..=last).contains(&block.number)
                }
                Backing::Nowhere | Backing::Slot(_) => false,
            };
            let backed = (0..).zip(&self.entries).filter(|(_, e)| is_among(e));
            return backed.map(|(number, _)| Page(number)).collect();
        }
        let blocks = (0..count).filter_map(|nth| first.ahead(nth));
        blocks.flat_map(|block| self.backed_by(block)).collect()
    }

    /// Unlinks all pages from their blocks, if all of these pages are in memory; returns whether
    /// they were.
    pub fn leave_all_blocks(&mut self) -> bool {
        let is_backed = |entry: &Entry| matches!(entry.backing(), Backing::Block(_));
        let is_in_memory =
            |entry: &Entry| matches!(entry.state(), State::Resident | State::Unmapped);
        if !self
            .entries
            .iter()
            .all(|entry| !is_backed(entry) || is_in_memory(entry))
        {
            return false;
        }
        for page in (0..self.len()).map(Page) {
            if is_backed(self.entry(page)) {
                self.leave_backing(page);
            }
        }
        true
    }
}
