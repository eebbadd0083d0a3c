//! Guest memory as the machine's owner accesses it: an access to a page that is not in memory
//! returns a ticket.
//!
//! One byte of flags for each page is checked before [`GuestRam`]. The owner's thread makes all
//! accesses, releases pages and reports the disks' requests; the pager, another thread, shows the
//! pages that are there. So an access to a page that is there costs one load more than without, and
//! no lock.
//!
//! The owner's side reports its events to the pager as messages, in the order in which they
//! happened, which the book relies on ([`crate::residency`]). A page that is released is absent
//! from the next access on, and the message with its release follows every message about an access
//! that found it present.
//!
//! Stores of devices do not show in the guest's page tables, so they are recorded here: a copy
//! ([`PhysMem::write`]) as *written*, until the next request of a disk clears it; an address for
//! writing ([`PhysMem::host`]) as *lent*, until the page is released, since the last store through
//! it is not reported. Only an address for [`Intent::Overwrite`] is neither: it is a disk's, and
//! every disk of the machine reports its requests ([`MappedDisk`](crate::disk::MappedDisk)).

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use guest_mem::{Access, Gpa, GuestRam, Hva, Intent, KeepAlive, PAGE_SIZE, Pages, PhysMem, Stop};
use sidecore::Handle;

use crate::link::{Gate, Kind, Message, OwnerEvent, OwnerMessage, ReportEpoch, Reports};
use crate::residency::{Op, Page, Span, Ticket};

/// Devices may access the page. Set by the pager, cleared by the owner.
const SHOWN: u8 = 1 << 0;
/// A device has stored to it since it was shown, or since the beginning of a disk's request with
/// it. The owner's.
const WRITTEN: u8 = 1 << 1;
/// A device has had an address to store to since it was shown. The owner's.
const LENT: u8 = 1 << 2;
/// It has come for a ticket, and the access that waited has not been retried. Set by the pager,
/// cleared by either.
const HELD: u8 = 1 << 3;

/// Bits of an [`Op`] that have the disk's number.
const DISK_BITS: u32 = 8;

struct Shared {
    ram: GuestRam,
    /// Address at which page 0 of the file is mapped.
    base: Hva,
    flags: Box<[AtomicU8]>,
    pager: OnceLock<Handle<Message>>,
    /// Last ticket. The owner's.
    tickets: AtomicU64,
    /// Last ticket of a discard that has been answered: they are answered in their order. Set by
    /// the pager.
    answered: AtomicU64,
    /// Last request of a disk. The owner's.
    ops: AtomicU64,
    /// Number of requests of all disks that are under way and have not been reported. The owner's.
    unreported: AtomicU64,
    /// An [`ReportEpoch`], set by the pager.
    asked: AtomicU64,
    /// The [`ReportEpoch`] that disks saw last. The owner's.
    seen: AtomicU64,
    /// Gate of each disk, made on demand.
    gates: Mutex<Vec<Arc<Gate>>>,
}

/// Guest memory of which pages may be elsewhere. A clone is another handle to the same memory.
///
/// Threads: accesses come from the machine's owner alone. It is usable only once a
/// [`Pager`](crate::pager::Pager) runs: until then every page is absent, and requests for pages are
/// not received.
#[derive(Clone)]
pub struct SwappedRam(Arc<Shared>);

impl SwappedRam {
    /// Wraps `ram`, of pages of 4 KiB ([`HugePages::Never`](guest_mem::HugePages::Never)).
    pub fn new(ram: GuestRam) -> Self {
        let pages: u64 = ram.regions().iter().map(|r| r.len / PAGE_SIZE).sum();
        Self(Arc::new(Shared {
            base: ram.regions()[0].hva,
            flags: (0..pages).map(|_| AtomicU8::new(0)).collect(),
            pager: OnceLock::new(),
            tickets: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            ops: AtomicU64::new(0),
            unreported: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            gates: Mutex::default(),
            ram,
        }))
    }

    /// Returns the memory behind it. A read of an absent page there gives it memory.
    pub fn ram(&self) -> &GuestRam {
        &self.0.ram
    }

    /// Returns the number of pages of 4 KiB.
    pub fn pages(&self) -> usize {
        self.0.flags.len()
    }

    /// Returns the bytes that are allocated for all pages together.
    pub fn page_bytes(&self) -> usize {
        size_of_val(&*self.0.flags)
    }

    /// Sets the receiver of messages from now on. Called once.
    pub(crate) fn connect(&self, pager: Handle<Message>) {
        assert!(self.0.pager.set(pager).is_ok(), "memory has one pager");
    }

