//! Pages: where each is on its way between memory and elsewhere, and where its content is.
//!
//! ```text
//!          fetch               settle           unmap           save
//!    ┌────────────▶ Fetching ────────┐     ┌────────────▶ Soft ──────▶ Saving
//!    │     fill                settle▼     │                │◀───────────┤ save_failed
//!  Absent ────────▶ Filling ───────▶ Resident               │            │
//!    │▲                settle        ▲  ▲  │     settle     │            │
//!    └┼──────────────────────────────┘  └──┼────────────────┼────────────┤
//!     │                evict               ▼                ▼            │
//!     └────────────────────────────────────┴────────────────┴────────────┘
//!
//!  Resident: queued ── next_resident, discard_when_released ──▶ taken ── unmap, evict
//!              ▲────────────────────── keep ──────────────────────┘
//!  Soft:     queued ── next_soft ──▶ being examined ── save, evict, settle
//!              ▲── save, without a slot ─┘
//! ```
//! A resident page that was taken from its queue may have been released by the owner: such a page
//! alone is unmapped or evicted.
//!
//! The place of a page changes by [`leave_place`](Pages::leave_place),
//! [`back_by_block`](Pages::back_by_block) and the transitions to and from [`State::Saving`], and
//! with it the slots' owners and the blocks' chains. States, queues, owners and chains are private
//! to this module, so no decision bypasses these functions.

mod blocks;
mod entry;
mod queue;
mod slots;

pub use blocks::{Blocks, SHARERS};
pub use entry::{Block, Page, Place, Slot, State};
use entry::{Entry, Mark};
use queue::Queue;
pub use slots::Slots;

/// All pages of a guest, the slots and blocks that back them, and the queues in which they leave.
#[derive(Debug)]
pub struct Pages {
    entries: Box<[Entry]>,
    in_state: StateCounts,
    /// Resident pages, but those that were taken for the owner: the longest there first.
    resident: Queue,
    /// Soft pages, but those that are being examined.
    soft: Queue,
    /// Examinations that have not been answered.
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
    /// So many pages of zeroes, none of them in memory, and so many free slots.
    pub fn new(pages: u32, slots: usize) -> Self {
        let mut in_state = StateCounts(Default::default());
        in_state.0[State::Absent as usize] = pages as usize;
        let mut all = Slots::default();
        all.add(slots);
        Self {
            entries: vec![Entry::NEW; pages as usize].into(),
            in_state,
            resident: Queue::EMPTY,
            soft: Queue::EMPTY,
            examining: 0,
            blocks: Blocks::new(pages as usize),
            slots: all,
        }
    }

    pub fn len(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Bytes that are allocated for all pages.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.entries) + self.blocks.bytes()
    }

    /// Pages that take memory: those on their way in or out among them.
    pub fn present(&self) -> usize {
        self.entries.len() - self.in_state.of(State::Absent)
    }

    /// Pages in this state.
    pub fn count(&self, state: State) -> usize {
        self.in_state.of(state)
    }

    /// Examinations that have not been answered, also of pages that have come back meanwhile.
    pub fn examining(&self) -> usize {
        self.examining
    }

    /// Resident pages that were not taken for the owner.
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

    pub fn place(&self, page: Page) -> Place {
        self.entry(page).place()
    }

    /// Whether the page is neither in memory nor anywhere else: it is all zeroes.
    pub fn is_absent_zeroes(&self, page: Page) -> bool {
        (self.state(page), self.place(page)) == (State::Absent, Place::Nowhere)
    }

    /// Check sum that the content has to match, of a page that is absent, or on its way.
    pub fn crc(&self, page: Page) -> u32 {
        self.entry(page).crc()
    }

    /// The page enters a state; what it is in is counted.
    fn change(&mut self, page: Page, to: State) {
        let from = self.entry_mut(page).set_state(to);
        self.in_state.moved(from, to);
    }
}

/// How pages come.
impl Pages {
    /// The content of an absent page is read from its place, which is returned.
    pub fn fetch(&mut self, page: Page) -> Place {
        debug_assert_eq!(self.state(page), State::Absent);
        self.change(page, State::Fetching);
        self.place(page)
    }

