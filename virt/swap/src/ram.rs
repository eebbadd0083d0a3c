//! Guest memory as the machine's owner reaches it: pages that are not in memory answer with a
//! ticket.
//!
//! One byte of flags a page stands before [`GuestRam`]. The owner's thread makes all accesses, lets
//! go of pages and reports the disks' requests; the pager, another thread, says which pages are
//! there. So an access to a page that is there costs one load more than without, and no lock.
//!
//! What the owner's side has to tell the pager is a message, in the order in which it happened: the
//! book rests on that order ([`crate::book`]). A page that is let go is absent from the next access
//! on, and the message that says so stands behind every message about an access that found it
//! there.
//!
//! Which pages devices store to cannot be seen in the guest's page tables, so it is noted here: a
//! copy ([`PhysMem::write`]) as *written*, which the next request of a disk makes void; an address
//! for writing ([`PhysMem::host`]) as *lent*, which holds until the page is let go, since nobody
//! says when the last store through it was. Only an address for [`Intent::Overwrite`] is neither:
//! it is a disk's, and every disk of the machine reports its requests
//! ([`MappedDisk`](crate::disk::MappedDisk)).

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use guest_mem::{Access, Gpa, GuestRam, Hva, Intent, KeepAlive, PAGE_SIZE, Pages, PhysMem, Stop};
use sidecore::Handle;

use crate::book::{Op, Page, Span, Ticket};
use crate::link::{Asked, Gate, Kind, Message, Reports, Said, Spoken};

/// Devices may reach the page. Set by the pager, taken away by the owner.
const SHOWN: u8 = 1 << 0;
/// A device has stored to it since it was shown, or since a request of a disk began with it. The
/// owner's.
const WRITTEN: u8 = 1 << 1;
/// A device has had an address to store to since it was shown. The owner's.
const LENT: u8 = 1 << 2;
/// It has come for a ticket, and whoever waited has not asked again. Set by the pager, taken away
/// by either.
const HELD: u8 = 1 << 3;

/// Of an [`Op`], the disk's number.
const DISK_BITS: u32 = 8;

struct Shared {
    ram: GuestRam,
    /// Where page 0 of the file is mapped.
    base: Hva,
    flags: Box<[AtomicU8]>,
    pager: OnceLock<Handle<Message>>,
    /// The last ticket. The owner's.
    tickets: AtomicU64,
    /// The last ticket of an offer that has been answered: they are answered in their order. Set by
    /// the pager.
    answered: AtomicU64,
    /// The last request of a disk. The owner's.
    ops: AtomicU64,
    /// Requests of all disks that are under way and have not been reported. The owner's.
    unreported: AtomicU64,
    /// An [`Asked`], set by the pager.
    asked: AtomicU64,
    /// The one that disks saw last. The owner's.
    seen: AtomicU64,
    /// A gate for each disk, made as they are asked for.
    gates: Mutex<Vec<Arc<Gate>>>,
}

/// Guest memory of which pages may be elsewhere. A clone is another handle to the same memory.
///
/// Threads: accesses come from the machine's owner alone. It is of no use before a
/// [`Pager`](crate::pager::Pager) runs: until then every page is absent, and nobody hears what is
/// asked for.
#[derive(Clone)]
pub struct SwappedRam(Arc<Shared>);

impl SwappedRam {
    /// `ram`, of pages of 4 KiB ([`HugePages::Never`](guest_mem::HugePages::Never)).
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

    /// The memory behind it. Whoever reads an absent page there gives it memory.
    pub fn ram(&self) -> &GuestRam {
        &self.0.ram
    }

    /// Pages of 4 KiB.
    pub fn pages(&self) -> usize {
        self.0.flags.len()
    }

    /// Bytes that are allocated for all pages together.
    pub fn page_bytes(&self) -> usize {
        size_of_val(&*self.0.flags)
    }

    /// What is said from now on goes there. Once.
    pub(crate) fn connect(&self, pager: Handle<Message>) {
        assert!(self.0.pager.set(pager).is_ok(), "memory has one pager");
    }

    /// Whether what is said is heard.
    pub(crate) fn is_connected(&self) -> bool {
        self.0.pager.get().is_some()
    }

    /// Tells the pager. One that has ended needs to know nothing.
    fn say(&self, said: Said) {
        if let Some(pager) = self.0.pager.get() {
            let _ = pager.send(Message::Said(Spoken(said)));
        }
    }

    /// From now on devices may reach the page.
    pub(crate) fn show(&self, page: Page) {
        // Release pairs with the load in `absent`: whoever sees the flag sees what the page was
        // filled with.
        self.flags(page).fetch_or(SHOWN, Ordering::Release);
    }

    /// Until a device reaches it, it stays.
    pub(crate) fn hold(&self, page: Page) {
        // Relaxed, as all but `SHOWN`: the flag is its own message, and one that is seen late costs
        // a second ticket.
        self.flags(page).fetch_or(HELD, Ordering::Relaxed);
    }

    /// Nobody waits for it any more, as far as can be known.
    pub(crate) fn unhold(&self, page: Page) {
        self.flags(page).fetch_and(!HELD, Ordering::Relaxed);
    }

    /// What disks do from now on.
    pub(crate) fn ask_disks(&self, asked: Asked) {
        // Relaxed: what a disk does meanwhile is right under the old one as well
        // (`Reports::Draining` is for that).
        self.0.asked.store(asked.0, Ordering::Relaxed);
    }

    /// Whether a disk reports the request that it is about to make. Owner's thread.
    pub(crate) fn reports(&self) -> Reports {
        let asked = Asked(self.0.asked.load(Ordering::Relaxed));
        if self.0.seen.load(Ordering::Relaxed) != asked.0 {
            self.0.seen.store(asked.0, Ordering::Relaxed);
            if asked.reports() == Reports::Draining {
                self.say(Said::Drains(asked));
            }
        }
        asked.reports()
    }

