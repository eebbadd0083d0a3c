//! The driver's side of a packed ring (virtio 1.2 §2.8), in its simplest form.

use std::collections::VecDeque;
use std::marker::PhantomData;

use guest_mem::{Gpa, Iova, PhysMem};

use super::{Buffer, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Rings, ready};

const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// Driver of a packed queue.
pub struct FakePacked<M, Q = Rings> {
    mem: M,
    index: u16,
    size: u16,
    base: u64,
    in_order: bool,
    free_ids: Vec<u16>,
    free_descs: u16,
    /// Number of descriptors and writable bytes of each chain, by buffer id.
    chains: Vec<Option<(u16, u32)>>,
    /// Buffer ids in the order in which they were made available.
    queue: VecDeque<u16>,
    /// Completions reported by a used descriptor for a whole batch, not yet taken by the test.
    batch: VecDeque<(u16, u32)>,
    next_avail: (u16, bool),
    next_used: (u16, bool),
    /// First descriptors of chains that are not published yet: index, and id with flags.
    heads: Vec<(u16, u32)>,
    published: (u16, bool),
    /// Type that describes its ring to the device.
    rings: PhantomData<fn() -> Q>,
}

impl<M: PhysMem, Q: From<Rings>> FakePacked<M, Q> {
    /// Creates a queue whose ring and event suppression structures start at `base`, which is
    /// page-aligned. The memory is zeroed.
    pub fn new(mem: M, base: Gpa, index: u16, size: u16) -> Self {
        let driver = Self {
            mem,
            index,
            size,
            base: base.raw(),
            in_order: false,
            free_ids: (0..size).rev().collect(),
            free_descs: size,
            chains: vec![None; usize::from(size)],
            queue: VecDeque::new(),
            batch: VecDeque::new(),
            next_avail: (0, true),
            next_used: (0, true),
            heads: Vec::new(),
            published: (0, true),
            rings: PhantomData,
        };
        driver.put(driver.base, &vec![0; Self::footprint(size) as usize]);
        driver
    }

    /// Returns the bytes of memory of a queue of `size` entries.
    pub fn footprint(size: u16) -> u64 {
        16 * u64::from(size) + 8
    }

    /// Selects VIRTIO_F_IN_ORDER: a used descriptor may complete several chains.
    pub fn set_in_order(&mut self) {
        self.in_order = true;
    }

    /// Sets the ring's position to `idx` with this wrap counter, with everything used. To be called
    /// before the first chain.
    pub fn start_at(&mut self, idx: u16, wrap: bool) {
        for at in 0..self.size {
            // Descriptors before `idx` were used in this lap, the others in the lap before.
            let flags = if wrap == (at < idx) { AVAIL | USED } else { 0 };
            self.put_rest(at, u32::from(flags) << 16);
        }
        self.next_avail = (idx, wrap);
        self.next_used = (idx, wrap);
        self.published = (idx, wrap);
    }

