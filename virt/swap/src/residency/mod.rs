//! Decisions about each page, and nothing else: no system call, no thread, no time.
//!
//! The pager reports events to the [`Residency`], in the order in which they happened, and carries
//! out the resulting [`Command`]s, in their order. The pager has to keep to three rules on the
//! order:
//! * Events of the owner (an answer, a ticket, the beginning and end of a disk's request) are
//!   reported in the owner's order.
//! * [`Command::Examine`] is answered by [`Residency::examined`] before anything else is reported.
//! * [`Command::Fetch`], [`Command::Save`] and [`Command::Trim`] end later; every other command is
//!   completed before the next event is reported.
//!
//! A page leaves memory in steps: the owner releases it (no device accesses it); it is unmapped (no
//! processor accesses it); it stays unmapped but resident, in the state *soft*, and comes back for
//! the cost of a minor fault; it is examined (its content can no longer change); it is written out
//! if it is neither zeroes nor equal to a block; and its memory is freed.
//!
//! A page is backed by a block if its content was that block's at a moment when it was
//! write-protected. Whether it has been written since is checked once, when it is examined: by the
//! uffd-wp bit of the page tables for processors' stores, by the owner's answer for devices'. A
//! request that is about to change a block waits until no page is backed by it any more.
//!
//! The [`Residency`] makes the decisions, and their order. Its parts are types with one reason to
//! change each, private fields, and a diagram of their transitions at the head of their modules:
//! ```text
//!  page_in, read_ahead ─┐        ┌─▶ pages     states, queues, what backs a page: slot or block
//!  page_out, discards  ─┼─ Residency ─┼─▶ reclaim   how many pages may come, and have to leave
//!  disks               ─┘        ├─▶ waiters   tickets, requests, pages that wait for room
//!                                ├─▶ requests  of disks under way, pages and blocks they share
//!                                ├─▶ question  to the owner, one at a time
//!                                ├─▶ discards  of a balloon, answered in their order
//!                                ├─▶ failures  of the store and the images, until tried again
//!                                └─▶ policy    seam for measurements
//! ```

mod command;
mod counts;
mod discards;
mod disks;
mod failures;
mod page_in;
mod page_out;
mod pages;
mod policy;
mod question;
mod read_ahead;
mod reclaim;
mod requests;
mod waiters;

pub use command::{
    Command, CommandOutcome, Errno, Op, PageExamination, PauseReason, Protection, Ticket,
};
pub use counts::Counts;
use counts::SilentWrites;
use discards::Discards;
use failures::Failures;
use pages::Pages;
pub use pages::{Backing, Block, Page, SHARERS, Slot, State};
pub use policy::{AvoidAll, FaultOrigin, IoPolicy};
use question::Question;
use read_ahead::StoreOrder;
pub use read_ahead::{CLUSTER, READ_AHEAD, ReadAhead};
use reclaim::Reclaim;
use requests::Requests;
pub use requests::Span;
use waiters::{RoomQueue, Waiters};

/// Pages that the owner is asked for at once, and so the number by which the pages in memory may
/// exceed the limit.
pub const BATCH: usize = 32;

/// Part of [`BATCH`] that is reserved for vCPUs: the owner may wait in the kernel for a vCPU that
/// waits for a page, and until then it does not answer questions.
const FOR_VCPUS: usize = BATCH / 2;

/// Largest number of pages on their way to the store.
const SAVES: usize = 64;

/// All pages of a guest.
#[derive(Debug)]
pub struct Residency {
    pages: Pages,
    reclaim: Reclaim,
    question: Question,
    /// Pages that the guest has discarded while they were resident, and the discards to be
    /// answered.
    discards: Discards,
    waiters: Waiters,
    room_queue: RoomQueue,
    requests: Requests,
    store_order: StoreOrder,
    failures: Failures,
    policy: Box<dyn IoPolicy>,
    counts: Counts,
    silent_writes: SilentWrites,
    commands: Vec<Command>,
}

