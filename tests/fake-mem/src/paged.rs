//! Guest memory whose pages may be absent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use guest_mem::{
    Access, DmaFault, Gpa, Hva, Intent, KeepAlive, PAGE_SIZE, Pages, PhysMem, Stop, Ticket,
};

use crate::ArrayMem;

#[derive(Debug, Default)]
struct State {
    absent: BTreeSet<u64>,
    /// Absent for good: pages whose page-in has failed.
    lost: BTreeSet<u64>,
    /// Brought in for a ticket, and not accessed since.
    kept: BTreeSet<u64>,
    /// Pages that each outstanding ticket brings in.
    asked: BTreeMap<Ticket, Vec<u64>>,
    tickets: u64,
}

/// Memory whose pages can be absent. An access to an absent page returns a ticket; the page is
/// brought in when the test, in the role of the pager, [delivers](PagedMem::deliver) that ticket. A
/// clone is another handle of the same memory.
#[derive(Clone, Debug)]
pub struct PagedMem {
    mem: ArrayMem,
    state: Arc<Mutex<State>>,
}

impl PagedMem {
    /// Creates memory whose pages are all present.
    pub fn new(mem: ArrayMem) -> Self {
        Self {
            mem,
            state: Arc::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .expect("no test panics while it holds this")
    }

    /// Returns the content of all pages, present and absent, as the guest's vCPUs access it.
    pub fn array(&self) -> &ArrayMem {
        &self.mem
    }

    /// Evicts the pages of `[gpa, gpa + len)`. They keep their content.
    pub fn evict(&self, gpa: Gpa, len: u64) {
        self.state().absent.extend(pages(gpa, len));
    }

    /// Returns the tickets that were handed out and not delivered, oldest first.
    pub fn tickets(&self) -> Vec<Ticket> {
        self.state().asked.keys().copied().collect()
    }

    /// Brings in the pages that `ticket` waits for, and ends the ticket.
    pub fn deliver(&self, ticket: Ticket) {
        let mut state = self.state();
        for page in state.asked.remove(&ticket).into_iter().flatten() {
            if state.absent.remove(&page) {
                state.kept.insert(page);
            }
        }
    }

    /// Marks the pages that `ticket` waits for as lost: accesses to them fail as outside of RAM
    /// from now on.
    pub fn fail(&self, ticket: Ticket) {
        let mut state = self.state();
        let pages = state.asked.remove(&ticket).into_iter().flatten();
        let pages: Vec<u64> = pages.collect();
        state.lost.extend(pages);
    }

    /// Makes absent pages present and zero if the access is going to overwrite them completely.
    fn forget_overwritten(&self, gpa: Gpa, len: u64, intent: Intent) {
        if intent != Intent::Overwrite {
            return;
        }
        let whole = |page: &u64| {
            let start = page * PAGE_SIZE;
            start >= gpa.raw() && start + PAGE_SIZE <= gpa.raw() + len
        };
        for page in pages(gpa, len).filter(whole) {
            if self.state().absent.remove(&page) {
                let zeroes = [0; PAGE_SIZE as usize];
                self.mem
                    .write(Gpa::new(page * PAGE_SIZE), &zeroes)
                    .expect("a page that was there");
            }
        }
    }

    /// Returns a ticket for the absent pages among these, or succeeds if there are none.
    fn pass(&self, pages: impl Iterator<Item = u64>) -> Access<()> {
        let mut state = self.state();
        let pages: Vec<u64> = pages.collect();
        let absent = pages.iter().copied();
        let absent: Vec<u64> = absent.filter(|page| state.absent.contains(page)).collect();
        if let Some(lost) = absent.iter().find(|page| state.lost.contains(page)) {
            let gpa = Gpa::new(lost * PAGE_SIZE);
            return Err(DmaFault::NotRam { gpa }.into());
        }
        if absent.is_empty() {
            state.kept.retain(|page| !pages.contains(page));
            return Ok(());
        }
        state.tickets += 1;
        let ticket = Ticket(state.tickets);
        state.asked.insert(ticket, absent);
        Err(Stop::Pending(ticket))
    }
}

fn pages(gpa: Gpa, len: u64) -> impl Iterator<Item = u64> {
    let last = gpa.raw().saturating_add(len.max(1) - 1);
    gpa.raw() / PAGE_SIZE..=last / PAGE_SIZE
}

impl PhysMem for PagedMem {
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        self.pass(pages(gpa, 8))?;
        self.mem.read_u64(gpa)
    }

    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        self.pass(pages(gpa, 4))?;
        self.mem.store_u32_release(gpa, value)
    }

    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        self.pass(pages(gpa, buf.len() as u64))?;
        self.mem.read(gpa, buf)
    }

    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        self.pass(pages(gpa, buf.len() as u64))?;
        self.mem.write(gpa, buf)
    }

    fn host(&self, gpa: Gpa, len: u64, intent: Intent) -> Access<Hva> {
        self.forget_overwritten(gpa, len, intent);
        self.pass(pages(gpa, len))?;
        self.mem.host(gpa, len, intent)
    }

    fn run(&self, gpa: Gpa) -> Access<u64> {
        self.pass(pages(gpa, 1))?;
        self.mem.run(gpa)
    }

    fn gather(&self, pieces: &[(Gpa, u64, Intent)]) -> Access<()> {
        for &(gpa, len, intent) in pieces {
            self.forget_overwritten(gpa, len, intent);
        }
        self.pass(pieces.iter().flat_map(|&(gpa, len, _)| pages(gpa, len)))
    }

    fn let_go(&self, pages: &Pages, mask: u32) -> u32 {
        let mut state = self.state();
        let mut gone = 0;
        for (page, bit) in pages.of(mask) {
            let page = page.raw() / PAGE_SIZE;
            if !state.kept.contains(&page) {
                state.absent.insert(page);
                gone |= bit;
            }
        }
        gone
    }

    fn keep_alive(&self) -> KeepAlive {
        self.mem.keep_alive()
    }
}