    /// An absent page is there for a disk to read into.
    pub fn fill(&mut self, page: Page) {
        debug_assert_eq!(self.state(page), State::Absent);
        self.change(page, State::Filling);
    }

    /// A page whose content is in memory becomes resident, whatever it was.
    pub fn settle(&mut self, page: Page) {
        debug_assert_ne!(self.state(page), State::Resident);
        match self.state(page) {
            State::Soft => self.leave_soft_queue(page),
            State::Saving => {
                // The slot is given back when it has been written.
                let entry = self.entry_mut(page);
                entry.set_place(Place::Nowhere);
                // What is stored to it from now on stays.
                entry.set(Mark::Discarded, false);
            }
            _ => {}
        }
        self.change(page, State::Resident);
        self.entry_mut(page).set(Mark::LeavesBlock, false);
        self.resident.push_back(&mut self.entries, page);
    }

    /// The content of the block that backs the page is about to change: once it has been fetched it
    /// is in memory alone.
    pub fn mark_leaves_block(&mut self, page: Page) {
        self.entry_mut(page).set(Mark::LeavesBlock, true);
    }

    pub fn leaves_block(&self, page: Page) -> bool {
        self.entry(page).has(Mark::LeavesBlock)
    }
}

/// How pages leave.
impl Pages {
    /// Takes the page that has been resident for longest, for the owner to be asked for.
    pub fn next_resident(&mut self) -> Option<Page> {
        self.resident.pop_front(&mut self.entries)
    }

    /// A page that the owner was to be asked for, or has not released, stays for now.
    pub fn keep(&mut self, page: Page) {
        debug_assert_eq!(self.state(page), State::Resident);
        self.entry_mut(page).set(Mark::Discarded, false);
        self.resident.push_back(&mut self.entries, page);
    }

    /// A page that the owner has released is soft.
    pub fn unmap(&mut self, page: Page) {
        debug_assert_eq!(self.state(page), State::Resident);
        self.change(page, State::Soft);
        self.soft.push_back(&mut self.entries, page);
    }

    /// Takes the page that has been soft for longest, to be examined.
    pub fn next_soft(&mut self) -> Option<Page> {
        let page = self.soft.pop_front(&mut self.entries)?;
        self.examining += 1;
        Some(page)
    }

    /// A page has been examined, and its content has this check sum. Whether it is soft still: one
    /// that came back meanwhile may be changing.
    pub fn examined(&mut self, page: Page, crc: u32) -> bool {
        self.examining -= 1;
        let is_soft = self.state(page) == State::Soft;
        if is_soft {
            self.entry_mut(page).set_crc(crc);
        }
        is_soft
    }

    /// A page that has been examined leaves its place, and is to be written to a slot, which is
    /// returned. Without a free one it is the first to be examined again.
    pub fn save(&mut self, page: Page) -> Option<Slot> {
        debug_assert_eq!(self.state(page), State::Soft);
        self.leave_place(page);
        let Some(slot) = self.slots.take(page) else {
            self.soft.push_front(&mut self.entries, page);
            return None;
        };
        self.entry_mut(page).set_place(Place::Slot(slot));
        self.change(page, State::Saving);
        Some(slot)
    }

    /// A page that could not be written is soft again, and the first to be examined.
    pub fn save_failed(&mut self, page: Page) {
        debug_assert_eq!(self.state(page), State::Saving);
        self.leave_place(page);
        self.change(page, State::Soft);
        self.soft.push_front(&mut self.entries, page);
    }

    /// Whether the page is being written to this slot, and has not come back since.
    pub fn is_saving_to(&self, page: Page, slot: Slot) -> bool {
        (self.state(page), self.place(page)) == (State::Saving, Place::Slot(slot))
    }

    /// A slot has been written for a page that came back meanwhile.
    pub fn give_back(&mut self, slot: Slot) {
        self.slots.give_back(slot);
    }

    /// A page that no vCPU and no device reaches has its memory taken.
    pub fn evict(&mut self, page: Page) {
        match self.state(page) {
            State::Soft => self.leave_soft_queue(page),
            state => debug_assert!(matches!(state, State::Resident | State::Saving)),
        }
        self.change(page, State::Absent);
    }

