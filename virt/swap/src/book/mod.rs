//! What is decided about each page, and nothing else: no system call, no thread, no time.
//!
//! The pager tells the [`Book`] what happens, in the order in which it happened, and carries out the [`Command`]s that come of
//! it, in their order. Three things make the order matter, and the pager has to keep to them:
//! * What the owner says (an answer, a ticket, the beginning and end of a disk's request) is told in the owner's order.
//! * [`Command::Examine`] is answered by [`Book::examined`] before anything else is told.
//! * [`Command::Fetch`], [`Command::Save`] and [`Command::Trim`] take their time; everything else is done before the next thing is told.
//!
//! A page leaves memory in steps: the owner releases it (no device reaches it), it is unmapped (no
//! processor does), it rests as *soft* and comes back for the price of a minor fault, it is
//! examined (what it holds can no longer change), it is written out if it is neither zeroes nor
//! what a block holds, and its memory is given back.
//!
//! A page is backed by a block when its content was that block's at a moment when it was
//! write-protected; whether it has been written since is looked at once, when it is examined: by
//! the marker of the page tables for processors' stores, by the owner's answer for devices'. A
//! request that is about to change a block waits until no page is backed by it any more.

mod blocks;
mod coming;
mod command;
mod discards;
mod entry;
mod going;
mod queue;
mod requests;
mod slots;

use std::collections::{HashMap, VecDeque};

use blocks::Blocks;
pub use blocks::SHARERS;
pub use coming::Ahead;
pub use command::{Command, Counts, Ended, Errno, Op, Protection, Seen, Ticket, Trouble};
use discards::Discards;
use entry::Entry;
pub use entry::{Block, Page, Place, Slot, State};
use queue::Queue;
use requests::Request;
pub use requests::Span;
use slots::Slots;

/// Pages that the owner is asked for at once, and so how far what is in memory may exceed its limit.
pub const BATCH: usize = 32;

/// How much of [`BATCH`] is left to processors: what the owner waits for in the kernel may wait for a processor that waits for a
/// page, and until then the owner's questions are not answered.
const FOR_PROCESSORS: usize = BATCH / 2;

/// Pages that are read from a disk at once, the one that is wanted among them.
pub const READ_AHEAD: u32 = 32;

/// Slots that are read at once, if they lie beside the one that is wanted.
pub const CLUSTER: u32 = 8;

/// Pages of zeroes that come at once while there is plenty of memory.
const ZEROES: u32 = 16;

/// Pages that are on their way to the store at once.
const SAVES: usize = 64;

/// On whose behalf a page comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanter {
    Processor,
    Device,
}

/// Who waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiter {
    Ticket(Ticket),
    Op(Op),
}

/// All pages of a guest.
#[derive(Debug)]
pub struct Book {
    entries: Box<[Entry]>,
    blocks: Blocks,
    slots: Slots,
    limit: usize,
    /// Pages that take memory.
    present: usize,
    saving: usize,
    /// Soft pages whose examination is a command that has not been answered.
    examining: usize,
    soft_pages: usize,
    /// Resident pages, but those that the owner is being asked for: the longest there first.
    resident: Queue,
    /// Soft pages, but those that are being examined.
    soft: Queue,
    asking: Option<Vec<Page>>,
    /// Resident pages that the guest does without, and who is to be told.
    discards: Discards,
    /// Absent pages that are wanted, and for which there was no room, processors' first. Some have
    /// come meanwhile.
    starved: VecDeque<(Page, Wanter)>,
    /// Who waits for pages that are coming.
    waiters: HashMap<Page, Vec<Waiter>>,
    tickets: HashMap<Ticket, usize>,
    requests: HashMap<Op, Request>,
    /// Requests of disks that a page belongs to.
    busy: HashMap<Page, Vec<Op>>,
    /// The slot that a processor last wanted something from.
    last_wanted: Option<Slot>,
    /// Soft pages leave until there are few enough.
    is_reclaiming: bool,
    /// See [`reads_before_overwrites`](Self::reads_before_overwrites).
    reads_all: bool,
    /// See [`saves_what_blocks_hold`](Self::saves_what_blocks_hold).
    saves_all: bool,
    /// The last page that was saved although its block held the same.
    last_silent: Option<(Block, Slot)>,
    /// Slots that were given back are trimmed.
    trims: bool,
    /// Nothing is saved until [`retry`](Self::retry).
    is_store_in_trouble: bool,
    /// Pages that could not be fetched; they are still in that state.
    troubled: Vec<Page>,
    counts: Counts,
    commands: Vec<Command>,
}

