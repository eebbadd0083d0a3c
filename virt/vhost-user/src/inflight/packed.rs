//! Packed virtqueues: `QueueRegionPacked`.

use std::mem::offset_of;
use std::sync::atomic::{Ordering, compiler_fence};

use super::layout::{PackedEntry, entry, head};
use super::{Region, State, TrackError};

/// A position in the descriptor ring, and the lap it belongs to (virtio 1.2 §2.8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedPosition {
    /// Index in the ring.
    pub idx: u16,
    /// The wrap counter there.
    pub wrap: bool,
}

impl PackedPosition {
    /// `count` descriptors further, at most once around (`count` ≤ `ring_size` ≤ 32768).
    #[must_use]
    pub const fn advanced(self, count: u16, ring_size: u16) -> Self {
        let idx = self.idx + count;
        if idx >= ring_size {
            Self {
                idx: idx - ring_size,
                wrap: !self.wrap,
            }
        } else {
            Self { idx, ..self }
        }
    }
}

/// Two sizes that are often the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedSizes {
    /// Entries of the region: the queue size of the inflight message.
    pub desc_num: u16,
    /// Entries of the ring as the driver set it up, at most `desc_num`.
    pub ring_size: u16,
}

/// A descriptor as the driver wrote it: the ring's own copy may be overwritten while it is in
/// flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedDesc {
    /// Buffer address.
    pub addr: u64,
    /// Buffer length, bytes.
    pub len: u32,
    /// Buffer id.
    pub id: u16,
    /// Flags.
    pub flags: u16,
}

/// A request in flight: the number of its first entry in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot(pub(super) u16);

impl Slot {
    /// From what [`index`](Self::index) answered. A number that names no request is refused where
    /// it is used.
    pub const fn new(index: u16) -> Self {
        Self(index)
    }

    /// Number of the entry, for callers that keep slots as numbers.
    pub const fn index(self) -> u16 {
        self.0
    }
}

/// A chain of entries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    pub state: State,
    pub last: u16,
    pub num: u16,
}

/// Tracks one packed ring.
#[derive(Debug)]
pub struct Packed<R> {
    pub(super) region: R,
    pub(super) ring_size: u16,
    /// Of each entry: the one behind it in its list. The last free one says `desc_num`.
    pub(super) next: Vec<u16>,
    /// Of each entry that is the head of a chain.
    pub(super) chains: Vec<Chain>,
    /// First free entry. `desc_num - in_flight` are free.
    pub(super) free_head: u16,
    /// Descriptors in flight, the batch's included; at most `ring_size`.
    pub(super) in_flight: u16,
    /// Position at which the batch is to be written.
    pub(super) used: PackedPosition,
    /// Heads returned since the last commit.
    pub(super) batch: Vec<u16>,
    /// Their descriptors.
    pub(super) batch_descs: u16,
    /// The batch is closed: [`Packed::advance`] was called.
    pub(super) is_closed: bool,
    /// The document's "global counter".
    pub(super) counter: u64,
}

impl<R: Region> Packed<R> {
    /// "When receiving available buffers": a chain, in the ring's order, was read. Called in the
    /// order of the ring and before the request is executed. An indirect table counts as the one
    /// descriptor that points to it.
    ///
    /// # Errors
    /// A chain without descriptors or with more than can be in flight beside the others; a batch
    /// that is open: the document's `old_free_head` is the head of one list only.
    pub fn begin(&mut self, descs: &[PackedDesc]) -> Result<Slot, TrackError> {
        if !self.batch.is_empty() {
            return Err(TrackError::BatchOpen);
        }
        let room = self.ring_size - self.in_flight;
        let num = u16::try_from(descs.len())
            .ok()
            .filter(|num| (1..=room).contains(num))
            .ok_or(TrackError::Chain {
                len: descs.len(),
                in_flight: self.in_flight,
                ring_size: self.ring_size,
            })?;
        let head = self.free_head;
        let region = &mut self.region;
        region.store_u16(entry!(PackedHead, PackedEntry[head].num), 0);
        region.store_u64(entry!(PackedHead, PackedEntry[head].counter), self.counter);
        self.counter = self.counter.wrapping_add(1);
        region.store_u8(entry!(PackedHead, PackedEntry[head].inflight), 1);
        let mut last = head;
        for (nth, desc) in (1..=num).zip(descs) {
            last = self.free_head;
            if nth == num {
                region.store_u16(entry!(PackedHead, PackedEntry[head].last), last);
            }
            region.store_u16(entry!(PackedHead, PackedEntry[head].num), nth);
            region.store_u64(entry!(PackedHead, PackedEntry[last].addr), desc.addr);
            region.store_u64(entry!(PackedHead, PackedEntry[last].id), desc.word());
            self.free_head = self.next[usize::from(last)];
            region.store_u16(head!(PackedHead.free_head), self.free_head);
        }
        // Until now the chain was still in the list at `old_free_head`: not taken.
        region.store_u16(head!(PackedHead.old_free_head), self.free_head);
        self.chains[usize::from(head)] = Chain {
            state: State::InFlight,
            last,
            num,
        };
        self.in_flight += num;
        Ok(Slot(head))
    }