    /// Returns the queue's description, as the transport hands it to the device.
    pub fn config(&self) -> Q {
        let events = self.base + 16 * u64::from(self.size);
        Q::from(Rings {
            index: self.index,
            size: self.size,
            desc: Iova::new(self.base),
            avail: Iova::new(events),
            used: Iova::new(events + 4),
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
        ready(self.mem.write(Gpa::new(gpa), bytes));
    }

    /// Writes descriptor `at` with its flags, without any check.
    pub fn put_descriptor(&self, at: u16, addr: u64, len: u32, id: u16, flags: u16) {
        let gpa = self.base + 16 * u64::from(at);
        self.put(gpa, &addr.to_le_bytes());
        self.put(gpa + 8, &len.to_le_bytes());
        self.put_rest(at, u32::from(flags) << 16 | u32::from(id));
    }

    /// Stores `id` and `flags` of descriptor `at`, in one store.
    fn put_rest(&self, at: u16, rest: u32) {
        let gpa = Gpa::new(self.base + 16 * u64::from(at) + 12);
        ready(self.mem.store_u32_release(gpa, rest));
    }

    /// Returns the flags of descriptor `at`.
    pub fn flags(&self, at: u16) -> u16 {
        (self.rest(at) >> 48) as u16
    }

    /// Loads `len`, `id` and `flags` of descriptor `at`, in one access.
    fn rest(&self, at: u16) -> u64 {
        let gpa = Gpa::new(self.base + 16 * u64::from(at) + 8);
        ready(self.mem.read_u64(gpa))
    }

    /// Stores the driver's event suppression structure. Flags: 0 enables events, 1 disables them, 2
    /// requests one at `off_wrap`.
    pub fn put_event(&self, flags: u16, off_wrap: u16) {
        let gpa = Gpa::new(self.base + 16 * u64::from(self.size));
        let word = u32::from(flags) << 16 | u32::from(off_wrap);
        ready(self.mem.store_u32_release(gpa, word));
    }

    /// Requests an interrupt for the descriptor that is `ahead` of the next used one.
    pub fn put_event_ahead(&self, ahead: u16) {
        let (idx, wrap) = self.after(self.next_used, ahead);
        self.put_event(2, idx | u16::from(wrap) << 15);
    }

    /// Loads the device's event suppression structure: flags and `off_wrap`.
    pub fn device_event(&self) -> (u16, u16) {
        let at = self.base + 16 * u64::from(self.size) + 4;
        let word = ready(self.mem.read_u64(Gpa::new(at & !7))) >> (8 * (at & 7));
        ((word >> 16) as u16, word as u16)
    }

    /// Returns the number of descriptors that are not in a chain.
    pub fn free(&self) -> usize {
        usize::from(self.free_descs)
    }

    fn after(&self, (idx, wrap): (u16, bool), count: u16) -> (u16, bool) {
        let sum = idx + count;
        if sum >= self.size {
            (sum - self.size, !wrap)
        } else {
            (sum, wrap)
        }
    }

    /// Adds a chain of these buffers, without publishing it. Returns its buffer id. Panics if the
    /// ring is full.
    pub fn stage(&mut self, readable: &[Buffer], writable: &[Buffer]) -> u16 {
        let count = (readable.len() + writable.len()) as u16;
        let read = readable.iter().map(|&buffer| (buffer, 0));
        let write = writable.iter().map(|&buffer| (buffer, DESC_F_WRITE));
        let descs = (1..).zip(read.chain(write));
        let descs: Vec<_> = descs
            .map(|(nth, ((addr, len), flags))| {
                let next = if nth == count { 0 } else { DESC_F_NEXT };
                (addr, len, flags | next)
            })
            .collect();
        self.link(&descs, writable.iter().map(|(_, len)| len).sum())
    }

    /// Like [`stage`](Self::stage), with the descriptors in an indirect table at `table`.
    pub fn stage_indirect(&mut self, table: Gpa, readable: &[Buffer], writable: &[Buffer]) -> u16 {
        let read = readable.iter().map(|&buffer| (buffer, 0));
        let write = writable.iter().map(|&buffer| (buffer, DESC_F_WRITE));
        let mut at = table.raw();
        for ((addr, len), flags) in read.chain(write) {
            self.put(at, &addr.to_le_bytes());
            self.put(at + 8, &len.to_le_bytes());
            // The buffer id is reserved in an indirect table.
            self.put(at + 12, &0xdead_u16.to_le_bytes());
            self.put(at + 14, &flags.to_le_bytes());
            at += 16;
        }
        let len = (at - table.raw()) as u32;
        let descs = [(table.raw(), len, DESC_F_INDIRECT)];
        self.link(&descs, writable.iter().map(|(_, len)| len).sum())
    }

    fn link(&mut self, descs: &[(u64, u32, u16)], writable: u32) -> u16 {
        let count = descs.len() as u16;
        assert_ne!(count, 0, "a chain has a descriptor");
        self.free_descs = self.free_descs.checked_sub(count).expect("room");
        let id = self
            .free_ids
            .pop()
            .expect("no more chains than descriptors");
        let mut at = self.next_avail;
        for (nth, &(addr, len, flags)) in descs.iter().enumerate() {
            let flags = flags | if at.1 { AVAIL } else { USED };
            // Only the id of a chain's last descriptor is valid.
            let own = if nth + 1 == descs.len() { id } else { 0xbeef };
            let gpa = self.base + 16 * u64::from(at.0);
            self.put(gpa, &addr.to_le_bytes());
            self.put(gpa + 8, &len.to_le_bytes());
            let rest = u32::from(flags) << 16 | u32::from(own);
            if nth == 0 {
                self.heads.push((at.0, rest));
            } else {
                self.put_rest(at.0, rest);
            }
            at = self.after(at, 1);
        }
        self.next_avail = at;
        self.chains[usize::from(id)] = Some((count, writable));
        self.queue.push_back(id);
        id
    }

    /// Publishes all chains that were added. Returns whether the device wants a notification for
    /// them.
    pub fn publish(&mut self) -> bool {
        let old = std::mem::replace(&mut self.published, self.next_avail);
        // In reverse order: with the flags of the first chain the device sees all chains at once.
        for (at, rest) in std::mem::take(&mut self.heads).into_iter().rev() {
            self.put_rest(at, rest);
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let (flags, off_wrap) = self.device_event();
        match flags {
            0 => true,
            1 => false,
            2 => {
                let event = (off_wrap & 0x7fff, off_wrap >> 15 != 0);
                // The simplest test: is the event among the descriptors just published?
                let mut at = old;
                while at != self.published {
                    if at == event {
                        return true;
                    }
                    at = self.after(at, 1);
                }
                false
            }
            other => panic!("event flags {other}"),
        }
    }

    /// Takes the next completion: buffer id and bytes written.
    pub fn used(&mut self) -> Option<(u16, u32)> {
        if let Some(told) = self.batch.pop_front() {
            return Some(told);
        }
        let (idx, wrap) = self.next_used;
        let rest = self.rest(idx);
        let flags = (rest >> 48) as u16;
        let both = if wrap { AVAIL | USED } else { 0 };
        if flags & (AVAIL | USED) != both || self.free_descs == self.size {
            return None;
        }
        let (id, len) = ((rest >> 32) as u16, rest as u32);
        assert_eq!(
            flags & DESC_F_WRITE != 0,
            len != 0,
            "WRITE says that len counts"
        );
        if self.in_order {
            loop {
                let next = self.queue.pop_front().expect("a used id is in flight");
                let writable = self.give_back(next);
                let is_last = next == id;
                self.batch
                    .push_back((next, if is_last { len } else { writable }));
                if is_last {
                    break;
                }
            }
            return self.batch.pop_front();
        }
        self.queue.retain(|&own| own != id);
        self.give_back(id);
        Some((id, len))
    }

    /// Frees a chain and advances the position. Returns its writable bytes.
    fn give_back(&mut self, id: u16) -> u32 {
        let chain = self.chains.get_mut(usize::from(id)).and_then(Option::take);
        let (descs, writable) = chain.expect("a used id is in flight");
        self.next_used = self.after(self.next_used, descs);
        self.free_descs += descs;
        self.free_ids.push(id);
        writable
    }
}
