//! Model test of [`Residency`] in a small world that knows the content of every page and block:
//! memory with mappings and uffd-wp bits, an owner with devices, disks with asynchronous requests,
//! a store. Between any two commands the guest acts.

use std::collections::{BTreeMap, VecDeque};

use seeded::Random;

use super::requests::Direction;
use super::*;

mod commands;
mod disk;
mod guest;
mod inspect;
mod pager;

use disk::{DiskOp, Kind};

pub(super) const PAGES: u32 = 160;
const BLOCKS: u32 = 192;
pub(super) const LIMIT: usize = 48;
pub(super) const SLOTS: usize = 128;

/// Content of a page or block. 0 means zeroes; each other number is written by one store.
type Content = u64;

/// Content that the guest must find in a page.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Truth {
    Known(Content),
    /// A read into the page failed: it has any content, which then must not change.
    Undefined,
}

/// State of a page in the kernel and the owner.
#[derive(Clone, Copy, Debug)]
struct Frame {
    content: Option<Content>,
    is_mapped: bool,
    /// No vCPU has stored through the guest's mapping since it was write-protected. Stays set when
    /// the mapping and the memory are removed.
    is_clean: bool,
    /// The owner can access the page.
    is_shown: bool,
    /// A device has stored since the page was shown, or since a disk request began.
    is_written: bool,
    /// A device has received an address to store to since the page was shown.
    is_lent_out: bool,
    /// Number of leases of the page.
    leases: u32,
    /// Number of accesses in progress that are to overwrite the whole page. Until they end, its
    /// content is undefined.
    lent: u32,
    /// Content that the guest must find.
    truth: Truth,
}

impl Frame {
    /// Records that the guest has stored `content`.
    fn now_holds(&mut self, content: Content) {
        self.truth = match self.lent {
            0 => Truth::Known(content),
            _ => Truth::Undefined,
        };
    }

    /// Records that an access that was to overwrite the page has ended.
    fn is_back(&mut self, is_good: bool) {
        self.lent -= 1;
        self.truth = match (self.lent, is_good, self.content) {
            (0, true, Some(content)) => Truth::Known(content),
            _ => Truth::Undefined,
        };
    }
}

/// Event from the owner to the pager. Events arrive in the order in which the owner caused them.
enum OwnerEvent {
    Answer { gone: u32, written: u32 },
    Wants(Ticket, Vec<(Page, bool)>),
    Begin(Op),
    End(Op, bool),
    Offers(Ticket, Vec<Page>),
}

/// The guest's main activity in a phase.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Fill,
    Fragment,
    Clear,
}

pub(super) struct World {
    random: Random,
    pub(super) residency: Residency,
    frames: Vec<Frame>,
    image: Vec<Content>,
    store: Vec<Content>,
    next_content: Content,
    /// Pages for which a vCPU waits, and whether it is to store.
    faults: BTreeMap<Page, bool>,
    reading: Vec<(Page, Backing)>,
    writing: Vec<(Page, Slot)>,
    trimming: Vec<(Slot, u32)>,
    pub(super) trims: u64,
    questions: VecDeque<Vec<Page>>,
    owner_events: VecDeque<OwnerEvent>,
    tickets: BTreeMap<u64, Vec<(Page, bool)>>,
    /// Pages that a balloon has discarded, by ticket. Until the request is answered, their content
    /// is undefined.
    offers: BTreeMap<u64, Vec<Page>>,
    /// Pages that must stay until the access of a ticket is retried.
    held: Vec<Page>,
    /// Disk requests in progress.
    ops: BTreeMap<u64, DiskOp>,
    /// Cancelled disk requests, until the residency is notified.
    cancelled: BTreeMap<u64, DiskOp>,
    pub(super) cancels: u64,
    next_op: u64,
    next_ticket: u64,
    leases: Vec<Page>,
    /// Pages that a vCPU is about to clear entirely.
    clearing: Vec<Page>,
    /// Pages that were unmapped recently. The guest accesses them more often, to give them a second
    /// chance.
    unmapped: Vec<Page>,
    is_stopped: bool,
    /// Number of failures in 1,000 reads and writes of the store and the image by the pager.
    pub(super) failing: u64,
    pub(super) events: u64,
    limit: usize,
    /// Largest limit since the world was last idle.
    highest: usize,
    is_resting: bool,
    /// The pager scans and punches holes without unmapping first. The test must detect that.
    pub(super) is_naive: bool,
    /// The owner forgets that an address was lent out for stores. The test must detect that.
    pub(super) forgets_lent: bool,
}

