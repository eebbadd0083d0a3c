//! A pager without disks: guest memory whose pages come and go, and each time lie somewhere else.
//!
//! The content of an absent page is kept beside the memory, and the frame that it leaves is
//! overwritten. So a device that has kept an address of the frame reads bytes that were never
//! written, and its writes are lost.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use fake_mem::ArrayMem;
use guest_mem::{
    Access, DmaFault, Gpa, Hva, Intent, KeepAlive, PAGE_SIZE, Pages, PhysMem, Stop, Ticket,
};

const PAGE: usize = PAGE_SIZE as usize;
/// Content of an abandoned frame.
const POISON: u8 = 0xdb;
/// A page that has come in for a ticket is not evicted before it is asked for again, or so many
/// accesses later: the function that waited for it may have been reset.
const HELD_FOR: u64 = 4000;

/// Purpose of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    AvailIndex,
    Descriptor,
    IndirectTable,
    RequestHeader,
    DataRead,
    DataWrite,
    DataOverwrite,
    StatusByte,
    UsedRing,
    DriverEvent,
    DeviceEvent,
    RootEntry,
    ContextEntry,
    Level4,
    Level3,
    Level2,
    Level1,
    QueueDescriptor,
    WaitStatus,
    InterruptEntry,
}

impl Kind {
    pub const ALL: [Self; 20] = [
        Self::AvailIndex,
        Self::Descriptor,
        Self::IndirectTable,
        Self::RequestHeader,
        Self::DataRead,
        Self::DataWrite,
        Self::DataOverwrite,
        Self::StatusByte,
        Self::UsedRing,
        Self::DriverEvent,
        Self::DeviceEvent,
        Self::RootEntry,
        Self::ContextEntry,
        Self::Level4,
        Self::Level3,
        Self::Level2,
        Self::Level1,
        Self::QueueDescriptor,
        Self::WaitStatus,
        Self::InterruptEntry,
    ];
}

/// Use of an area of memory, which gives the purpose of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    Data,
    /// Used for one thing only.
    Only(Kind),
    /// Read as the first, written as the second.
    Ring(Kind, Kind),
}

/// Counts of accesses of one kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Count {
    pub accesses: u64,
    pub pends: u64,
}

#[derive(Default)]
struct State {
    /// Frame of each page.
    frames: Vec<Option<u32>>,
    /// Content of absent pages.
    store: BTreeMap<u64, Box<[u8; PAGE]>>,
    /// Those abandoned longest ago first.
    free: VecDeque<u32>,
    /// Pages that could not be brought in, until it heals.
    lost: BTreeSet<u64>,
    asked: BTreeMap<Ticket, Vec<u64>>,
    tickets: u64,
    held: BTreeMap<u64, u64>,
    /// Starts of areas.
    areas: BTreeMap<u64, Area>,
    accesses: u64,
    counts: BTreeMap<Kind, Count>,
    /// Pages used lately: victims whose eviction is likely to meet an access.
    recent: VecDeque<u64>,
    evictions: u64,
    spared_reads: u64,
}

/// A clone is another handle to the same memory.
#[derive(Clone)]
pub struct Pager {
    mem: ArrayMem,
    state: Arc<Mutex<State>>,
}

