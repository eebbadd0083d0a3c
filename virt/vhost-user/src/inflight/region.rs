//! Access to the shared memory of one queue's part.

/// One queue's part of the inflight region. Words are in the machine's byte order, and naturally
/// aligned if the part begins at a multiple of 8 bytes, as all do.
///
/// An implementation over shared memory makes each access a single atomic one. Loads acquire: the
/// other side is the predecessor's release stores (between the two processes the kernel orders
/// anyway). Stores release, so that they stay behind every store before them, those to the ring
/// included; the other side is the successor's `recover`. Offsets given are always inside
/// [`size`](Region::size) as it was when the tracker was made; an implementation whose memory
/// shrinks has to survive that itself.
pub trait Region {
    /// Bytes there are; does not change.
    fn size(&self) -> usize;
    /// One load of the byte at `at`.
    fn load_u8(&self, at: usize) -> u8;
    /// One load of the two bytes at `at`, which is even.
    fn load_u16(&self, at: usize) -> u16;
    /// One load of the eight bytes at `at`, a multiple of 8.
    fn load_u64(&self, at: usize) -> u64;
    /// One store to the byte at `at`.
    fn store_u8(&mut self, at: usize, value: u8);
    /// One store to the two bytes at `at`, which is even.
    fn store_u16(&mut self, at: usize, value: u16);
    /// One store to the eight bytes at `at`, a multiple of 8.
    fn store_u64(&mut self, at: usize, value: u64);
}

/// A region in this process's own memory, for tests.
#[derive(Clone, Debug)]
pub struct MemRegion(Vec<u8>);

impl MemRegion {
    /// All zero, which is a region never used.
    pub fn new(size: usize) -> Self {
        Self(vec![0; size])
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The bytes, as a front end can change them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn load<const N: usize>(&self, at: usize) -> [u8; N] {
        assert!(at.is_multiple_of(N), "accesses are aligned");
        *self.0[at..]
            .first_chunk()
            .expect("trackers stay inside the size they checked")
    }

    fn store(&mut self, at: usize, value: &[u8]) {
        assert!(at.is_multiple_of(value.len()), "accesses are aligned");
        self.0[at..at + value.len()].copy_from_slice(value);
    }
}

impl Region for MemRegion {
    fn size(&self) -> usize {
        self.0.len()
    }

    fn load_u8(&self, at: usize) -> u8 {
        self.0[at]
    }

    fn load_u16(&self, at: usize) -> u16 {
        u16::from_ne_bytes(self.load(at))
    }

    fn load_u64(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.load(at))
    }

    fn store_u8(&mut self, at: usize, value: u8) {
        self.0[at] = value;
    }

    fn store_u16(&mut self, at: usize, value: u16) {
        self.store(at, &value.to_ne_bytes());
    }

    fn store_u64(&mut self, at: usize, value: u64) {
        self.store(at, &value.to_ne_bytes());
    }
}
