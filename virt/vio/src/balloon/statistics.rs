//! The guest's memory statistics (virtio 1.2 §5.5.6.3, §5.5.6.4).

/// `struct virtio_balloon_stat`: a tag in 16 bits and a value in 64, without padding between them.
/// (The requirement that a buffer's size be a multiple of 6 is a mistake of the specification.)
pub(super) const ENTRY: usize = 10;
/// Entries that are looked at. The specification has ten tags, Linux six more; the rest of a longer
/// buffer is ignored.
pub(super) const MAX_ENTRIES: usize = 64;

/// VIRTIO_BALLOON_S_*.
mod tag {
    pub(super) const SWAP_IN: u16 = 0;
    pub(super) const SWAP_OUT: u16 = 1;
    pub(super) const MAJFLT: u16 = 2;
    pub(super) const MINFLT: u16 = 3;
    pub(super) const MEMFREE: u16 = 4;
    pub(super) const MEMTOT: u16 = 5;
    pub(super) const AVAIL: u16 = 6;
    pub(super) const CACHES: u16 = 7;
    pub(super) const HTLB_PGALLOC: u16 = 8;
    pub(super) const HTLB_PGFAIL: u16 = 9;
}

/// Memory statistics as a guest reports them: nothing of them is checked, and the driver may omit
/// any figure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Time at which they were read, on the clock of visits, in nanoseconds.
    pub read_at_ns: u64,
    /// Bytes swapped in since the guest booted.
    pub swap_in: Option<u64>,
    /// Bytes swapped out.
    pub swap_out: Option<u64>,
    /// Page faults that had to wait for a disk.
    pub major_faults: Option<u64>,
    /// Other page faults.
    pub minor_faults: Option<u64>,
    /// Bytes used for nothing.
    pub free: Option<u64>,
    /// Bytes there are.
    pub total: Option<u64>,
    /// Bytes that new programs could have before the guest swaps, as it estimates.
    pub available: Option<u64>,
    /// Bytes that can be reclaimed without I/O.
    pub caches: Option<u64>,
    /// Huge pages allocated.
    pub hugetlb_allocations: Option<u64>,
    /// Huge pages that could not be.
    pub hugetlb_failures: Option<u64>,
}

impl Statistics {
    /// The entries in `bytes`, in any order: unknown tags are ignored, as is a rest that is no
    /// entry; of two with one tag the later counts.
    pub(super) fn parse(bytes: &[u8], read_at_ns: u64) -> Self {
        let mut all = Self {
            read_at_ns,
            ..Self::default()
        };
        let (entries, _) = bytes.as_chunks::<ENTRY>();
        for entry in entries {
            let [t0, t1, value @ ..] = *entry;
            let field = match u16::from_le_bytes([t0, t1]) {
                tag::SWAP_IN => &mut all.swap_in,
                tag::SWAP_OUT => &mut all.swap_out,
                tag::MAJFLT => &mut all.major_faults,
                tag::MINFLT => &mut all.minor_faults,
                tag::MEMFREE => &mut all.free,
                tag::MEMTOT => &mut all.total,
                tag::AVAIL => &mut all.available,
                tag::CACHES => &mut all.caches,
                tag::HTLB_PGALLOC => &mut all.hugetlb_allocations,
                tag::HTLB_PGFAIL => &mut all.hugetlb_failures,
                _ => continue,
            };
            *field = Some(u64::from_le_bytes(value));
        }
        all
    }
}
