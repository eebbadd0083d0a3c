//! A guest's virtqueue driver for tests: builds split rings in guest memory, as Linux would or in
//! ways that the specification forbids; packed rings ([`FakePacked`]); or either ([`AnyDriver`]).
//!
//! It acts as the guest, so it accesses memory directly ([`PhysMem`]), and names buffers by the
//! addresses that the device uses. The test chooses where its rings are. With an IOMMU in between,
//! the test sets the distance between guest-physical addresses and those of the device
//! ([`FakeDriver::set_iova_offset`]).
//!
//! It has its own copy of the specification's constants and layouts, so that unit tests of `vio`
//! can use it: a dependency on `vio` would link a second instance of that crate into them. The
//! types of a device replace [`Rings`] and [`Descriptor`] by `From`. Of `virtqueue` it uses only
//! types, no code.
#![forbid(unsafe_code)]

mod any;
mod layout;
mod packed;

use std::collections::VecDeque;
use std::marker::PhantomData;

use guest_mem::{Access, Gpa, Iova, PhysMem};

pub use any::AnyDriver;
pub use layout::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Descriptor, EVENT_IDX, IN_ORDER, Position,
    RING_PACKED, Rings,
};
pub use packed::FakePacked;

/// A buffer: device address and length in bytes.
pub type Buffer = (u64, u32);

/// Returns the result of an access that must succeed: tests use addresses in RAM only.
#[track_caller]
fn ready<T>(access: Access<T>) -> T {
    access.expect("the test stays in RAM")
}

/// The driver's side of one queue.
pub struct FakeDriver<M, Q = Rings> {
    mem: M,
    index: u16,
    size: u16,
    base: u64,
    iova_offset: u64,
    free: Vec<u16>,
    /// Descriptors of the chain that starts at each head.
    chains: Vec<Vec<u16>>,
    next_avail: u16,
    published: u16,
    last_used: u16,
    event_idx: bool,
    /// With VIRTIO_F_IN_ORDER: heads in the order in which they were made available, with their
    /// writable bytes.
    queue: Option<VecDeque<(u16, u32)>>,
    /// Completions reported by a used element for a whole batch, not yet taken by the test.
    batch: VecDeque<(u16, u32)>,
    /// Type that describes its rings to the device.
    rings: PhantomData<fn() -> Q>,
}