    /// Returns whether messages have a receiver.
    pub(crate) fn is_connected(&self) -> bool {
        self.0.pager.get().is_some()
    }

    /// Sends an event to the pager; it is dropped if the pager has ended.
    fn send(&self, event: OwnerEvent) {
        if let Some(pager) = self.0.pager.get() {
            let _ = pager.send(Message::Owner(OwnerMessage(event)));
        }
    }

    /// Shows the page: devices may access it from now on.
    pub(crate) fn show(&self, page: Page) {
        // Release: pairs with the load in `absent`, so that an access that sees the flag sees the
        // page's content.
        self.flags(page).fetch_or(SHOWN, Ordering::Release);
    }

    /// Keeps the page in memory until a device accesses it.
    pub(crate) fn hold(&self, page: Page) {
        // Relaxed, as all but `SHOWN`: the flag is its own message, and one that is seen late costs
        // a second ticket.
        self.flags(page).fetch_or(HELD, Ordering::Relaxed);
    }

    /// Ends the hold: as far as is known, no access waits for the page any more.
    pub(crate) fn unhold(&self, page: Page) {
        self.flags(page).fetch_and(!HELD, Ordering::Relaxed);
    }

    /// Sets the mode of disks from now on.
    pub(crate) fn ask_disks(&self, asked: ReportEpoch) {
        // Relaxed: a request that a disk makes meanwhile is right under the old mode as well
        // (`Reports::Draining` is for that).
        self.0.asked.store(asked.0, Ordering::Relaxed);
    }

    /// Returns the mode in which a disk makes its next request. Owner's thread.
    pub(crate) fn reports(&self) -> Reports {
        let asked = ReportEpoch(self.0.asked.load(Ordering::Relaxed));
        if self.0.seen.load(Ordering::Relaxed) != asked.0 {
            self.0.seen.store(asked.0, Ordering::Relaxed);
            if asked.reports() == Reports::Draining {
                self.send(OwnerEvent::Drains(asked));
            }
        }
        asked.reports()
    }