impl Pager {
    /// So many pages from address 0 on, all zeroes and there.
    pub fn new(pages: u64) -> Self {
        let spare = 64;
        let state = State {
            frames: (0..pages as u32).map(Some).collect(),
            free: (pages as u32..(pages + spare) as u32).collect(),
            ..State::default()
        };
        Self {
            mem: ArrayMem::new((pages + spare) * PAGE_SIZE),
            state: Arc::new(Mutex::new(state)),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// From `start` up to the next area is this.
    pub fn name(&self, start: u64, area: Area) {
        self.state().areas.insert(start, area);
    }

    /// Takes `page` away, wherever it is used.
    pub fn evict(&self, page: u64) {
        let mut state = self.state();
        let Some(frame) = state.frames[page as usize].take() else {
            return;
        };
        let at = Gpa::new(u64::from(frame) * PAGE_SIZE);
        let bytes: [u8; PAGE] = self.mem.get(at);
        state.store.insert(page, Box::new(bytes));
        self.mem.put(at, &[POISON; PAGE]);
        state.free.push_back(frame);
        state.evictions += 1;
    }

    /// Returns whether a page may be evicted: it is there, and no access has waited for it lately.
    pub fn is_candidate(&self, page: u64) -> bool {
        let mut state = self.state();
        let accesses = state.accesses;
        state.held.retain(|_, since| accesses - *since < HELD_FOR);
        state.frames[page as usize].is_some() && !state.held.contains_key(&page)
    }

    /// A page that was used lately: the `nth` last.
    pub fn recent(&self, nth: u64) -> Option<u64> {
        let state = self.state();
        state.recent.get(nth as usize).copied()
    }

    /// Tickets that have not ended, oldest first.
    pub fn tickets(&self) -> Vec<Ticket> {
        self.state().asked.keys().copied().collect()
    }

    /// The pages that `ticket` waits for.
    pub fn asked(&self, ticket: Ticket) -> Vec<u64> {
        self.state().asked.get(&ticket).cloned().unwrap_or_default()
    }

    /// Brings in the pages that `ticket` waits for.
    pub fn deliver(&self, ticket: Ticket) {
        let mut state = self.state();
        for page in state.asked.remove(&ticket).into_iter().flatten() {
            self.bring_in(&mut state, page);
            let now = state.accesses;
            state.held.insert(page, now);
        }
    }

    /// Marks the pages that `ticket` waits for as lost: accesses to them fail as outside of RAM
    /// until [`heal`](Self::heal).
    pub fn fail(&self, ticket: Ticket) {
        let mut state = self.state();
        let pages = state.asked.remove(&ticket).into_iter().flatten();
        let lost: Vec<u64> = pages
            .filter(|page| state.frames[*page as usize].is_none())
            .collect();
        state.lost.extend(lost);
    }

    /// Drops `ticket`: its end is never reported.
    pub fn forget(&self, ticket: Ticket) {
        self.state().asked.remove(&ticket);
    }

    /// Makes lost pages absent pages again.
    pub fn heal(&self) {
        self.state().lost.clear();
    }

    fn bring_in(&self, state: &mut State, page: u64) {
        if state.frames[page as usize].is_some() {
            return;
        }
        state.lost.remove(&page);
        let frame = state.free.pop_front().expect("fewer pages than frames");
        let bytes = state.store.remove(&page).expect("it is absent");
        self.mem
            .put(Gpa::new(u64::from(frame) * PAGE_SIZE), &bytes[..]);
        state.frames[page as usize] = Some(frame);
    }

    /// Accesses of devices and units, by kind.
    pub fn counts(&self) -> BTreeMap<Kind, Count> {
        self.state().counts.clone()
    }

    /// Accesses, evictions, and absent pages that were to be filled as a whole and so not brought
    /// in.
    pub fn totals(&self) -> (u64, u64, u64) {
        let state = self.state();
        (state.accesses, state.evictions, state.spared_reads)
    }

    /// Reads bytes without counting an access.
    pub fn peek(&self, gpa: u64, buf: &mut [u8]) {
        let state = self.state();
        for_each_page(gpa, buf.len() as u64, |page, at, part| {
            let into = &mut buf[part];
            match state.frames[page as usize] {
                Some(frame) => {
                    let from = Gpa::new(u64::from(frame) * PAGE_SIZE + at);
                    self.mem.read(from, into).expect("a frame");
                }
                None => {
                    let bytes = &state.store[&page];
                    into.copy_from_slice(&bytes[at as usize..][..into.len()]);
                }
            }
        });
    }

    /// A disk fills what it leases as a whole: nothing is to be fetched for that.
    fn expect_overwrite(&self, gpa: Gpa, intent: Intent) {
        let kind = self.state().kind(gpa.raw(), intent);
        assert_ne!(
            kind,
            Kind::DataWrite,
            "a read would be preceded by a fetch of {gpa:?}"
        );
    }

    /// One access of a device or unit, of all these pieces; where the first lies in host memory.
    fn pass(&self, pieces: &[(Gpa, u64, Intent)]) -> Access<u64> {
        let mut state = self.state();
        state.accesses += 1;
        let mut absent = Vec::new();
        for &(gpa, len, intent) in pieces {
            let kind = state.kind(gpa.raw(), intent);
            let mut waits = false;
            for page in pages(gpa.raw(), len) {
                if page >= state.frames.len() as u64 {
                    return Err(DmaFault::NotRam { gpa }.into());
                }
                let is_whole = page * PAGE_SIZE >= gpa.raw()
                    && (page + 1) * PAGE_SIZE <= gpa.raw() + len
                    && intent == Intent::Overwrite;
                if state.frames[page as usize].is_none() && is_whole {
                    state.spared_reads += 1;
                    state.store.insert(page, Box::new([0; PAGE]));
                    self.bring_in(&mut state, page);
                }
                state.use_page(page);
                state.held.remove(&page);
                if state.lost.contains(&page) {
                    return Err(DmaFault::NotRam { gpa }.into());
                }
                if state.frames[page as usize].is_none() {
                    waits = true;
                    absent.push(page);
                }
            }
            let count = state.counts.entry(kind).or_default();
            count.accesses += 1;
            count.pends += u64::from(waits);
        }
        if absent.is_empty() {
            let first = pieces[0].0;
            let frame = state.frames[(first.raw() / PAGE_SIZE) as usize].expect("looked at above");
            return Ok(u64::from(frame) * PAGE_SIZE + first.offset_in(PAGE_SIZE));
        }
        state.tickets += 1;
        let ticket = Ticket(state.tickets);
        state.asked.insert(ticket, absent);
        Err(Stop::Pending(ticket))
    }
}

impl State {
    fn kind(&self, gpa: u64, intent: Intent) -> Kind {
        let area = self.areas.range(..=gpa).next_back().map(|(_, area)| *area);
        match (area.expect("named"), intent) {
            (Area::Only(kind), _)
            | (Area::Ring(kind, _), Intent::Read)
            | (Area::Ring(_, kind), _) => kind,
            (Area::Data, Intent::Read) => Kind::DataRead,
            (Area::Data, Intent::Write) => Kind::DataWrite,
            (Area::Data, Intent::Overwrite) => Kind::DataOverwrite,
        }
    }

    fn use_page(&mut self, page: u64) {
        if self.recent.front() != Some(&page) {
            self.recent.push_front(page);
            self.recent.truncate(48);
        }
    }
}

fn pages(gpa: u64, len: u64) -> impl Iterator<Item = u64> {
    gpa / PAGE_SIZE..=(gpa + len - 1) / PAGE_SIZE
}

/// Calls with page, offset in it, and which of the bytes.
fn for_each_page(gpa: u64, len: u64, mut each: impl FnMut(u64, u64, std::ops::Range<usize>)) {
    let mut done = 0;
    while done < len {
        let at = (gpa + done) % PAGE_SIZE;
        let part = (PAGE_SIZE - at).min(len - done);
        each(
            (gpa + done) / PAGE_SIZE,
            at,
            done as usize..(done + part) as usize,
        );
        done += part;
    }
}

impl PhysMem for Pager {
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        let at = self.pass(&[(gpa, 8, Intent::Read)])?;
        self.mem.read_u64(Gpa::new(at))
    }

    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        let at = self.pass(&[(gpa, 4, Intent::Write)])?;
        self.mem.store_u32_release(Gpa::new(at), value)
    }

    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        assert!(gpa.left_in_page() >= buf.len() as u64, "one mapping's page");
        let at = self.pass(&[(gpa, buf.len() as u64, Intent::Read)])?;
        self.mem.read(Gpa::new(at), buf)
    }

    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        assert!(gpa.left_in_page() >= buf.len() as u64, "one mapping's page");
        let at = self.pass(&[(gpa, buf.len() as u64, Intent::Write)])?;
        self.mem.write(Gpa::new(at), buf)
    }

    fn host(&self, gpa: Gpa, len: u64, intent: Intent) -> Access<Hva> {
        self.expect_overwrite(gpa, intent);
        let at = self.pass(&[(gpa, len, intent)])?;
        if gpa.left_in_page() < len {
            // All there, in frames of their own.
            return Err(DmaFault::BadRange.into());
        }
        self.mem.host(Gpa::new(at), len, intent)
    }

    fn run(&self, gpa: Gpa) -> Access<u64> {
        // Asks for nothing that `host` is not asked for next.
        Ok(gpa.left_in_page())
    }

    fn gather(&self, pieces: &[(Gpa, u64, Intent)]) -> Access<()> {
        match pieces {
            [] => Ok(()),
            _ => self.pass(pieces).map(drop),
        }
    }

    fn let_go(&self, pages: &Pages, mask: u32) -> u32 {
        let gone = pages.of(mask).map(|(page, bit)| {
            self.evict(page.raw() / PAGE_SIZE);
            bit
        });
        gone.sum()
    }

    fn keep_alive(&self) -> KeepAlive {
        self.mem.keep_alive()
    }
}

