//! The driver's side of virtqueues (virtio 1.2 §2.7 split, §2.8 packed).
//!
//! A request is a list of [`Segment`]s under a token of the caller's; [`Ring::add`] puts it into
//! the ring, [`Ring::publish`] makes it available and tells whether the device wants a kick,
//! [`Ring::pop`] gives tokens back. *Calls* (interrupts) are off until [`Ring::arm`] asks for one;
//! while they are off and EVENT_IDX is negotiated, the event index is kept behind the device, so
//! that a polling driver takes none at all.
//!
//! The device's writes are checked: an index or identifier that makes no sense is a [`RingError`],
//! not a panic, so that a broken server is reported as such.
//!
//! **Left out:** indirect chains inside direct ones, and resizing.

mod packed;
mod split;

use std::collections::VecDeque;

use crate::memory::Memory;

pub use packed::Packed;
pub use split::Split;

/// Virtio feature bits of rings, as masks: VIRTIO_F_EVENT_IDX and so on.
pub mod feature {
    pub use vio::feature::{
        EVENT_IDX, IN_ORDER, INDIRECT_DESC as INDIRECT, RING_PACKED as PACKED, VERSION_1,
    };
}

/// VIRTQ_DESC_F_NEXT: the chain goes on.
const NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE: the device writes.
const WRITE: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT: a table of descriptors.
const INDIRECT: u16 = 4;

/// A piece of a request in guest memory.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Guest-physical address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Whether the device writes it; such segments come last.
    pub is_writable: bool,
}

/// Place of an indirect table for one request.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// Offset in the memory.
    pub offset: usize,
    /// Guest-physical address of the same place.
    pub addr: u64,
}

/// A request that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The caller's token.
    pub token: u16,
    /// Bytes the device says it wrote; 0 where it said it for a whole batch (IN_ORDER).
    pub len: u32,
}

/// Violation of the specification by a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A used element names nothing that is outstanding.
    #[error("the device used {id}, which is not outstanding")]
    NotOutstanding {
        /// The head or buffer identifier.
        id: u32,
    },
    /// The used index ran past what was made available.
    #[error("the device says {used} requests are used of {outstanding} outstanding")]
    TooManyUsed {
        /// Number by the device's index.
        used: u16,
        /// Number by our count.
        outstanding: u16,
    },
}

/// Starts of a ring's three areas, as offsets in the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// Descriptor table or ring.
    pub desc: usize,
    /// Available ring, or driver event suppression.
    pub driver: usize,
    /// Used ring, or device event suppression.
    pub device: usize,
}

/// Requests outstanding by their head or identifier, and the order they were made available in.
#[derive(Debug)]
struct Outstanding {
    /// Descriptors of the request; 0: none under this identifier.
    len: Vec<u16>,
    token: Vec<u16>,
    /// With IN_ORDER: identifiers, oldest first.
    order: Option<VecDeque<u16>>,
    /// With IN_ORDER: the last request of the batch the device returned by one element.
    batch_end: Option<u16>,
    count: u16,
}

impl Outstanding {
    fn new(size: u16, in_order: bool) -> Self {
        Self {
            len: vec![0; size.into()],
            token: vec![0; size.into()],
            order: in_order.then(|| VecDeque::with_capacity(size.into())),
            batch_end: None,
            count: 0,
        }
    }

    #[inline]
    fn begin(&mut self, id: u16, len: u16, token: u16) {
        self.len[usize::from(id)] = len;
        self.token[usize::from(id)] = token;
        self.count += 1;
        if let Some(order) = &mut self.order {
            order.push_back(id);
        }
    }

    /// Checks an identifier the device named.
    #[inline]
    fn check(&self, id: u32) -> Result<u16, RingError> {
        let is_outstanding = self.len.get(id as usize).is_some_and(|&len| len != 0);
        match u16::try_from(id) {
            Ok(id) if is_outstanding => Ok(id),
            _ => Err(RingError::NotOutstanding { id }),
        }
    }

    /// Ends a request: its token and its descriptors.
    #[inline]
    fn end(&mut self, id: u16) -> (u16, u16) {
        let len = std::mem::take(&mut self.len[usize::from(id)]);
        self.count -= 1;
        (self.token[usize::from(id)], len)
    }

    /// The request to end now that the device named `id`, and whether it is that one. With IN_ORDER
    /// it is the oldest: everything up to `id` came back.
    #[inline]
    fn first_up_to(&mut self, id: u16) -> (u16, bool) {
        let Some(order) = &mut self.order else {
            return (id, true);
        };
        let oldest = order.pop_front();
        let oldest = oldest.expect("`id` is outstanding, so it is in the order");
        let is_named = oldest == id;
        self.batch_end = (!is_named).then_some(id);
        (oldest, is_named)
    }
}

