//! Guest memory over an array.

use guest_mem::{Access, Gpa, GuestRam, Hva, Intent, KeepAlive, LastingPiece, PhysMem, Region};

/// Guest memory in an array of this process: [`GuestRam`] without the memory file, so that tests
/// need no system call and run under Miri. A clone is another handle to the same memory, with which
/// a test plays the guest.
///
/// The `put_` and `get_` functions are the guest's side: they panic outside the memory.
#[derive(Clone, Debug)]
pub struct ArrayMem {
    ram: GuestRam,
}

impl ArrayMem {
    /// `bytes` of zeroed memory, a multiple of 4096, at address 0.
    pub fn new(bytes: u64) -> Self {
        Self::with_regions(&[(Gpa::new(0), bytes)])
    }

    /// Zeroed memory at these regions; the rules are [`GuestRam::new`]'s, and breaking one panics.
    pub fn with_regions(regions: &[(Gpa, u64)]) -> Self {
        Self {
            ram: GuestRam::in_heap(regions).expect("a test's regions are well formed"),
        }
    }

    /// Length of all regions together, in bytes.
    pub fn bytes(&self) -> u64 {
        self.ram.regions().iter().map(|region| region.len).sum()
    }

    /// The guest stores 2 bytes.
    pub fn put_u16(&self, gpa: Gpa, value: u16) {
        self.put(gpa, &value.to_le_bytes());
    }

    /// The guest stores 4 bytes.
    pub fn put_u32(&self, gpa: Gpa, value: u32) {
        self.put(gpa, &value.to_le_bytes());
    }

    /// The guest stores 8 bytes.
    pub fn put_u64(&self, gpa: Gpa, value: u64) {
        self.put(gpa, &value.to_le_bytes());
    }

    /// The guest stores bytes.
    pub fn put(&self, gpa: Gpa, bytes: &[u8]) {
        self.ram.write(gpa, bytes).expect("the test stays in RAM");
    }

    /// The guest loads 2 bytes.
    pub fn get_u16(&self, gpa: Gpa) -> u16 {
        u16::from_le_bytes(self.get(gpa))
    }

    /// The guest loads 4 bytes.
    pub fn get_u32(&self, gpa: Gpa) -> u32 {
        u32::from_le_bytes(self.get(gpa))
    }

    /// The guest loads 8 bytes.
    pub fn get_u64(&self, gpa: Gpa) -> u64 {
        u64::from_le_bytes(self.get(gpa))
    }

    /// The guest loads `N` bytes.
    pub fn get<const N: usize>(&self, gpa: Gpa) -> [u8; N] {
        let mut bytes = [0; N];
        self.ram
            .read(gpa, &mut bytes)
            .expect("the test stays in RAM");
        bytes
    }
}

impl PhysMem for ArrayMem {
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        self.ram.read_u64(gpa)
    }

    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        self.ram.store_u32_release(gpa, value)
    }

    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        self.ram.read(gpa, buf)
    }

    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        self.ram.write(gpa, buf)
    }

    fn host(&self, gpa: Gpa, len: u64, intent: Intent) -> Access<Hva> {
        self.ram.host(gpa, len, intent)
    }

    fn run(&self, gpa: Gpa) -> Access<u64> {
        self.ram.run(gpa)
    }

    /// The region: an array is always there. [`DirectMap`](guest_mem::DirectMap) makes use of that.
    fn lasting_piece(&self, gpa: Gpa) -> Option<LastingPiece> {
        let mut regions = self.ram.regions().iter();
        let inside = |region: &&Region| {
            let inside = gpa.offset_from(region.gpa);
            inside.is_some_and(|inside| inside < region.len)
        };
        let &Region { gpa, len, hva, .. } = regions.find(inside)?;
        Some(LastingPiece { gpa, len, hva })
    }

    fn keep_alive(&self) -> KeepAlive {
        self.ram.keep_alive()
    }
}
