//! `QueueRegionSplit` and `QueueRegionPacked`: machine byte order, natural alignment.
//!
//! The types give offsets and sizes; the region itself is only accessed word by word.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{RecoverError, Region};
use crate::backend::{MAX_QUEUES, MAX_RING_SIZE, RingLayout};

/// Bytes to which a queue's part is aligned. The document does not say; QEMU's libvhost-user and
/// DPDK both define `INFLIGHT_ALIGNMENT` as 64, and regions pass between back ends.
pub const ALIGN: usize = 64;

/// The document's "version of this region". 0 is one that was never used.
pub const VERSION: u16 = 1;

/// `QueueRegionSplit` without its array.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct SplitHead {
    pub features: u64,
    pub version: u16,
    pub desc_num: u16,
    pub last_batch_head: u16,
    pub used_idx: u16,
}
const _: () = assert!(size_of::<SplitHead>() == 16);

/// `DescStateSplit`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct SplitDesc {
    pub inflight: u8,
    pub padding: [u8; 5],
    pub next: u16,
    pub counter: u64,
}
const _: () = assert!(size_of::<SplitDesc>() == 16);

/// `QueueRegionPacked` without its array, with the three bytes that C adds before it.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct PackedHead {
    pub features: u64,
    pub version: u16,
    pub desc_num: u16,
    pub free_head: u16,
    pub old_free_head: u16,
    pub used_idx: u16,
    pub old_used_idx: u16,
    pub used_wrap_counter: u8,
    pub old_used_wrap_counter: u8,
    pub padding: [u8; 7],
    pub tail: [u8; 3],
}
const _: () = assert!(size_of::<PackedHead>() == 32);

/// `DescStatePacked`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct PackedEntry {
    pub inflight: u8,
    pub padding: u8,
    pub next: u16,
    pub last: u16,
    pub num: u16,
    pub counter: u64,
    pub id: u16,
    pub flags: u16,
    pub len: u32,
    pub addr: u64,
}
const _: () = assert!(size_of::<PackedEntry>() == 32);

/// Offset of a field of the head of either layout.
macro_rules! head {
    ($layout:ident . $field:ident) => {
        std::mem::offset_of!($crate::inflight::layout::$layout, $field)
    };
}

/// Offset of a field of the entry `$index` of `SplitDesc`s or `PackedEntry`s.
macro_rules! entry {
    ($head:ident, $entry:ident [$index:expr] . $field:ident) => {
        size_of::<$crate::inflight::layout::$head>()
            + usize::from($index) * size_of::<$crate::inflight::layout::$entry>()
            + std::mem::offset_of!($crate::inflight::layout::$entry, $field)
    };
}
pub(super) use {entry, head};

// The first three fields are the same in both.
const _: () = assert!(head!(SplitHead.version) == head!(PackedHead.version));
const _: () = assert!(head!(SplitHead.desc_num) == head!(PackedHead.desc_num));

/// Bytes of one queue's part, a multiple of [`ALIGN`]: queue `n`'s begins at `n` times this.
///
/// libvhost-user adds 2 bytes to its split array before it rounds up, the remains of a smaller
/// head; with the 16 that the head has now, the sum rounds to the same for every size.
pub const fn queue_region_len(layout: RingLayout, desc_num: u16) -> usize {
    let (head, entry) = match layout {
        RingLayout::Split => (size_of::<SplitHead>(), size_of::<SplitDesc>()),
        RingLayout::Packed => (size_of::<PackedHead>(), size_of::<PackedEntry>()),
    };
    (head + entry * desc_num as usize).next_multiple_of(ALIGN)
}

/// Bytes of a region for `queues` rings, `mmap_size` in the reply to GET_INFLIGHT_FD; at most about
/// 256 MiB (256 rings × 32768 entries × 32 bytes). `None` if there are no rings or entries, or more
/// than the session accepts.
pub fn region_len(layout: RingLayout, queues: u16, desc_num: u16) -> Option<u64> {
    let is_valid = (1..=MAX_QUEUES).contains(&queues) && (1..=MAX_RING_SIZE).contains(&desc_num);
    is_valid.then(|| u64::from(queues) * queue_region_len(layout, desc_num) as u64)
}

/// Checks that sizes fit, and the region's own header. Returns `true` if it was never used.
pub(super) fn check_head(
    region: &impl Region,
    layout: RingLayout,
    ring_size: u16,
    desc_num: u16,
) -> Result<bool, RecoverError> {
    if ring_size == 0 || ring_size > desc_num || desc_num > MAX_RING_SIZE {
        return Err(RecoverError::Size {
            ring_size,
            desc_num,
        });
    }
    let (size, needed) = (region.size(), queue_region_len(layout, desc_num));
    if size < needed {
        return Err(RecoverError::TooSmall { size, needed });
    }
    match region.load_u16(head!(SplitHead.version)) {
        0 => return Ok(true),
        VERSION => {}
        other => return Err(RecoverError::corrupt("version", other)),
    }
    let features = region.load_u64(head!(SplitHead.features));
    if features != 0 {
        return Err(RecoverError::corrupt("features", features));
    }
    let found = region.load_u16(head!(SplitHead.desc_num));
    if found != desc_num {
        return Err(RecoverError::corrupt("desc_num", found));
    }
    Ok(false)
}
