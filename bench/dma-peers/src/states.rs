//! Table with one byte per page, by which the caching allocators validate a free without a lock.
//!
//! The byte of a range's first page holds the range's state (allocated, pinned or cached) and its
//! order; bytes of other pages are 0. So one load shows whether the range given to `free` is
//! exactly one that is allocated: a double free finds "cached", a partial free finds 0 or another
//! order, a range that was never allocated finds 0.
//!
//! **Writers.** The byte of an allocated range is written by its holder, that of a cached range by
//! the core that took it out of a cache. Each passes the range on through a magazine, a list or a
//! lock, so [`States::release`] and [`States::take`] are a plain load and store. The price: two
//! *buggy* frees of one range, at the same instant on two cores, may both find "allocated" and both
//! succeed, so that two caches hold the range. `take` refuses a range that is not "cached", so the
//! second copy is dropped if it turns up while the first is allocated, which repairs the damage.
//! Only if both copies are taken while neither core sees the other's store does the range have two
//! owners. This crate accesses no memory by these ranges. Callers that need more (an unmap that
//! ends a device's access before it frees) use [`States::pin`], a compare-and-swap: of any number
//! of concurrent pins one succeeds.
//!
//! Memory: a tree whose leaves have 4 KiB for 4,096 pages (16 MiB of IOVA). A leaf is made at its
//! first use and kept. The allocators fill the space from the top, so few leaves exist.

use alloc::boxed::Box;

use lines::{AtomicU8, Ordering};
use once_cell::race::OnceBox;

use iova::{Aperture, IovaPfn};

/// Number of orders that have states: ranges of up to 2^9 pages.
pub(crate) const ORDERS: usize = 10;

/// Bits of a page number within a leaf. Small under loom, whose cost grows with every atomic.
const LEAF_SHIFT: u32 = if cfg!(loom) { 3 } else { 12 };
const NODE_SHIFT: u32 = 12;

const ALLOCATED: u8 = 0x10;
const PINNED: u8 = 0x20;
const CACHED: u8 = 0x30;

/// State of the range that starts at a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    None,
    Allocated(u8),
    Pinned(u8),
    Cached,
}

struct Node {
    nodes: Box<[OnceBox<Node>]>,
    leaves: Box<[OnceBox<Leaf>]>,
}

struct Leaf([AtomicU8; 1 << LEAF_SHIFT]);

pub(crate) struct States {
    root: Node,
    first: u64,
    pages: u64,
    /// Number of lower bits of a page number that do not select a child of the root.
    root_shift: u32,
}

fn empty<T>(len: usize) -> Box<[OnceBox<T>]> {
    (0..len).map(|_| OnceBox::new()).collect()
}

impl Node {
    fn new(shift: u32, len: usize) -> Self {
        let (nodes, leaves) = match shift > LEAF_SHIFT {
            true => (len, 0),
            false => (0, len),
        };
        Self {
            nodes: empty(nodes),
            leaves: empty(leaves),
        }
    }

    fn for_each_leaf(&self, visit: &mut dyn FnMut(&Leaf)) {
        let leaves = self.leaves.iter().filter_map(OnceBox::get);
        leaves.for_each(&mut *visit);
        let nodes = self.nodes.iter().filter_map(OnceBox::get);
        nodes.for_each(|node| node.for_each_leaf(visit));
    }

    fn bytes(&self) -> usize {
        let slots = size_of_val(&*self.nodes) + size_of_val(&*self.leaves);
        let leaves = self.leaves.iter().filter(|leaf| leaf.get().is_some());
        let nodes = self.nodes.iter().filter_map(OnceBox::get).map(Node::bytes);
        size_of::<Self>() + slots + leaves.count() * size_of::<Leaf>() + nodes.sum::<usize>()
    }
}

impl States {
    pub(crate) fn new(aperture: &Aperture) -> Self {
        let first = aperture.first().raw();
        let pages = aperture.last().raw() - first + 1;
        let mut root_shift = LEAF_SHIFT;
        while (pages - 1) >> root_shift >= 1 << NODE_SHIFT {
            root_shift += NODE_SHIFT;
        }
        let len = ((pages - 1) >> root_shift) as usize + 1;
        Self {
            root: Node::new(root_shift, len),
            first,
            pages,
            root_shift,
        }
    }

    /// Returns the byte of a page, if its leaf exists.
    #[inline]
    fn byte(&self, page: u64) -> Option<&AtomicU8> {
        let index = page.wrapping_sub(self.first);
        if index >= self.pages {
            return None;
        }
        let (mut node, mut shift) = (&self.root, self.root_shift);
        let mut slot = (index >> shift) as usize;
        while shift > LEAF_SHIFT {
            node = node.nodes[slot].get()?;
            shift -= NODE_SHIFT;
            slot = (index >> shift) as usize & ((1 << NODE_SHIFT) - 1);
        }
        let leaf = node.leaves[slot].get()?;
        Some(&leaf.0[index as usize & ((1 << LEAF_SHIFT) - 1)])
    }

    /// Returns the byte of a page of the aperture, and makes its leaf if needed.
    fn made_byte(&self, page: u64) -> &AtomicU8 {
        let index = page - self.first;
        let (mut node, mut shift) = (&self.root, self.root_shift);
        let mut slot = (index >> shift) as usize;
        while shift > LEAF_SHIFT {
            shift -= NODE_SHIFT;
            let make = || Box::new(Node::new(shift, 1 << NODE_SHIFT));
            node = node.nodes[slot].get_or_init(make);
            slot = (index >> shift) as usize & ((1 << NODE_SHIFT) - 1);
        }
        let make = || Box::new(Leaf(core::array::from_fn(|_| AtomicU8::new(0))));
        let leaf = node.leaves[slot].get_or_init(make);
        &leaf.0[index as usize & ((1 << LEAF_SHIFT) - 1)]
    }