impl<M: PhysMem, Q: From<Rings>> FakeDriver<M, Q> {
    /// Creates a queue whose table and rings start at `base`, which is page-aligned, and take
    /// [`footprint`](Self::footprint) bytes. The memory is zeroed.
    pub fn new(mem: M, base: Gpa, index: u16, size: u16) -> Self {
        let driver = Self {
            mem,
            index,
            size,
            base: base.raw(),
            iova_offset: 0,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); usize::from(size)],
            next_avail: 0,
            published: 0,
            last_used: 0,
            event_idx: true,
            queue: None,
            batch: VecDeque::new(),
            rings: PhantomData,
        };
        driver.put(driver.base, &vec![0; Self::footprint(size) as usize]);
        driver
    }

    /// Returns the bytes of memory of a queue of `size` entries.
    pub fn footprint(size: u16) -> u64 {
        Self::used_offset(size) + 6 + 8 * u64::from(size)
    }

    fn avail_offset(size: u16) -> u64 {
        16 * u64::from(size)
    }

    fn used_offset(size: u16) -> u64 {
        (Self::avail_offset(size) + 6 + 2 * u64::from(size)).next_multiple_of(4)
    }

    /// Places the device's addresses of this driver's structures `offset` bytes above the
    /// guest-physical ones.
    pub fn set_iova_offset(&mut self, offset: u64) {
        self.iova_offset = offset;
    }

    /// Selects VIRTIO_F_IN_ORDER: a used element may complete several chains.
    pub fn set_in_order(&mut self) {
        self.queue = Some(VecDeque::new());
    }

    /// Sets both indices to `idx`, with everything used. To be called before the first chain.
    pub fn start_at(&mut self, idx: u16) {
        self.next_avail = idx;
        self.published = idx;
        self.last_used = idx;
        self.put_avail_idx(idx);
        let at = self.base + Self::used_offset(self.size) + 2;
        self.put(at, &idx.to_le_bytes());
        self.put_used_event(idx.wrapping_sub(1));
    }

    /// Selects operation without VIRTIO_F_EVENT_IDX.
    pub fn set_flags_only(&mut self) {
        self.event_idx = false;
    }

    /// Returns the queue's description, as the transport hands it to the device.
    pub fn config(&self) -> Q {
        let at = |offset| Iova::new(self.base + self.iova_offset + offset);
        Q::from(Rings {
            index: self.index,
            size: self.size,
            desc: at(0),
            avail: at(Self::avail_offset(self.size)),
            used: at(Self::used_offset(self.size)),
        })
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns the guest memory.
    pub fn mem(&self) -> &M {
        &self.mem
    }

    /// Writes guest memory; panics outside RAM.
    pub fn put(&self, gpa: u64, bytes: &[u8]) {
        self.mem
            .write(Gpa::new(gpa), bytes)
            .expect("the test stays in RAM");
    }

    /// Reads guest memory; panics outside RAM.
    pub fn get(&self, gpa: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem
            .read(Gpa::new(gpa), &mut bytes)
            .expect("the test stays in RAM");
        bytes
    }

    /// Loads an aligned u16 that the device may be storing, in one access: a copy of two bytes
    /// could tear.
    fn get_u16(&self, gpa: u64) -> u16 {
        let word = self
            .mem
            .read_u64(Gpa::new(gpa & !7))
            .expect("the test stays in RAM");
        (word >> (8 * (gpa & 7))) as u16
    }

    /// Writes descriptor `index`, without any check.
    pub fn put_descriptor(&self, index: u16, desc: impl Into<Descriptor>) {
        self.put(self.base + 16 * u64::from(index), &desc.into().to_bytes());
    }

    /// Writes available entry `slot`.
    pub fn put_avail(&self, slot: u16, head: u16) {
        let at = self.base + Self::avail_offset(self.size) + 4 + 2 * u64::from(slot % self.size);
        self.put(at, &head.to_le_bytes());
    }

    /// Stores the available index, in one store with the flags before it: a device that runs on
    /// another thread must not see half of it.
    pub fn put_avail_idx(&self, idx: u16) {
        let at = self.base + Self::avail_offset(self.size);
        let flags = self.get_u16(at);
        self.mem
            .store_u32_release(Gpa::new(at), u32::from(idx) << 16 | u32::from(flags))
            .expect("the test stays in RAM");
    }

    /// Stores the available flags (1: no interrupts, without EVENT_IDX).
    pub fn put_avail_flags(&self, flags: u16) {
        self.put(
            self.base + Self::avail_offset(self.size),
            &flags.to_le_bytes(),
        );
    }

    /// Stores `used_event`: the used index after which an interrupt is wanted.
    pub fn put_used_event(&self, event: u16) {
        let at = self.base + Self::avail_offset(self.size) + 4 + 2 * u64::from(self.size);
        self.put(at, &event.to_le_bytes());
    }

    /// Loads `avail_event`.
    pub fn avail_event(&self) -> u16 {
        self.get_u16(self.base + Self::used_offset(self.size) + 4 + 8 * u64::from(self.size))
    }

    /// Loads the used flags (1: no doorbells, without EVENT_IDX).
    pub fn used_flags(&self) -> u16 {
        self.get_u16(self.base + Self::used_offset(self.size))
    }

    /// Loads the used index.
    pub fn used_idx(&self) -> u16 {
        self.get_u16(self.base + Self::used_offset(self.size) + 2)
    }

    /// The available index as published last.
    pub fn avail_idx(&self) -> u16 {
        self.next_avail
    }

    /// Returns the number of descriptors that are not in a chain.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Adds a chain of these buffers and publishes it. Returns its head. Panics if the table is
    /// full.
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer]) -> u16 {
        let head = self.stage(readable, writable);
        self.publish();
        head
    }

    /// Adds a chain as [`add`](Self::add) does, without publishing it.
    pub fn stage(&mut self, readable: &[Buffer], writable: &[Buffer]) -> u16 {
        let count = readable.len() + writable.len();
        let indices: Vec<u16> = (0..count)
            .map(|_| self.free.pop().expect("a free descriptor"))
            .collect();
        for (at, desc) in chain(readable, writable, |at| indices[at]).enumerate() {
            self.put_descriptor(indices[at], desc);
        }
        self.link(indices, writable)
    }

    /// Like [`stage`](Self::stage), with the descriptors in an indirect table at `table`.
    pub fn stage_indirect(&mut self, table: Gpa, readable: &[Buffer], writable: &[Buffer]) -> u16 {
        let mut count = 0u32;
        for (at, desc) in chain(readable, writable, |at| at as u16).enumerate() {
            self.put(table.raw() + 16 * at as u64, &desc.to_bytes());
            count += 1;
        }
        let index = self.free.pop().expect("a free descriptor");
        let desc = Descriptor {
            addr: table.raw() + self.iova_offset,
            len: 16 * count,
            flags: DESC_F_INDIRECT,
            next: 0,
        };
        self.put_descriptor(index, desc);
        self.link(vec![index], writable)
    }

    fn link(&mut self, indices: Vec<u16>, writable: &[Buffer]) -> u16 {
        let head = indices[0];
        if let Some(queue) = &mut self.queue {
            queue.push_back((head, writable.iter().map(|(_, len)| len).sum()));
        }
        self.chains[usize::from(head)] = indices;
        self.put_avail(self.next_avail, head);
        self.next_avail = self.next_avail.wrapping_add(1);
        head
    }

    /// Publishes all chains that were added.
    pub fn publish(&self) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.put_avail_idx(self.next_avail);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Publishes as [`publish`](Self::publish) does. Returns whether the device wants a
    /// notification for the new chains (§2.7.10).
    pub fn publish_and_ask(&mut self) -> bool {
        let old = std::mem::replace(&mut self.published, self.next_avail);
        self.publish();
        if !self.event_idx {
            return self.used_flags() == 0;
        }
        let past = self.next_avail.wrapping_sub(self.avail_event());
        past.wrapping_sub(1) < self.next_avail.wrapping_sub(old)
    }

    /// Takes the next completion: head and bytes written.
    pub fn used(&mut self) -> Option<(u16, u32)> {
        if let Some(told) = self.batch.pop_front() {
            return Some(told);
        }
        if self.used_idx() == self.last_used {
            return None;
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let slot = u64::from(self.last_used % self.size);
        let at = self.base + Self::used_offset(self.size) + 4 + 8 * slot;
        let element = self.get(at, 8);
        let id = u32::from_le_bytes(element[..4].try_into().expect("four bytes"));
        let len = u32::from_le_bytes(element[4..].try_into().expect("four bytes"));
        let head = u16::try_from(id).expect("a used id is a head");
        if let Some(mut queue) = self.queue.take() {
            loop {
                let (next, writable) = queue.pop_front().expect("a used head is in flight");
                self.give_back(next);
                let is_last = next == head;
                self.batch
                    .push_back((next, if is_last { len } else { writable }));
                if is_last {
                    break;
                }
            }
            self.queue = Some(queue);
            return self.batch.pop_front();
        }
        self.give_back(head);
        Some((head, len))
    }

    /// Frees the descriptors of a chain and advances the used index.
    fn give_back(&mut self, head: u16) {
        self.last_used = self.last_used.wrapping_add(1);
        let chain = std::mem::take(&mut self.chains[usize::from(head)]);
        assert!(
            !chain.is_empty(),
            "the device used chain {head}, which is not in flight"
        );
        self.free.extend(chain);
    }
}

/// Returns the descriptors of a chain; `index` gives the table index of each.
fn chain<'a>(
    readable: &'a [Buffer],
    writable: &'a [Buffer],
    index: impl Fn(usize) -> u16 + 'a,
) -> impl Iterator<Item = Descriptor> + 'a {
    let count = readable.len() + writable.len();
    assert_ne!(count, 0, "a chain has a descriptor");
    let read = readable.iter().map(|buffer| (buffer, 0));
    let write = writable.iter().map(|buffer| (buffer, DESC_F_WRITE));
    read.chain(write)
        .enumerate()
        .map(move |(at, (&(addr, len), flags))| {
            let last = at + 1 == count;
            Descriptor {
                addr,
                len,
                flags: flags | if last { 0 } else { DESC_F_NEXT },
                next: if last { 0 } else { index(at + 1) },
            }
        })
}