    /// Counts a request that is submitted without a report. Owner's thread.
    pub(crate) fn unreported_begins(&self) {
        // Relaxed, here and below: one thread counts.
        self.0.unreported.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of such a request. Owner's thread.
    pub(crate) fn unreported_ends(&self) {
        self.0.unreported.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns whether such a request is under way at any disk: other requests may overlap it.
    /// Owner's thread.
    pub(crate) fn has_unreported(&self) -> bool {
        self.0.unreported.load(Ordering::Relaxed) != 0
    }

    /// Returns a number for a request of disk `disk`, from which the disk is found again. Owner's
    /// thread.
    pub(crate) fn next_op(&self, disk: u8) -> Op {
        let number = self.0.ops.fetch_add(1, Ordering::Relaxed) & (u64::MAX >> DISK_BITS);
        Op(u64::from(disk) << (u64::BITS - DISK_BITS) | number)
    }

    /// Returns the disk that a number was given to.
    pub(crate) fn disk_of(op: Op) -> u8 {
        // The shift leaves the disk's bits.
        (op.0 >> (u64::BITS - DISK_BITS)) as u8
    }

    /// Reports that a request of a disk is about to be submitted. Owner's thread.
    pub(crate) fn began(&self, op: Op, kind: Kind, span: Span) {
        for page in &span.pages {
            // Earlier stores are part of the request's data, or are overwritten. An address may be
            // stored to later as well, so LENT stays.
            self.flags(*page).fetch_and(!WRITTEN, Ordering::Relaxed);
        }
        self.send(OwnerEvent::Began(op, kind, span));
    }

    /// Reports that a request of a disk has ended, which the guest does not know yet. Owner's
    /// thread.
    pub(crate) fn ended(&self, op: Op, kind: Kind, is_good: bool) {
        self.send(OwnerEvent::Ended(op, kind, is_good));
    }

    /// Reports that the guest has discarded these pages. Returns a ticket that is done when their
    /// memory and slots have been freed as far as they can be. Later stores to them are kept.
    /// Owner's thread.
    pub(crate) fn offer(&self, pages: impl Iterator<Item = Gpa>) -> guest_mem::Ticket {
        let pages = pages.filter_map(|gpa| self.page_at(gpa)).collect();
        let ticket = self.next_ticket();
        self.send(OwnerEvent::Offered(ticket, pages));
        guest_mem::Ticket(ticket.0)
    }

    /// Answers the discards up to this ticket. Pager's thread.
    pub(crate) fn answer(&self, ticket: Ticket) {
        // Release: pairs with the load in `is_answered`; an owner that sees the answer may store to
        // dropped pages.
        self.0.answered.store(ticket.0, Ordering::Release);
    }

    /// Returns whether a discard has been answered. Owner's thread.
    pub(crate) fn is_answered(&self, ticket: guest_mem::Ticket) -> bool {
        self.0.answered.load(Ordering::Acquire) >= ticket.0
    }

    fn next_ticket(&self) -> Ticket {
        Ticket(self.0.tickets.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Returns the gate of disk `number`.
    pub(crate) fn gate(&self, number: u8) -> Arc<Gate> {
        let mut gates = self.0.gates.lock().unwrap_or_else(PoisonError::into_inner);
        while gates.len() <= usize::from(number) {
            gates.push(Arc::default());
        }
        gates[usize::from(number)].clone()
    }

    fn flags(&self, page: Page) -> &AtomicU8 {
        &self.0.flags[page.0 as usize]
    }

    /// Returns the address at which the page is mapped for devices and for the pager.
    pub(crate) fn hva(&self, page: Page) -> Hva {
        Hva::new(self.0.base.raw() + u64::from(page.0) * PAGE_SIZE)
    }

    /// Returns the page of `hva`, an address of this memory.
    pub(crate) fn page_of(&self, hva: Hva) -> Page {
        // A page has 32 bits: the file is smaller than 16 TiB, as the number of flags shows.
        Page(((hva.raw() - self.0.base.raw()) / PAGE_SIZE) as u32)
    }

    /// Returns the page at a guest-physical address, if it is memory.
    pub(crate) fn page_at(&self, gpa: Gpa) -> Option<Page> {
        let hva = self.0.ram.host(gpa, 1, Intent::Read).ok()?;
        Some(self.page_of(hva))
    }

    /// Returns the guest-physical address of a page.
    pub(crate) fn gpa_of(&self, page: Page) -> Gpa {
        let at = u64::from(page.0) * PAGE_SIZE;
        let mut regions = self.0.ram.regions().iter();
        let region = regions.find(|r| r.fd_offset <= at && at - r.fd_offset < r.len);
        let region = region.expect("a page of the file");
        Gpa::new(region.gpa.raw() + (at - region.fd_offset))
    }

    /// Returns the pages of `len` bytes at `hva`; `len` at least 1.
    pub(crate) fn pages_of(&self, hva: Hva, len: u64) -> impl Iterator<Item = Page> + use<> {
        let first = self.page_of(hva).0;
        let last = self.page_of(Hva::new(hva.raw() + (len - 1))).0;
        (first..=last).map(Page)
    }

    /// Returns whether the page is absent; if not, records the access.
    #[inline]
    fn is_absent(&self, page: Page, note: u8) -> bool {
        let flags = self.flags(page);
        // Acquire: pairs with the Release in `show`.
        let now = flags.load(Ordering::Acquire);
        if now & SHOWN == 0 {
            return true;
        }
        if now & HELD != 0 {
            flags.fetch_and(!HELD, Ordering::Relaxed);
        }
        if now & note != note {
            flags.fetch_or(note, Ordering::Relaxed);
        }
        false
    }

    /// Returns the host address of a range that is there, and records the access.
    #[inline]
    fn pass(&self, gpa: Gpa, len: u64, intent: Intent, note: u8) -> Access<Hva> {
        let hva = self.0.ram.host(gpa, len, intent)?;
        loop {
            let mut is_absent = false;
            for page in self.pages_of(hva, len) {
                is_absent |= self.is_absent(page, note);
            }
            if !is_absent {
                return Ok(hva);
            }
            // If all have come meanwhile, the access is still to be recorded. They stay: only this
            // thread releases them.
            self.wait_for([(hva, len, intent)])?;
        }
    }

    /// Creates a ticket for the absent pages of these ranges.
    #[cold]
    fn wait_for(&self, ranges: impl IntoIterator<Item = (Hva, u64, Intent)>) -> Access<()> {
        let mut absent = Vec::new();
        for (hva, len, intent) in ranges {
            let (start, end) = (hva.raw(), hva.raw() + len);
            for page in self.pages_of(hva, len) {
                if self.flags(page).load(Ordering::Relaxed) & SHOWN != 0 {
                    continue;
                }
                let at = self.hva(page).raw();
                let is_whole = start <= at && at + PAGE_SIZE <= end;
                absent.push((page, is_whole && intent == Intent::Overwrite));
            }
        }
        if absent.is_empty() {
            // All have come meanwhile.
            return Ok(());
        }
        let ticket = self.next_ticket();
        self.send(OwnerEvent::Wanted(ticket, absent));
        Err(Stop::Pending(guest_mem::Ticket(ticket.0)))
    }

    fn copies(&self, gpa: Gpa, len: usize, intent: Intent, note: u8) -> Access<()> {
        match len {
            0 => Ok(()),
            len => self.pass(gpa, len as u64, intent, note).map(drop),
        }
    }
}

impl PhysMem for SwappedRam {
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        self.pass(gpa, 8, Intent::Read, 0)?;
        self.0.ram.read_u64(gpa)
    }

    fn read_u128(&self, gpa: Gpa) -> Access<u128> {
        self.pass(gpa, 16, Intent::Read, 0)?;
        self.0.ram.read_u128(gpa)
    }

    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        self.pass(gpa, 4, Intent::Write, WRITTEN)?;
        self.0.ram.store_u32_release(gpa, value)
    }

    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        self.copies(gpa, buf.len(), Intent::Read, 0)?;
        self.0.ram.read(gpa, buf)
    }

    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        self.copies(gpa, buf.len(), Intent::Write, WRITTEN)?;
        self.0.ram.write(gpa, buf)
    }