impl Book {
    /// Of `pages` pages, all zeroes, of which `limit` may be in memory, and `slots` free slots. Whatever it is told of a page
    /// beyond these panics.
    pub fn new(pages: u32, limit: usize, slots: usize) -> Self {
        let mut all = Slots::default();
        all.add(slots);
        Self {
            entries: vec![Entry::NEW; pages as usize].into(),
            blocks: Blocks::new(pages as usize),
            slots: all,
            limit,
            present: 0,
            saving: 0,
            examining: 0,
            soft_pages: 0,
            resident: Queue::EMPTY,
            soft: Queue::EMPTY,
            asking: None,
            discards: Discards::default(),
            starved: VecDeque::new(),
            waiters: HashMap::new(),
            tickets: HashMap::new(),
            requests: HashMap::new(),
            busy: HashMap::new(),
            last_wanted: None,
            is_reclaiming: false,
            reads_all: false,
            saves_all: false,
            last_silent: None,
            trims: false,
            is_store_in_trouble: false,
            troubled: Vec::new(),
            counts: Counts::default(),
            commands: Vec::new(),
        }
    }

    /// What is to be done, in this order.
    pub fn take_commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    /// What has been done so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Pages that take memory: those on their way in or out among them.
    pub fn present(&self) -> usize {
        self.present
    }

    /// Pages that stand for blocks of disks, in memory or not.
    pub fn tracked(&self) -> usize {
        self.blocks.linked()
    }

    /// Pages that may be in memory.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// What a device is about to overwrite is read first, as a host's kernel does that cannot know: to count such reads.
    pub fn reads_before_overwrites(&mut self) {
        self.reads_all = true;
    }

    /// What a block holds as well is written to the store all the same, as a host's kernel does that cannot know: to count such
    /// writes ([`Counts::silent_writes`]).
    pub fn saves_what_blocks_hold(&mut self) {
        self.saves_all = true;
    }

    /// Blocks behind slots that no page has any more are given back, as far as [`trim`](Self::trim)
    /// is called.
    pub fn trims_slots(&mut self) {
        self.trims = true;
    }

    /// Slots that no page has, but those that are being trimmed.
    pub fn free_slots(&self) -> usize {
        self.slots.free()
    }

    /// Slots of the store, free or not.
    pub fn slots(&self) -> usize {
        self.slots.count()
    }

