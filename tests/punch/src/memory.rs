//! Guest memory as the owner accesses it: a [`GuestRam`] with a presence bit for each page.
//!
//! Threads: accesses and [`let_go`](PhysMem::let_go), which clears presence bits, are made by the
//! owner's thread. The pager's thread sets a bit once the page's content is in the file.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use guest_mem::{
    Access, Gpa, GuestRam, Hva, Intent, KeepAlive, PAGE_SIZE, Pages, PhysMem, Stop, Ticket,
};
use rustix::event::{EventfdFlags, eventfd};

/// Last use of a page by a device or a remapping unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// None: only the guest's vCPUs use it.
    Other,
    /// Data of requests and frames, with their headers and status bytes.
    Buffer,
    /// A part of a ring, accessed by a window.
    Ring,
    /// Second-level tables of VT-d.
    Table,
    /// VT-d's invalidation queue, root and context entries, status words.
    Queue,
}

impl Use {
    /// All uses, in the order of their numbers.
    pub const ALL: [Self; 5] = [
        Self::Other,
        Self::Buffer,
        Self::Ring,
        Self::Table,
        Self::Queue,
    ];

    /// Returns its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Other => "others",
            Self::Buffer => "buffers",
            Self::Ring => "rings",
            Self::Table => "tables",
            Self::Queue => "queue",
        }
    }

    fn of_number(number: u8) -> Self {
        Self::ALL[usize::from(number) % Self::ALL.len()]
    }
}

/// Flag beside a page's use: the page was brought in for a ticket, and has not been accessed since.
const HELD: u8 = 0x80;

/// An access that waits for absent pages.
pub(crate) struct PendingAccess {
    pub(crate) ticket: Ticket,
    /// Number of batches that the owner had released before this access.
    pub(crate) batches: u64,
    /// Page numbers in the file, each with whether the access overwrites the page completely.
    pub(crate) pages: Vec<(u64, bool)>,
}

struct Shared {
    ram: GuestRam,
    /// Presence bits, one for each page of the file: devices may access the page.
    present: Box<[AtomicU64]>,
    /// For each page its [`Use`] and the flag [`HELD`].
    notes: Box<[AtomicU8]>,
    asked: Mutex<Vec<PendingAccess>>,
    tickets: AtomicU64,
    /// Number of batches that the owner has released. Relaxed: the owner's thread writes it before
    /// it sends the answer.
    batches: AtomicU64,
    /// The page that was looked up last, or `u64::MAX`.
    last: AtomicU64,
    wake: OwnedFd,
}

/// Guest memory whose pages may be absent. A clone is another handle of the same memory.
#[derive(Clone)]
pub struct PunchedRam(Arc<Shared>);

impl PunchedRam {
    /// Creates the memory with every page of `ram` present. `ram` has to consist of pages of 4 KiB
    /// ([`HugePages::Never`](guest_mem::HugePages::Never)).
    ///
    /// # Errors
    /// No descriptor is left for an eventfd.
    pub fn new(ram: GuestRam) -> std::io::Result<Self> {
        let pages: u64 = ram.regions().iter().map(|r| r.len / PAGE_SIZE).sum();
        let words = pages.div_ceil(64);
        Ok(Self(Arc::new(Shared {
            present: (0..words).map(|_| AtomicU64::new(u64::MAX)).collect(),
            notes: (0..pages).map(|_| AtomicU8::new(0)).collect(),
            asked: Mutex::default(),
            tickets: AtomicU64::new(0),
            batches: AtomicU64::new(0),
            last: AtomicU64::new(u64::MAX),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            ram,
        })))
    }

    pub(crate) fn ram(&self) -> &GuestRam {
        &self.0.ram
    }

    /// Returns the eventfd, readable when an access waits for pages.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }

    /// Returns the number of pages of the file.
    pub(crate) fn pages(&self) -> u64 {
        self.0.notes.len() as u64
    }