impl Residency {
    /// Creates a book of `pages` pages, all zeroes, of which `limit` may be in memory, and `slots`
    /// free slots. An event of a page beyond these panics.
    pub fn new(pages: u32, limit: usize, slots: usize) -> Self {
        Self {
            pages: Pages::new(pages, slots),
            reclaim: Reclaim::new(limit),
            question: Question::default(),
            discards: Discards::default(),
            waiters: Waiters::default(),
            room_queue: RoomQueue::default(),
            requests: Requests::default(),
            store_order: StoreOrder::default(),
            failures: Failures::default(),
            policy: Box::new(AvoidAll),
            counts: Counts::default(),
            silent_writes: SilentWrites::default(),
            commands: Vec::new(),
        }
    }

    /// Sets the policy that decides which reads and writes are avoided from now on.
    pub fn set_policy(&mut self, policy: Box<dyn IoPolicy>) {
        self.policy = policy;
    }

    /// Takes the commands to carry out, in this order.
    pub fn take_commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    /// Returns the counters.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the number of pages that take memory, including those on their way in or out.
    pub fn present(&self) -> usize {
        self.pages.present()
    }

    /// Returns the number of pages that blocks of disks back, in memory or not.
    pub fn tracked(&self) -> usize {
        self.pages.blocks().linked()
    }

    /// Returns the number of pages that may be in memory.
    pub fn limit(&self) -> usize {
        self.reclaim.limit()
    }

    /// Enables trimming: blocks behind free slots are discarded when [`trim`](Self::trim) is
    /// called.
    pub fn trims_slots(&mut self) {
        self.pages.slots_mut().set_trims(true);
    }

    /// Returns the number of free slots, without those that are being trimmed.
    pub fn free_slots(&self) -> usize {
        self.pages.slots().free()
    }

    /// Returns the number of slots of the store, free or not.
    pub fn slots(&self) -> usize {
        self.pages.slots().count()
    }

    /// Changes the number of pages that may be in memory.
    pub fn set_limit(&mut self, limit: usize) {
        self.reclaim.set_limit(limit);
        self.balance();
    }

    /// Adds `count` slots to the store, which follow the others. There are 2^32 - 1 at most; each
    /// takes 4 bytes.
    pub fn add_slots(&mut self, count: usize) {
        self.pages.slots_mut().add(count);
    }

    /// Returns the bytes that are allocated for all pages together; this number is constant. Pages
    /// that are waited for, and those of requests of disks, take more meanwhile.
    pub fn page_bytes(&self) -> usize {
        self.pages.bytes()
    }

    /// Returns the bytes that are allocated for the slots of the store.
    pub fn slot_bytes(&self) -> usize {
        self.pages.slots().bytes()
    }

    /// Returns whether a failed operation has not been retried with success.
    pub fn is_in_trouble(&self) -> bool {
        self.failures.any()
    }

    /// Returns whether no block backs a page and no request of a disk is under way.
    pub fn knows_no_disk(&self) -> bool {
        self.pages.blocks().is_empty() && self.requests.is_empty()
    }

    /// Unlinks all pages from their blocks, if all of them are in memory; returns whether they
    /// were.
    pub fn forget_blocks(&mut self) -> bool {
        self.pages.leave_all_blocks()
    }

    /// Returns the state and place of a page.
    pub fn look(&self, page: Page) -> (State, Backing) {
        (self.pages.state(page), self.pages.backing(page))
    }

    /// Records that a read or a write has ended. [`balance`](Self::balance) must follow the last of
    /// those that ended together.
    pub fn ended(&mut self, ended: CommandOutcome) {
        match ended {
            CommandOutcome::Fetched(page, outcome) => self.fetched(page, outcome),
            CommandOutcome::Saved(page, slot, outcome) => self.saved(page, slot, outcome),
            CommandOutcome::Trimmed(first, count, outcome) => self.trimmed(first, count, outcome),
        }
    }

    /// Admits pages that wait for room, and evicts unmapped pages as far as there are too many in
    /// memory.
    pub fn balance(&mut self) {
        for _ in 0..self.room_queue.len() {
            let (reclaim, present) = (&self.reclaim, self.pages.present());
            let has_room = |origin| reclaim.has_room(present, origin);
            let Some((page, origin)) = self.room_queue.pop_if(has_room) else {
                break;
            };
            // A page that a vCPU brought meanwhile may have left again, and no device waits for it.
            let is_wanted = origin == FaultOrigin::Vcpu || self.waiters.has(page);
            if self.pages.state(page) == State::Absent && is_wanted {
                // The page may not be overwritten any more; reading it is always right.
                self.bring(page, false, origin);
            }
        }
        self.examine();
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;