    /// One that is being examined is in no queue.
    fn leave_soft_queue(&mut self, page: Page) {
        if self.entry(page).has(Mark::Queued) {
            self.soft.remove(&mut self.entries, page);
        }
    }
}

/// Pages that the guest has discarded, until they are dropped.
impl Pages {
    pub fn is_discarded(&self, page: Page) -> bool {
        self.entry(page).has(Mark::Discarded)
    }

    /// A queued resident page is dropped once the owner has released it.
    pub fn discard_when_released(&mut self, page: Page) {
        debug_assert_eq!(self.state(page), State::Resident);
        self.resident.remove(&mut self.entries, page);
        self.entry_mut(page).set(Mark::Discarded, true);
    }

    /// A page that is being written is dropped once it has been.
    pub fn discard_when_saved(&mut self, page: Page) {
        debug_assert_eq!(self.state(page), State::Saving);
        self.entry_mut(page).set(Mark::Discarded, true);
    }

    /// A discarded page that no vCPU and no device reaches is zeroes from now on, and has its
    /// memory taken.
    pub fn drop_discarded(&mut self, page: Page) {
        self.entry_mut(page).set(Mark::Discarded, false);
        self.leave_place(page);
        self.evict(page);
    }
}

/// Where contents are.
impl Pages {
    /// The page's content is no longer where its place says, or need not be.
    pub fn leave_place(&mut self, page: Page) {
        match self.place(page) {
            Place::Nowhere => self.entry_mut(page).set(Mark::Surplus, false),
            Place::Slot(slot) => {
                self.slots.give_back(slot);
                self.entry_mut(page).set_place(Place::Nowhere);
            }
            Place::Block(block) => self.blocks.unlink(&mut self.entries, page, block),
        }
    }

    /// A page in memory, which has no place, is backed by a block, unless [`SHARERS`] are.
    pub fn back_by_block(&mut self, page: Page, block: Block) {
        let is_backed = self.blocks.link(&mut self.entries, page, block);
        self.entry_mut(page).set(Mark::Surplus, !is_backed);
    }

    /// Whether a block held the same, and enough other pages were backed by it.
    pub fn is_surplus(&self, page: Page) -> bool {
        self.entry(page).has(Mark::Surplus)
    }

    /// Pages that the block backs, at most [`SHARERS`].
    pub fn backed_by(&self, block: Block) -> impl Iterator<Item = Page> {
        self.blocks.pages(&self.entries, block)
    }

    /// Pages that one of these blocks backs. Takes as long as there are blocks, or pages,
    /// whichever are fewer.
    pub fn backed_by_any(&self, first: Block, count: u32) -> Vec<Page> {
        if self.blocks.is_empty() {
            return Vec::new();
        }
        if count > self.len() {
            let last = first.number.saturating_add(count - 1);
            let is_among = |entry: &Entry| match entry.place() {
                Place::Block(block) => {
                    block.disk == first.disk && (first.number..=last).contains(&block.number)
                }
                Place::Nowhere | Place::Slot(_) => false,
            };
            let backed = (0..).zip(&self.entries).filter(|(_, e)| is_among(e));
            return backed.map(|(number, _)| Page(number)).collect();
        }
        let blocks = (0..count).filter_map(|nth| first.ahead(nth));
        blocks.flat_map(|block| self.backed_by(block)).collect()
    }

    /// Has no page backed by a block any more, if all that are are in memory. Whether they were.
    pub fn leave_all_blocks(&mut self) -> bool {
        let is_backed = |entry: &Entry| matches!(entry.place(), Place::Block(_));
        let is_in_memory = |entry: &Entry| matches!(entry.state(), State::Resident | State::Soft);
        if !self
            .entries
            .iter()
            .all(|entry| !is_backed(entry) || is_in_memory(entry))
        {
            return false;
        }
        for page in (0..self.len()).map(Page) {
            if is_backed(self.entry(page)) {
                self.leave_place(page);
            }
        }
        true
    }
}