    /// Allocated → cached. Returns whether the range was allocated with this order.
    #[inline]
    pub(crate) fn release(&self, page: u64, order: u8) -> bool {
        let Some(byte) = self.byte(page) else {
            return false;
        };
        // Relaxed: the byte orders no other accesses. The last holder's accesses are ordered before
        // this core's by the magazine, list or lock through which the range was passed.
        let is_allocated = byte.load(Ordering::Relaxed) == ALLOCATED | order;
        if is_allocated {
            byte.store(CACHED | order, Ordering::Relaxed);
        }
        is_allocated
    }

    /// Cached → allocated. Returns false for the second copy of a range that two cores freed at
    /// once.
    #[inline]
    pub(crate) fn take(&self, page: u64, order: u8) -> bool {
        let Some(byte) = self.byte(page) else {
            return false;
        };
        // Relaxed: the store of "cached" happened before, since the range was passed here through
        // the cache or its lock.
        let is_cached = byte.load(Ordering::Relaxed) == CACHED | order;
        if is_cached {
            byte.store(ALLOCATED | order, Ordering::Relaxed);
        }
        is_cached
    }

    /// Allocated → pinned. Of concurrent calls one succeeds.
    pub(crate) fn pin(&self, page: u64, order: u8) -> bool {
        let (from, to) = (ALLOCATED | order, PINNED | order);
        // Relaxed: as above. The compare-and-swap itself decides which caller succeeds.
        let swap =
            |byte: &AtomicU8| byte.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
        self.byte(page).is_some_and(|byte| swap(byte).is_ok())
    }

    /// Pinned → cached.
    pub(crate) fn release_pinned(&self, page: u64, order: u8) {
        self.made_byte(page)
            .store(CACHED | order, Ordering::Relaxed);
    }

    /// Pinned → allocated.
    pub(crate) fn unpin(&self, page: u64, order: u8) {
        self.made_byte(page)
            .store(ALLOCATED | order, Ordering::Relaxed);
    }

    /// Sets a range new from the space to allocated.
    pub(crate) fn set_allocated(&self, page: u64, order: u8) {
        self.made_byte(page)
            .store(ALLOCATED | order, Ordering::Relaxed);
    }

    /// Sets a range new from the space to cached.
    pub(crate) fn set_cached(&self, page: u64, order: u8) {
        self.made_byte(page)
            .store(CACHED | order, Ordering::Relaxed);
    }

    /// Cached → no state. Returns false if the range was not cached, so that no range returns to
    /// the space twice.
    pub(crate) fn clear(&self, page: u64, order: u8) -> bool {
        let Some(byte) = self.byte(page) else {
            return false;
        };
        let is_cached = byte.load(Ordering::Relaxed) == CACHED | order;
        if is_cached {
            byte.store(0, Ordering::Relaxed);
        }
        is_cached
    }

    pub(crate) fn state(&self, page: u64) -> State {
        let byte = self.byte(page).map_or(0, |b| b.load(Ordering::Relaxed));
        match byte & 0xf0 {
            ALLOCATED => State::Allocated(byte & 0xf),
            PINNED => State::Pinned(byte & 0xf),
            CACHED => State::Cached,
            _ => State::None,
        }
    }

    /// Returns whether any page of `first..=last` (at most 2^9 pages) belongs to a range that is
    /// allocated or pinned.
    #[cold]
    pub(crate) fn is_any_out(&self, first: IovaPfn, last: IovaPfn) -> bool {
        let (first, last) = (first.raw(), last.raw());
        // A range that covers `first` starts at one of these alignments; one that covers a later
        // page starts there or at a later page.
        let around = (0..ORDERS as u32).map(|order| first >> order << order);
        around
            .chain(first..=last)
            .any(|start| match self.state(start) {
                State::Allocated(order) | State::Pinned(order) => start + (1 << order) > first,
                State::None | State::Cached => false,
            })
    }

    /// Clears all bytes. The caller ensures that no other thread uses the space meanwhile.
    pub(crate) fn clear_all(&self) {
        self.root.for_each_leaf(&mut |leaf| {
            leaf.0
                .iter()
                .for_each(|byte| byte.store(0, Ordering::Relaxed));
        });
    }

    pub(crate) fn bytes(&self) -> usize {
        self.root.bytes()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_byte_goes_round_its_states_at_both_ends_of_any_space() {
        for bits in [13, 32, 48, 57, 64] {
            let aperture = Aperture::of_bits(bits).expect("valid");
            let states = States::new(&aperture);
            for page in [aperture.first().raw(), aperture.last().raw()] {
                assert!(!states.release(page, 0) && !states.take(page, 0));
                states.set_cached(page, 0);
                assert!(states.take(page, 0) && !states.take(page, 0));
                assert!(!states.release(page, 1) && states.pin(page, 0));
                assert!(!states.release(page, 0) && !states.pin(page, 0));
                states.unpin(page, 0);
                assert!(states.is_any_out(IovaPfn::new(page), IovaPfn::new(page)));
                assert!(states.release(page, 0) && !states.release(page, 0));
                assert!(states.clear(page, 0) && !states.clear(page, 0));
            }
            assert_eq!(states.state(0), State::None);
            assert_eq!(states.state(u64::MAX), State::None);
            assert!(states.bytes() < 400 << 10, "{bits}: {}", states.bytes());
        }
    }
}
