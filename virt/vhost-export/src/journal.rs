//! The inflight region as the journal of one ring: the record that a successor needs if this
//! process is killed.

use std::sync::Arc;

use guest_mem::SharedFile;
use vhost_user::backend::{Refusal, RingConfig, RingLayout};
use vhost_user::chain;
use vhost_user::inflight::{
    Packed, PackedDesc, PackedPosition, PackedRing, PackedSizes, Region, Slot, Split,
    queue_region_len,
};
use vhost_user::wire::Inflight;
use vio::ring::chain::RawDescriptor;
use vio::ring::{Journal, JournalError, RingStart};

/// The region of all queues.
pub(crate) struct InflightRegion {
    file: Arc<SharedFile>,
    shape: Inflight,
}

impl InflightRegion {
    /// Over a file that was made, or that came from the front end.
    pub(crate) fn new(file: SharedFile, shape: Inflight) -> Self {
        Self {
            file: Arc::new(file),
            shape,
        }
    }

    /// The piece of queue `index`, in the layout of the ring that starts: features may have changed
    /// since.
    fn part(&self, index: u16, layout: RingLayout) -> Result<Part, Refusal> {
        let len = queue_region_len(layout, self.shape.queue_size);
        let base = usize::from(index) * len;
        if index >= self.shape.queues || base + len > self.file.len() {
            return Err(Refusal(format!(
                "queue {index} has no place in an inflight region of {} queues and {} bytes",
                self.shape.queues,
                self.file.len()
            )));
        }
        Ok(Part {
            file: Arc::clone(&self.file),
            base,
            len,
        })
    }

    /// Takes over the ring's part, from a predecessor or fresh. `used_idx` is the used ring's index
    /// now (split); `ring` is the descriptor ring (packed).
    pub(crate) fn recover(
        &self,
        config: &RingConfig,
        used_idx: u16,
        fresh: PackedPosition,
        ring: &mut impl PackedRing,
    ) -> Result<(Box<dyn Journal>, RingStart), Refusal> {
        let part = self.part(config.index.into(), config.layout)?;
        let desc_num = self.shape.queue_size;
        if config.size > desc_num {
            // Some of its requests could not be recorded.
            return Err(Refusal(format!(
                "ring {} of {} entries has an inflight region for {desc_num}",
                config.index, config.size
            )));
        }
        let refuse = |error: &dyn std::error::Error| {
            Refusal(format!(
                "ring {} cannot be taken over: {}",
                config.index,
                chain(error)
            ))
        };
        match config.layout {
            RingLayout::Split => {
                let (split, left) =
                    Split::recover(part, desc_num, used_idx).map_err(|error| refuse(&error))?;
                let start = RingStart::Split {
                    next_avail: left.next_avail,
                    next_used: used_idx,
                    replay: left.heads,
                };
                Ok((Box::new(SplitJournal(split)), start))
            }
            RingLayout::Packed => {
                let sizes = PackedSizes {
                    desc_num,
                    ring_size: config.size,
                };
                let (packed, left) =
                    Packed::recover(part, sizes, fresh, ring).map_err(|error| refuse(&error))?;
                let mut slots = vec![None; desc_num.into()];
                let replay = (0..)
                    .zip(left.requests)
                    .map(|(number, request)| {
                        if let Some(slot) = slots.get_mut(usize::from(number)) {
                            *slot = Some(request.slot);
                        }
                        let descs = request.descs.iter().map(from_journal).collect();
                        (number, descs)
                    })
                    .collect();
                let start = RingStart::Packed {
                    avail: (left.avail.idx, left.avail.wrap),
                    used: (left.used.idx, left.used.wrap),
                    replay,
                };
                Ok((Box::new(PackedJournal::new(packed, slots)), start))
            }
        }
    }
}

/// One queue's part of the region.
#[derive(Debug)]
pub(crate) struct Part {
    file: Arc<SharedFile>,
    base: usize,
    len: usize,
}

impl Region for Part {
    fn size(&self) -> usize {
        self.len
    }

    fn load_u8(&self, at: usize) -> u8 {
        self.file.load_u8(self.base + at)
    }

    fn load_u16(&self, at: usize) -> u16 {
        self.file.load_u16(self.base + at)
    }

    fn load_u64(&self, at: usize) -> u64 {
        self.file.load_u64(self.base + at)
    }

    fn store_u8(&mut self, at: usize, value: u8) {
        self.file.store_u8(self.base + at, value);
    }

    fn store_u16(&mut self, at: usize, value: u16) {
        self.file.store_u16(self.base + at, value);
    }

    fn store_u64(&mut self, at: usize, value: u64) {
        self.file.store_u64(self.base + at, value);
    }
}

struct SplitJournal(Split<Part>);

impl Journal for SplitJournal {
    fn begin(&mut self, head: u16, _descs: &[RawDescriptor]) -> Result<u16, JournalError> {
        self.0.begin(head).map_err(|_| JournalError)?;
        Ok(head)
    }

    fn complete(&mut self, head: u16, _slot: u16) {
        self.0
            .complete(head)
            .expect("a request is returned once, and was begun");
    }

    // The used index is compared with the region's own.
    fn advance(&mut self) {}

    fn commit(&mut self) {
        self.0.commit();
    }
}

struct PackedJournal {
    packed: Packed<Part>,
    /// Slots of the region, by the number that the ring knows them by.
    slots: Vec<Option<Slot>>,
    free: Vec<u16>,
    descs: Vec<PackedDesc>,
}

impl PackedJournal {
    fn new(packed: Packed<Part>, slots: Vec<Option<Slot>>) -> Self {
        let free = (0..)
            .zip(&slots)
            .filter(|(_, slot)| slot.is_none())
            .map(|(number, _): (u16, _)| number)
            .collect();
        Self {
            packed,
            slots,
            free,
            descs: Vec::new(),
        }
    }
}

impl Journal for PackedJournal {
    fn begin(&mut self, _head: u16, descs: &[RawDescriptor]) -> Result<u16, JournalError> {
        let number = *self.free.last().ok_or(JournalError)?;
        self.descs.clear();
        self.descs.extend(descs.iter().map(to_journal));
        let slot = self.packed.begin(&self.descs).map_err(|_| JournalError)?;
        self.free.pop();
        self.slots[usize::from(number)] = Some(slot);
        Ok(number)
    }

    fn complete(&mut self, _head: u16, number: u16) {
        let slot = self.slots[usize::from(number)]
            .take()
            .expect("a request is returned once, and was begun");
        self.free.push(number);
        self.packed
            .complete(slot)
            .expect("the region's own slot, in flight");
    }

    fn advance(&mut self) {
        self.packed.advance();
    }

    fn commit(&mut self) {
        self.packed.commit();
    }
}

/// The ring keeps a packed descriptor's buffer id where a split one has `next`.
fn to_journal(desc: &RawDescriptor) -> PackedDesc {
    PackedDesc {
        addr: desc.addr,
        len: desc.len,
        id: desc.next,
        flags: desc.flags,
    }
}

fn from_journal(desc: &PackedDesc) -> RawDescriptor {
    RawDescriptor {
        addr: desc.addr,
        len: desc.len,
        flags: desc.flags,
        next: desc.id,
    }
}
