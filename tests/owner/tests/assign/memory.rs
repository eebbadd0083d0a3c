//! Memory of these guests: RAM that is always there, and memory of which pages may be absent, which
//! records the requests for them.

use std::sync::{Arc, Mutex};

use fake_mem::{ArrayMem, PagedMem};
use guest_mem::{Access, Gpa, GuestRam, Hva, Intent, KeepAlive, PAGE_SIZE, Pages, PhysMem, Ticket};

/// Two regions, with a hole between them in which there is a BAR.
pub const REGIONS: [(u64, u64); 2] = [(0, 8 << 20), (16 << 20, 8 << 20)];

/// Memory of a guest, and the guest's own accesses to it, which no test has wait.
pub trait Memory: PhysMem + Clone + Send + 'static {
    fn new() -> Self;
    fn put_u64(&self, at: u64, value: u64);
    fn get_u64(&self, at: u64) -> u64;
    /// Guest-physical address of an address in this process.
    fn gpa_of(&self, vaddr: u64) -> Option<u64>;
}

fn regions() -> [(Gpa, u64); 2] {
    REGIONS.map(|(at, len)| (Gpa::new(at), len))
}

fn find(mem: &impl PhysMem, vaddr: u64) -> Option<u64> {
    REGIONS.into_iter().find_map(|(at, len)| {
        let base = mem.host(Gpa::new(at), PAGE_SIZE, Intent::Read).ok()?.raw();
        let offset = vaddr.checked_sub(base)?;
        (offset < len).then_some(at + offset)
    })
}

impl Memory for GuestRam {
    fn new() -> Self {
        GuestRam::new(&regions()).unwrap()
    }

    fn put_u64(&self, at: u64, value: u64) {
        self.write(Gpa::new(at), &value.to_le_bytes()).unwrap();
    }

    fn get_u64(&self, at: u64) -> u64 {
        self.read_u64(Gpa::new(at)).unwrap()
    }

    fn gpa_of(&self, vaddr: u64) -> Option<u64> {
        find(self, vaddr)
    }
}

/// Memory of which pages may be absent.
#[derive(Clone)]
pub struct Paged {
    pub mem: PagedMem,
    /// Questions for host memory that were answered: first page, pages, intent.
    pub lent: Arc<Mutex<Vec<(u64, u64, Intent)>>>,
}

impl Paged {
    pub fn evict(&self, page: u64) {
        self.mem.evict(Gpa::new(page * PAGE_SIZE), PAGE_SIZE);
    }

    /// The one ticket that is waited for.
    pub fn ticket(&self) -> Option<Ticket> {
        self.mem.tickets().last().copied()
    }

    pub fn intents(&self, page: u64) -> Vec<Intent> {
        let lent = self.lent.lock().unwrap();
        let of = lent
            .iter()
            .filter(|(first, pages, _)| (*first..first + pages).contains(&page));
        of.map(|(.., intent)| *intent).collect()
    }
}

impl Memory for Paged {
    fn new() -> Self {
        Self {
            mem: PagedMem::new(ArrayMem::with_regions(&regions())),
            lent: Arc::default(),
        }
    }

    fn put_u64(&self, at: u64, value: u64) {
        self.mem.array().put_u64(Gpa::new(at), value);
    }

    fn get_u64(&self, at: u64) -> u64 {
        self.mem.array().get_u64(Gpa::new(at))
    }

    fn gpa_of(&self, vaddr: u64) -> Option<u64> {
        find(self.mem.array(), vaddr)
    }
}

impl PhysMem for Paged {
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        self.mem.read_u64(gpa)
    }

    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        self.mem.store_u32_release(gpa, value)
    }

    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        self.mem.read(gpa, buf)
    }

    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        self.mem.write(gpa, buf)
    }

    fn host(&self, gpa: Gpa, len: u64, intent: Intent) -> Access<Hva> {
        let hva = self.mem.host(gpa, len, intent)?;
        let (first, pages) = (gpa.raw() / PAGE_SIZE, len.div_ceil(PAGE_SIZE));
        self.lent.lock().unwrap().push((first, pages, intent));
        Ok(hva)
    }

    fn run(&self, gpa: Gpa) -> Access<u64> {
        self.mem.run(gpa)
    }

    fn gather(&self, pieces: &[(Gpa, u64, Intent)]) -> Access<()> {
        self.mem.gather(pieces)
    }

    fn let_go(&self, pages: &Pages, mask: u32) -> u32 {
        self.mem.let_go(pages, mask)
    }

    fn keep_alive(&self) -> KeepAlive {
        self.mem.keep_alive()
    }
}