    /// A request that has not been reported goes down. Owner's thread.
    pub(crate) fn unreported_begins(&self) {
        // Relaxed, here and below: one thread counts.
        self.0.unreported.fetch_add(1, Ordering::Relaxed);
    }

    /// One is over. Owner's thread.
    pub(crate) fn unreported_ends(&self) {
        self.0.unreported.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether one is under way, at whichever disk: nobody can say what it meets. Owner's thread.
    pub(crate) fn has_unreported(&self) -> bool {
        self.0.unreported.load(Ordering::Relaxed) != 0
    }

    /// A number for a request of disk `disk`, from which the disk is found again. Owner's thread.
    pub(crate) fn next_op(&self, disk: u8) -> Op {
        let number = self.0.ops.fetch_add(1, Ordering::Relaxed) & (u64::MAX >> DISK_BITS);
        Op(u64::from(disk) << (u64::BITS - DISK_BITS) | number)
    }

    /// The disk that a number was given to.
    pub(crate) fn disk_of(op: Op) -> u8 {
        // The bits that are left.
        (op.0 >> (u64::BITS - DISK_BITS)) as u8
    }

    /// A request of a disk is about to go down. Owner's thread.
    pub(crate) fn began(&self, op: Op, kind: Kind, span: Span) {
        for page in &span.pages {
            // What was stored before goes down, or is overwritten. An address may be stored to
            // later as well.
            self.flags(*page).fetch_and(!WRITTEN, Ordering::Relaxed);
        }
        self.say(Said::Began(op, kind, span));
    }

    /// A request of a disk is over, and the guest does not know it yet. Owner's thread.
    pub(crate) fn ended(&self, op: Op, kind: Kind, is_good: bool) {
        self.say(Said::Ended(op, kind, is_good));
    }

    /// The guest does without these pages: a ticket that is done when their memory and slots have
    /// been given back as far as they can be. What is stored to them behind that stays. Owner's
    /// thread.
    pub(crate) fn offer(&self, pages: impl Iterator<Item = Gpa>) -> guest_mem::Ticket {
        let pages = pages.filter_map(|gpa| self.page_at(gpa)).collect();
        let ticket = self.next_ticket();
        self.say(Said::Offered(ticket, pages));
        guest_mem::Ticket(ticket.0)
    }

    /// What was offered up to this ticket has been seen to. Pager's thread.
    pub(crate) fn answer(&self, ticket: Ticket) {
        // Release pairs with the load in `is_answered`: whoever sees it may store to pages that are
        // gone.
        self.0.answered.store(ticket.0, Ordering::Release);
    }

    /// Whether an offer's pages have been seen to. Owner's thread.
    pub(crate) fn is_answered(&self, ticket: guest_mem::Ticket) -> bool {
        self.0.answered.load(Ordering::Acquire) >= ticket.0
    }

    fn next_ticket(&self) -> Ticket {
        Ticket(self.0.tickets.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Where requests of disk `number` are let down.
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

    /// Where the page is mapped for devices and for the pager.
    pub(crate) fn hva(&self, page: Page) -> Hva {
        Hva::new(self.0.base.raw() + u64::from(page.0) * PAGE_SIZE)
    }

    /// The page that `hva`, an address of this memory, lies in.
    pub(crate) fn page_of(&self, hva: Hva) -> Page {
        // A page has 32 bits: the file is smaller than 16 TiB, as the number of flags says.
        Page(((hva.raw() - self.0.base.raw()) / PAGE_SIZE) as u32)
    }

    /// The page at a guest-physical address, if it is memory.
    pub(crate) fn page_at(&self, gpa: Gpa) -> Option<Page> {
        let hva = self.0.ram.host(gpa, 1, Intent::Read).ok()?;
        Some(self.page_of(hva))
    }

    /// The guest-physical address of a page.
    pub(crate) fn gpa_of(&self, page: Page) -> Gpa {
        let at = u64::from(page.0) * PAGE_SIZE;
        let mut regions = self.0.ram.regions().iter();
        let region = regions.find(|r| r.fd_offset <= at && at - r.fd_offset < r.len);
        let region = region.expect("a page of the file");
        Gpa::new(region.gpa.raw() + (at - region.fd_offset))
    }

    /// The pages that `len` bytes at `hva` lie in; `len` at least 1.
    pub(crate) fn pages_of(&self, hva: Hva, len: u64) -> impl Iterator<Item = Page> + use<> {
        let first = self.page_of(hva).0;
        let last = self.page_of(Hva::new(hva.raw() + (len - 1))).0;
        (first..=last).map(Page)
    }

    /// Whether the page is absent; if not, notes what is done to it.
    #[inline]
    fn is_absent(&self, page: Page, note: u8) -> bool {
        let flags = self.flags(page);
        // Acquire pairs with the release in `show`.
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

    /// The host address of a range that is there, with what is done to it noted.
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
            // If all have come meanwhile, what is done to them is still to be noted. They stay:
            // this thread alone lets go of them.
            self.wait_for([(hva, len, intent)])?;
        }
    }

    /// A ticket for the absent ones among the pages of these ranges.
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
        self.say(Said::Wanted(ticket, absent));
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
            // A fault is said to whoever accesses that piece.
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
            // The pager, who reads this in the message, is the only one to show it again.
            flags.fetch_and(!(SHOWN | WRITTEN | LENT), Ordering::Relaxed);
            gone |= bit;
            if before & (WRITTEN | LENT) != 0 {
                written |= bit;
            }
        }
        self.say(Said::Answered { gone, written });
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

    /// Without it a page that stands for a block would be dropped with the store.
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
            // None ends before the other thread does.
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
