//! A guest driver for tests: builds split rings in guest memory as Linux would, or as it never
//! would; packed ones ([`FakePacked`]); either ([`AnyDriver`]).
//!
//! It plays the guest, so it reaches memory directly ([`PhysMem`]), and names buffers by the
//! addresses the device will use. Its own structures lie where the test says; with an IOMMU in
//! between, the test says how far the device's addresses are off ([`FakeDriver::set_iova_offset`]).
//!
//! It has the specification's constants and layouts for itself, so that the unit tests of `vio` can
//! use it: what needs `vio` would bring a second one into them. A device's own types take the place
//! of [`Rings`] and [`Descriptor`] by `From`; it knows those of
//! `virtqueue`, and no code there.
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

/// The answer of memory that a test keeps inside RAM.
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
    /// With IN_ORDER: heads as made available, with their writable bytes.
    queue: Option<VecDeque<(u16, u32)>>,
    /// Told by a batch's used element and not taken yet.
    batch: VecDeque<(u16, u32)>,
    /// Type of its rings' places.
    rings: PhantomData<fn() -> Q>,
}

impl<M: PhysMem, Q: From<Rings>> FakeDriver<M, Q> {
    /// A queue whose table and rings start at `base`, page-aligned, and take
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

    /// Bytes that a queue of `size` entries takes.
    pub fn footprint(size: u16) -> u64 {
        Self::used_offset(size) + 6 + 8 * u64::from(size)
    }

    fn avail_offset(size: u16) -> u64 {
        16 * u64::from(size)
    }

    fn used_offset(size: u16) -> u64 {
        (Self::avail_offset(size) + 6 + 2 * u64::from(size)).next_multiple_of(4)
    }

    /// The device sees this driver's structures `offset` bytes above their guest-physical address.
    pub fn set_iova_offset(&mut self, offset: u64) {
        self.iova_offset = offset;
    }

    /// IN_ORDER was negotiated: a used element may stand for several chains.
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

    /// EVENT_IDX was not negotiated.
    pub fn set_flags_only(&mut self) {
        self.event_idx = false;
    }

    /// The queue as the transport would hand it to the device.
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

    /// Entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The memory.
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

    /// One load of an aligned u16 that the device may be storing: a copy of two bytes could tear.
    fn get_u16(&self, gpa: u64) -> u16 {
        let word = self
            .mem
            .read_u64(Gpa::new(gpa & !7))
            .expect("the test stays in RAM");
        (word >> (8 * (gpa & 7))) as u16
    }

    /// Writes descriptor `index`, whatever it says.
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

    /// Descriptors not in a chain.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Makes a chain of these buffers available and publishes it; answers its head. Panics when the
    /// table is full.
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer]) -> u16 {
        let head = self.stage(readable, writable);
        self.publish();
        head
    }

    /// [`add`](Self::add) without publishing.
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

    /// Shows the device everything staged.
    pub fn publish(&self) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.put_avail_idx(self.next_avail);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// [`publish`](Self::publish); whether the device wants a doorbell for what is new (§2.7.10).
    pub fn publish_and_ask(&mut self) -> bool {
        let old = std::mem::replace(&mut self.published, self.next_avail);
        self.publish();
        if !self.event_idx {
            return self.used_flags() == 0;
        }
        let past = self.next_avail.wrapping_sub(self.avail_event());
        past.wrapping_sub(1) < self.next_avail.wrapping_sub(old)
    }

    /// Takes the next used element: head and bytes written.
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

    /// Frees a chain and steps over its element.
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

/// The descriptors of a chain; `index` says where each stands.
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