/// Either kind.
#[derive(Debug)]
#[expect(missing_docs, reason = "the variants are the types of the same name")]
pub enum Ring {
    Split(Split),
    Packed(Packed),
}

macro_rules! each {
    ($self:ident, $ring:ident => $body:expr) => {
        match $self {
            Ring::Split($ring) => $body,
            Ring::Packed($ring) => $body,
        }
    };
}

impl Ring {
    /// A fresh ring of `size` entries under these features; its areas are zeroed by the caller.
    pub fn new(size: u16, places: Places, features: u64) -> Self {
        match features & feature::PACKED {
            0 => Self::Split(Split::new(size, places, features)),
            _ => Self::Packed(Packed::new(size, places, features)),
        }
    }

    /// Bytes of the three areas: descriptors, driver's, device's.
    pub const fn area_lens(size: u16, is_packed: bool) -> [usize; 3] {
        let size = size as usize;
        match is_packed {
            true => [16 * size, 4, 4],
            false => [16 * size, 6 + 2 * size, 6 + 8 * size],
        }
    }

    /// Puts a request into the ring; `false` where it has no room. With `table`, as one indirect
    /// descriptor.
    #[inline]
    pub fn add(
        &mut self,
        memory: &Memory,
        token: u16,
        segments: &[Segment],
        table: Option<Table>,
    ) -> bool {
        each!(self, ring => ring.add(memory, token, segments, table))
    }

    /// Makes what was added available. Whether the device wants a kick.
    #[inline]
    pub fn publish(&mut self, memory: &Memory) -> bool {
        each!(self, ring => ring.publish(memory))
    }

    /// The next request that came back.
    ///
    /// # Errors
    /// The device broke the protocol; the ring is of no further use.
    #[inline]
    pub fn pop(&mut self, memory: &Memory) -> Result<Option<Used>, RingError> {
        each!(self, ring => {
            let (id, len) = if let Some(id) = ring.outstanding.batch_end {
                (id, 0)
            } else if ring.has_used(memory) {
                let (id, len) = ring.used_element(memory)?;
                (ring.outstanding.check(id)?, len)
            } else {
                return Ok(None);
            };
            let (id, is_named) = ring.outstanding.first_up_to(id);
            let token = ring.end(id);
            Ok(Some(Used { token, len: if is_named { len } else { 0 } }))
        })
    }

    /// Whether something came back that was not popped.
    #[inline]
    pub fn has_used(&mut self, memory: &Memory) -> bool {
        each!(self, ring => ring.has_used(memory))
    }

    /// Asks for a call at the next use. `false`: something came back already, and none may come for
    /// it.
    #[inline]
    pub fn arm(&mut self, memory: &Memory) -> bool {
        each!(self, ring => ring.arm(memory))
    }

    /// Asks for no more calls.
    #[inline]
    pub fn disarm(&mut self, memory: &Memory) {
        each!(self, ring => ring.disarm(memory));
    }

    /// Requests added and not popped.
    pub fn outstanding(&self) -> u16 {
        each!(self, ring => ring.outstanding.count)
    }

    /// SET_VRING_BASE's number for a device that takes this ring over with its requests in flight:
    /// the used position (a split ring's in memory, where a killed device left it).
    pub fn base(&self, memory: &Memory) -> u32 {
        match self {
            Self::Split(ring) => ring.used_idx(memory).into(),
            Self::Packed(ring) => ring.base(),
        }
    }

    /// SET_VRING_BASE's number for a device that takes over a ring with nothing in flight, to
    /// compare with GET_VRING_BASE's.
    pub fn available_base(&self) -> u32 {
        match self {
            Self::Split(ring) => ring.avail_idx().into(),
            Self::Packed(ring) => ring.available_base(),
        }
    }
}

/// Whether an event index lies in what was added: vring_need_event of virtio 1.2 §2.7.7.1.
#[inline]
const fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Writes one 16-byte descriptor of a split ring or an indirect table, unless it is there already:
/// a line that both sides only read stays in both caches.
#[inline]
fn write_desc(memory: &Memory, offset: usize, addr: u64, len: u32, high: u32) {
    use std::sync::atomic::Ordering::Relaxed;
    let rest = u64::from(len) | u64::from(high) << 32;
    for (offset, word) in [(offset, addr), (offset + 8, rest)] {
        if memory.load_u64(offset, Relaxed) != word {
            memory.store_u64(offset, word, Relaxed);
        }
    }
}

const fn segment_flags(segment: Segment) -> u16 {
    if segment.is_writable { WRITE } else { 0 }
}