    /// Takes the accesses that have started to wait since the last call.
    pub(crate) fn take_asked(&self) -> Vec<PendingAccess> {
        let mut asked = self.0.asked.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut asked)
    }

    pub(crate) fn use_of(&self, page: u64) -> Use {
        Use::of_number(self.0.notes[page as usize].load(Ordering::Relaxed) & !HELD)
    }

    /// Returns the number of batches that the owner has released, the last answered one included.
    pub(crate) fn batches(&self) -> u64 {
        self.0.batches.load(Ordering::Relaxed)
    }

    /// Holds the page: it is not released until a device has accessed it.
    pub(crate) fn hold(&self, page: u64) {
        self.0.notes[page as usize].fetch_or(HELD, Ordering::Relaxed);
    }

    /// Sets the presence bit. The pager calls this for absent pages only: a page that is present
    /// may have been released by the owner meanwhile, in an answer that the pager has not read.
    pub(crate) fn show(&self, page: u64) {
        // Release pairs with the load in `is_present`: a thread that sees the bit sees the bytes
        // written into the file.
        self.0.present[page as usize / 64].fetch_or(1 << (page % 64), Ordering::Release);
    }

    /// Ends the hold: presumably no access waits for the page any more.
    pub(crate) fn unhold(&self, page: u64) {
        self.0.notes[page as usize].fetch_and(!HELD, Ordering::Relaxed);
    }

    fn is_present(&self, page: u64) -> bool {
        self.0.present[page as usize / 64].load(Ordering::Acquire) >> (page % 64) & 1 != 0
    }

    /// Returns the number in the file of the page that contains `gpa`.
    pub(crate) fn page_at(&self, gpa: Gpa) -> Option<u64> {
        let regions = self.0.ram.regions().iter();
        let mut found = regions.filter_map(|region| {
            let inside = gpa.offset_from(region.gpa)?;
            (inside < region.len).then_some((region.fd_offset + inside) / PAGE_SIZE)
        });
        found.next()
    }

    /// Records the use of the `len` bytes at `gpa`, and appends the absent pages among theirs to
    /// `absent`.
    fn look(&self, gpa: Gpa, len: u64, intent: Intent, what: Use, absent: &mut Vec<(u64, bool)>) {
        // An address outside RAM is left to the RAM's own check.
        let last = gpa.checked_add(len.max(1) - 1);
        let ends = (self.page_at(gpa), last.and_then(|last| self.page_at(last)));
        let (Some(first), Some(last)) = ends else {
            return;
        };
        for page in first..=last {
            let note = &self.0.notes[page as usize];
            // When a window of a ring is refreshed, its page is looked up like a data buffer.
            let is_ring = self.use_of(page) == Use::Ring && what == Use::Buffer;
            if is_ring {
                note.fetch_and(!HELD, Ordering::Relaxed);
            } else {
                note.store(what as u8, Ordering::Relaxed);
            }
            if !self.is_present(page) {
                let start = (page - first) * PAGE_SIZE;
                let start = (gpa.raw() & !(PAGE_SIZE - 1)) + start;
                let is_whole = gpa.raw() <= start && start + PAGE_SIZE <= gpa.raw() + len;
                absent.push((page, is_whole && intent == Intent::Overwrite));
            }
        }
        self.0.last.store(first, Ordering::Relaxed);
    }

    fn wait_for(&self, absent: Vec<(u64, bool)>) -> Access<()> {
        if absent.is_empty() {
            return Ok(());
        }
        let ticket = Ticket(self.0.tickets.fetch_add(1, Ordering::Relaxed) + 1);
        let asked = PendingAccess {
            ticket,
            batches: self.batches(),
            pages: absent,
        };
        let mut all = self.0.asked.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(asked);
        drop(all);
        self.wake();
        Err(Stop::Pending(ticket))
    }

    /// Wakes the pager.
    pub(crate) fn wake(&self) {
        // If the counter is full, the eventfd is readable already.
        let _ = rustix::io::write(&self.0.wake, &1_u64.to_ne_bytes());
    }

    fn pass(&self, gpa: Gpa, len: u64, intent: Intent, what: Use) -> Access<()> {
        let mut absent = Vec::new();
        self.look(gpa, len, intent, what, &mut absent);
        self.wait_for(absent)
    }
}

impl PhysMem for PunchedRam {
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        self.pass(gpa, 8, Intent::Read, Use::Table)?;
        self.0.ram.read_u64(gpa)
    }

    fn read_u128(&self, gpa: Gpa) -> Access<u128> {
        self.pass(gpa, 16, Intent::Read, Use::Queue)?;
        self.0.ram.read_u128(gpa)
    }

    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        self.pass(gpa, 4, Intent::Write, Use::Queue)?;
        self.0.ram.store_u32_release(gpa, value)
    }

    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        self.pass(gpa, buf.len() as u64, Intent::Read, Use::Buffer)?;
        self.0.ram.read(gpa, buf)
    }

    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        self.pass(gpa, buf.len() as u64, Intent::Write, Use::Buffer)?;
        self.0.ram.write(gpa, buf)
    }

    fn host(&self, gpa: Gpa, len: u64, intent: Intent) -> Access<Hva> {
        self.pass(gpa, len, intent, Use::Buffer)?;
        self.0.ram.host(gpa, len, intent)
    }

    fn run(&self, gpa: Gpa) -> Access<u64> {
        self.0.ram.run(gpa)
    }

    fn gather(&self, pieces: &[(Gpa, u64, Intent)]) -> Access<()> {
        let mut absent = Vec::new();
        for &(gpa, len, intent) in pieces {
            self.look(gpa, len, intent, Use::Buffer, &mut absent);
        }
        self.wait_for(absent)
    }

    fn let_go(&self, pages: &Pages, mask: u32) -> u32 {
        let mut gone = 0;
        self.0.batches.fetch_add(1, Ordering::Relaxed);
        for (gpa, bit) in pages.of(mask) {
            let Some(page) = self.page_at(gpa) else {
                continue;
            };
            if self.0.notes[page as usize].load(Ordering::Relaxed) & HELD == 0 {
                // Only the pager sets the bit again, after it has read this answer.
                self.0.present[page as usize / 64]
                    .fetch_and(!(1 << (page % 64)), Ordering::Relaxed);
                gone |= bit;
            }
        }
        gone
    }

    /// A new window calls this after the look-up of its page: so that page belongs to a ring.
    fn keep_alive(&self) -> KeepAlive {
        let last = self.0.last.load(Ordering::Relaxed);
        if let Some(note) = self.0.notes.get(last as usize) {
            note.store(Use::Ring as u8, Ordering::Relaxed);
        }
        self.0.ram.keep_alive()
    }
}