    /// "When supplying used buffers", steps 1 to 4: adds a request to the batch. The ring is not
    /// written yet.
    ///
    /// # Errors
    /// A slot that is not in flight, or in the batch already; a batch that is closed.
    pub fn complete(&mut self, slot: Slot) -> Result<(), TrackError> {
        let Slot(head) = slot;
        if self.is_closed {
            return Err(TrackError::BatchOpen);
        }
        let chain = self
            .chains
            .get_mut(usize::from(head))
            .filter(|chain| chain.state == State::InFlight)
            .ok_or(TrackError::NotInFlight { head })?;
        chain.state = State::InBatch;
        self.next[usize::from(chain.last)] = self.free_head;
        self.region.store_u16(
            entry!(PackedHead, PackedEntry[chain.last].next),
            self.free_head,
        );
        self.free_head = head;
        self.region.store_u16(head!(PackedHead.free_head), head);
        self.batch_descs += chain.num;
        self.batch.push(head);
        Ok(())
    }

    /// Returns the position of the next used descriptor: the first of the batch, until it is
    /// committed.
    pub fn used(&self) -> PackedPosition {
        self.used
    }

    /// The next step: `used_idx` and `used_wrap_counter` go behind the batch, and the batch is
    /// closed.
    ///
    /// **Only then** the caller writes used descriptors, the first at [`used`](Self::used), each
    /// further one as many descriptors behind as the chain before it has; **the first one's flags
    /// last**, with release. What a successor can clean up is what lies between the two positions
    /// stored here.
    pub fn advance(&mut self) {
        if !self.batch.is_empty() {
            let to = self.used.advanced(self.batch_descs, self.ring_size);
            self.is_closed = true;
            self.region
                .store_u64(head!(PackedHead.used_idx), positions_word(to, self.used));
        }
        // The caller's stores to the ring, plain ones perhaps, stay behind the one above; the other
        // side is a successor's `recover`. Against SIGKILL the order of instructions is enough.
        compiler_fence(Ordering::SeqCst);
    }

    /// The last two steps: the batch is published, so it is forgotten. Without a closed batch it
    /// does nothing.
    pub fn commit(&mut self) {
        if !self.is_closed {
            return;
        }
        for head in self.batch.drain(..) {
            self.region
                .store_u8(entry!(PackedHead, PackedEntry[head].inflight), 0);
            self.chains[usize::from(head)].state = State::Free;
        }
        self.region
            .store_u16(head!(PackedHead.old_free_head), self.free_head);
        self.used = self.used.advanced(self.batch_descs, self.ring_size);
        self.region.store_u64(
            head!(PackedHead.used_idx),
            positions_word(self.used, self.used),
        );
        self.in_flight -= self.batch_descs;
        self.batch_descs = 0;
        self.is_closed = false;
    }

    /// Gives the region back as it is.
    pub fn into_region(self) -> R {
        self.region
    }
}

// `PackedDesc::word` is `id`, `flags` and `len` as they lie beside each other.
const _: () = {
    let id = offset_of!(PackedEntry, id);
    assert!(id.is_multiple_of(8));
    assert!(offset_of!(PackedEntry, flags) == id + 2);
    assert!(offset_of!(PackedEntry, len) == id + 4);
};

impl PackedDesc {
    fn word(self) -> u64 {
        let [a, b] = self.id.to_ne_bytes();
        let [c, d] = self.flags.to_ne_bytes();
        let [e, f, g, h] = self.len.to_ne_bytes();
        u64::from_ne_bytes([a, b, c, d, e, f, g, h])
    }

    pub(super) fn from_words(addr: u64, word: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
        Self {
            addr,
            len: u32::from_ne_bytes([e, f, g, h]),
            id: u16::from_ne_bytes([a, b]),
            flags: u16::from_ne_bytes([c, d]),
        }
    }
}

// `positions_word` is the two positions as they lie beside each other, with two bytes of padding.
const _: () = {
    let used_idx = head!(PackedHead.used_idx);
    assert!(used_idx.is_multiple_of(8));
    assert!(head!(PackedHead.old_used_idx) == used_idx + 2);
    assert!(head!(PackedHead.used_wrap_counter) == used_idx + 4);
    assert!(head!(PackedHead.old_used_wrap_counter) == used_idx + 5);
    assert!(head!(PackedHead.padding) == used_idx + 6);
};

/// `used_idx`, `old_used_idx` and their wrap counters in one store, so that a death finds all or
/// none.
pub(super) fn positions_word(used: PackedPosition, old: PackedPosition) -> u64 {
    let [a, b] = used.idx.to_ne_bytes();
    let [c, d] = old.idx.to_ne_bytes();
    u64::from_ne_bytes([a, b, c, d, used.wrap.into(), old.wrap.into(), 0, 0])
}

/// The two positions of such a word, unchecked.
pub(super) fn positions(word: u64) -> (PackedPosition, PackedPosition) {
    let [a, b, c, d, used, old, _, _] = word.to_ne_bytes();
    let position = |idx, wrap: u8| PackedPosition {
        idx: u16::from_ne_bytes(idx),
        wrap: wrap != 0,
    };
    (position([a, b], used), position([c, d], old))
}