/// Result of a step; the error describes the failure.
type Checked = Result<(), String>;

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let frame = Frame {
            content: None,
            is_mapped: false,
            is_clean: false,
            is_shown: false,
            is_written: false,
            is_lent_out: false,
            leases: 0,
            lent: 0,
            truth: Truth::Known(0),
        };
        let mut residency = Residency::new(PAGES, LIMIT, SLOTS);
        residency.pages.slots_mut().set_chunk(4);
        residency.trims_slots();
        Self {
            random: Random::new(seed),
            residency,
            frames: vec![frame; PAGES as usize],
            image: (1..=Content::from(BLOCKS)).collect(),
            store: vec![0; 2 * SLOTS],
            next_content: 1_000,
            faults: BTreeMap::new(),
            reading: Vec::new(),
            writing: Vec::new(),
            trimming: Vec::new(),
            trims: 0,
            questions: VecDeque::new(),
            owner_events: VecDeque::new(),
            tickets: BTreeMap::new(),
            offers: BTreeMap::new(),
            held: Vec::new(),
            ops: BTreeMap::new(),
            cancelled: BTreeMap::new(),
            cancels: 0,
            next_op: 0,
            next_ticket: 0,
            leases: Vec::new(),
            clearing: Vec::new(),
            unmapped: Vec::new(),
            is_stopped: false,
            failing: 0,
            events: 0,
            limit: LIMIT,
            highest: LIMIT,
            is_resting: false,
            is_naive: false,
            forgets_lent: false,
        }
    }

    fn frame(&mut self, page: Page) -> &mut Frame {
        &mut self.frames[page.0 as usize]
    }

    fn page(&mut self) -> Page {
        if self.random.chance(0.1)
            && let Some(page) = self.unmapped.pop()
        {
            return page;
        }
        // Access a page that the owner is being asked about: this affects the answer.
        if self.random.chance(0.1)
            && let Some(asked) = self.questions.front()
        {
            return asked[self.random.below(asked.len() as u64) as usize];
        }
        // Some pages are accessed more often.
        let end = if self.random.chance(0.5) {
            PAGES / 4
        } else {
            PAGES
        };
        Page(self.random.below(u64::from(end)) as u32)
    }

    fn fresh(&mut self) -> Content {
        if self.random.chance(0.03) {
            return 0;
        }
        self.next_content += 1;
        self.next_content
    }

    /// Checks the invariants that hold between any two events.
    fn check(&mut self) -> Checked {
        if self.is_naive {
            return Ok(());
        }
        let mut in_memory = 0;
        for number in 0..PAGES {
            let page = Page(number);
            let (state, backing) = self.residency.look(page);
            let frame = self.frames[number as usize];
            in_memory += usize::from(state != State::Absent);
            if state != State::Absent {
                continue;
            }
            let holds = match backing {
                Backing::Nowhere => 0,
                Backing::Slot(slot) => self.store[slot.0 as usize],
                Backing::Block(block) => self.image[block.number as usize],
            };
            if frame.content.is_some() || frame.is_shown || frame.is_mapped {
                return Err(format!("{page:?} is away and there: {frame:?}"));
            }
            if frame.truth != Truth::Undefined && frame.truth != Truth::Known(holds) {
                return Err(format!(
                    "{page:?} is at {backing:?}, which holds {holds}: {frame:?}"
                ));
            }
        }
        if in_memory != self.residency.present() || in_memory > self.highest + BATCH {
            return Err(format!(
                "{in_memory} pages in memory, {} counted",
                self.residency.present()
            ));
        }
        self.residency.check_states()?;
        self.residency
            .check_slots(self.writing.iter().map(|(_, slot)| *slot))
    }

    pub(super) fn run(&mut self, events: u64) -> Checked {
        // Pages into which a kernel was loaded before the start.
        for number in 0..LIMIT as u32 {
            let content = self.fresh();
            let frame = self.frame(Page(number));
            frame.content = Some(content);
            frame.now_holds(content);
            self.residency.adopt(Page(number));
        }
        self.carry_out(Phase::Fill)?;
        let phases = [Phase::Fill, Phase::Fragment, Phase::Clear];
        while self.events < events {
            let phase = phases[(self.events / 5_000 % 3) as usize];
            self.guest(phase)?;
            if self.random.chance(0.6) {
                self.pager(phase)?;
            }
            if self.random.chance(0.1) {
                self.residency.ask();
                self.carry_out(phase)?;
            }
            if self.random.chance(0.1) {
                self.residency.trim();
                self.carry_out(phase)?;
            }
            if self.random.chance(0.02) {
                self.check()?;
            }
            if self.random.below(5_000) == 0 {
                self.limit = 24 + self.random.below(96) as usize;
                self.highest = self.highest.max(self.limit);
                self.residency.set_limit(self.limit);
                self.carry_out(phase)?;
            }
            if self.random.below(20_000) == 0 {
                self.rest()?;
            }
        }
        self.rest()
    }

    /// Completes everything that was begun; the guest does nothing new.
    fn rest(&mut self) -> Checked {
        self.is_resting = true;
        let rested = self.come_to_rest();
        self.is_resting = false;
        self.highest = self.limit;
        rested
    }

    fn come_to_rest(&mut self) -> Checked {
        for _ in 0..20_000 {
            let waits = !self.faults.is_empty()
                || !self.clearing.is_empty()
                || !self.tickets.is_empty()
                || !self.offers.is_empty()
                || !self.ops.is_empty()
                || !self.owner_events.is_empty()
                || !self.reading.is_empty()
                || !self.writing.is_empty()
                || !self.trimming.is_empty()
                || self.is_stopped
                || self.residency.present() > self.limit;
            if !waits {
                return self.check();
            }
            if let Some(page) = self.leases.pop() {
                self.frame(page).leases -= 1;
            }
            if !self.is_stopped {
                self.answer();
                self.go_on()?;
            }
            self.pager(Phase::Fill)?;
            self.residency.ask();
            self.carry_out(Phase::Fill)?;
            self.held.clear();
        }
        Err(format!(
            "it does not come to rest: faults {:?}, tickets {:?}, ops {:?}, {}",
            self.faults,
            self.tickets,
            self.ops,
            self.residency.summary()
        ))
    }
}