/// A vCPU's way to the same memory: what is absent is brought in, and the access goes on.
#[derive(Clone)]
pub struct Cpu(pub Pager);

impl Cpu {
    fn frame(&self, page: u64) -> u64 {
        let mut state = self.0.state();
        state.use_page(page);
        self.0.bring_in(&mut state, page);
        u64::from(state.frames[page as usize].expect("just brought in")) * PAGE_SIZE
    }

    fn at(&self, gpa: Gpa) -> Gpa {
        Gpa::new(self.frame(gpa.raw() / PAGE_SIZE) + gpa.offset_in(PAGE_SIZE))
    }

    pub fn put(&self, gpa: u64, bytes: &[u8]) {
        self.write(Gpa::new(gpa), bytes).expect("RAM");
    }

    pub fn get(&self, gpa: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(Gpa::new(gpa), &mut bytes).expect("RAM");
        bytes
    }
}

impl PhysMem for Cpu {
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        self.0.mem.read_u64(self.at(gpa))
    }

    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        self.0.mem.store_u32_release(self.at(gpa), value)
    }

    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        for_each_page(gpa.raw(), buf.len() as u64, |page, at, part| {
            let from = Gpa::new(self.frame(page) + at);
            self.0.mem.read(from, &mut buf[part]).expect("a frame");
        });
        Ok(())
    }

    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        for_each_page(gpa.raw(), buf.len() as u64, |page, at, part| {
            let to = Gpa::new(self.frame(page) + at);
            self.0.mem.write(to, &buf[part]).expect("a frame");
        });
        Ok(())
    }

    fn host(&self, gpa: Gpa, len: u64, intent: Intent) -> Access<Hva> {
        self.0.mem.host(self.at(gpa), len, intent)
    }

    fn keep_alive(&self) -> KeepAlive {
        self.0.keep_alive()
    }
}