    fn host(&self, gpa: Gpa, len: u64, intent: Intent) -> Access<Hva> {
        let note = match intent {
            Intent::Read | Intent::Overwrite => 0,
            Intent::Write => LENT,
        };
        self.pass(gpa, len, intent, note)
    }

    fn run(&self, gpa: Gpa) -> Access<u64> {
        self.0.ram.run(gpa)
    }

    fn gather(&self, pieces: &[(Gpa, u64, Intent)]) -> Access<()> {
        let mut found = Vec::with_capacity(pieces.len());
        for &(gpa, len, intent) in pieces {
            // A fault is reported when that piece is accessed.
            if let Ok(hva) = self.0.ram.host(gpa, len, intent) {
                found.push((hva, len, intent));
            }
        }
        self.wait_for(found)
    }

    fn let_go(&self, pages: &Pages, mask: u32) -> u32 {
        let (mut gone, mut written) = (0, 0);
        for (gpa, bit) in pages.of(mask) {
            let Ok(hva) = self.0.ram.host(gpa, PAGE_SIZE, Intent::Read) else {
                continue;
            };
            let flags = self.flags(self.page_of(hva));
            let before = flags.load(Ordering::Relaxed);
            if before & (SHOWN | HELD) != SHOWN {
                continue;
            }
            // Only the pager shows it again, after it has received this in the message.
            flags.fetch_and(!(SHOWN | WRITTEN | LENT), Ordering::Relaxed);
            gone |= bit;
            if before & (WRITTEN | LENT) != 0 {
                written |= bit;
            }
        }
        self.send(OwnerEvent::Answered { gone, written });
        gone
    }

    fn keep_alive(&self) -> KeepAlive {
        self.0.ram.keep_alive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use guest_mem::HugePages;
    use seeded::Random;

    use super::*;

    /// Otherwise the store would be lost: a page that is backed by a block would be dropped with
    /// it.
    #[test]
    fn a_store_to_a_page_that_comes_while_it_is_looked_for_is_noted() {
        const ROUNDS: usize = 20_000;
        let ram = GuestRam::with_pages(&[(Gpa::new(0), 2 << 20)], HugePages::Never);
        let ram = SwappedRam::new(ram.expect("memory"));
        let page = Page(3);
        let gpa = ram.gpa_of(page);
        let begin = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random::new(1);
                for _ in 0..ROUNDS {
                    begin.wait();
                    for _ in 0..random.below(64) {
                        std::hint::spin_loop();
                    }
                    ram.show(page);
                }
            });
            // Neither thread ends before the other does.
            let mut wrong = Vec::new();
            for round in 0..ROUNDS {
                begin.wait();
                let note = match round % 2 {
                    0 => {
                        while ram.write(gpa, &[1]).is_err() {}
                        WRITTEN
                    }
                    _ => {
                        while ram.host(gpa, 1, Intent::Write).is_err() {}
                        LENT
                    }
                };
                let flags = ram.flags(page).swap(0, Ordering::Relaxed);
                if flags != SHOWN | note {
                    wrong.push((round, flags));
                }
            }
            assert_eq!(wrong, []);
        });
    }
}