    /// How many pages may be in memory from now on.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
        self.balance();
    }

    /// The store has grown by `count` slots, which follow the others. There are 2^32 - 1 at most; it takes 4 bytes for each.
    pub fn add_slots(&mut self, count: usize) {
        self.slots.add(count);
    }

    /// Bytes that are allocated for all pages together, once and for all, whatever becomes of them.
    /// Pages that are waited for, and those of requests of disks, take more while they do.
    pub fn page_bytes(&self) -> usize {
        size_of_val(&*self.entries) + self.blocks.bytes()
    }

    /// Bytes that are allocated for the slots of the store.
    pub fn slot_bytes(&self) -> usize {
        self.slots.bytes()
    }

    /// Whether something could not be done that has not been tried again with success.
    pub fn is_in_trouble(&self) -> bool {
        self.is_store_in_trouble || !self.troubled.is_empty()
    }

    /// Whether no page stands for a block and no request of a disk is under way.
    pub fn knows_no_disk(&self) -> bool {
        self.blocks.is_empty() && self.requests.is_empty()
    }

    /// Has pages in memory stand for themselves, if all that stand for blocks are in memory: whether they were.
    pub fn forget_blocks(&mut self) -> bool {
        let stands = |entry: &Entry| matches!(entry.place(), Place::Block(_));
        let is_home = |entry: &Entry| matches!(entry.state, State::Resident | State::Soft);
        if !self
            .entries
            .iter()
            .all(|entry| !stands(entry) || is_home(entry))
        {
            return false;
        }
        for number in 0..self.entries.len() as u32 {
            if stands(self.entry(Page(number))) {
                self.leave_place(Page(number));
            }
        }
        true
    }

    /// What a page's content is, for what shows them.
    pub fn look(&self, page: Page) -> (State, Place) {
        let entry = self.entry(page);
        (entry.state, entry.place())
    }

    fn entry(&self, page: Page) -> &Entry {
        &self.entries[page.0 as usize]
    }

    fn entry_mut(&mut self, page: Page) -> &mut Entry {
        &mut self.entries[page.0 as usize]
    }

    /// A read or a write has ended. [`balance`](Self::balance) is to follow the last of those that ended together.
    pub fn ended(&mut self, ended: Ended) {
        match ended {
            Ended::Fetched(page, outcome) => self.fetched(page, outcome),
            Ended::Saved(page, slot, outcome) => self.saved(page, slot, outcome),
            Ended::Trimmed(first, count, outcome) => self.trimmed(first, count, outcome),
        }
    }

    /// Takes soft pages away as far as there are too many in memory, and lets in who waits for room.
    pub fn balance(&mut self) {
        for _ in 0..self.starved.len() {
            let Some(&(page, wanter)) = self.starved.front() else {
                break;
            };
            if !self.has_room(wanter) {
                break;
            }
            self.starved.pop_front();
            // One that a processor brought meanwhile may have left again, and no device waits for it.
            let is_wanted = match wanter {
                Wanter::Processor => true,
                Wanter::Device => self.waiters.contains_key(&page),
            };
            if self.entry(page).state == State::Absent && is_wanted {
                // Whether it is overwritten may have been true once; reading it is always right.
                self.bring(page, false, wanter);
            }
        }
        self.is_reclaiming = match self.is_reclaiming {
            true => self.excess() > 0,
            // Not one by one: pages that leave together lie together.
            false => self.is_tight() && self.excess() > 0,
        };
        if self.is_store_in_trouble || !self.is_reclaiming {
            return;
        }
        let under_way = self.saving + self.examining;
        let mut left = SAVES.min(self.excess()).saturating_sub(under_way);
        while left > 0
            && let Some(page) = self.soft.pop_front(&mut self.entries)
        {
            self.commands.push(Command::Examine(page));
            self.examining += 1;
            left -= 1;
        }
    }
}

#[cfg(test)]
impl Book {
    fn is_read(&self, op: Op) -> Option<bool> {
        Some(!self.requests.get(&op)?.is_write())
    }

    fn summary(&self) -> String {
        format!(
            "{} present, {} soft, {} being examined, {} being saved, {} starved, asking for {:?}, {} slots free, in trouble: {}, {:?}",
            self.present,
            self.soft_pages,
            self.examining,
            self.saving,
            self.starved.len(),
            self.asking,
            self.slots.free(),
            self.is_store_in_trouble,
            self.troubled
        )
    }

    /// Each slot that is taken has one owner, which says so, or is still being written for one that came back.
    fn check_slots(&self, in_flight: impl Iterator<Item = Slot>) -> Result<(), String> {
        let in_flight: Vec<Slot> = in_flight.collect();
        let mut taken = 0;
        for (number, entry) in (0..).zip(&self.entries) {
            if let Place::Slot(slot) = entry.place() {
                taken += 1;
                if self.slots.owner(slot) != Some(Page(number)) {
                    return Err(format!("{slot:?} is not of page {number}"));
                }
            }
        }
        let is_forgotten = |slot: &&Slot| {
            let owner = self
                .slots
                .owner(**slot)
                .map(|page| self.entry(page).place());
            owner != Some(Place::Slot(**slot))
        };
        taken += in_flight.iter().filter(is_forgotten).count();
        match taken == self.slots.taken() {
            true => Ok(()),
            false => Err(format!(
                "{} slots are taken, {taken} known",
                self.slots.taken()
            )),
        }
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;
