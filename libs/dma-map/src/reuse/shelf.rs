//! A fixed number of places for mappings, found by key and ordered by age: plain memory of one owner.
//!
//! A place is free, or *indexed* (found by its key), or taken out (neither: whoever took it gives it back). An
//! indexed place may be *linked* into the order, oldest first. Nothing is allocated after construction; links
//! are numbers of places, free places hang on each other (the last given back is the first taken, being warm).
//!
//! A mapping that is found and taken into use may leave its place behind, *in use*: indexed, not linked, and counted by
//! nobody. When it comes back it finds the place by its number, and the index has not changed at all. That is a hint, no
//! more: what is in use may end anywhere, and its place goes to the next mapping that finds no free one.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::Key;
use super::index::{Index, hash};

/// No place.
const NIL: u32 = u32::MAX;
/// The older neighbour of a place in use.
const IN_USE: u32 = u32::MAX - 1;

/// Where a mapping has its place: nowhere, for it was made and not found.
pub(crate) const FRESH: u32 = u32::MAX;
/// Somewhere, perhaps.
pub(crate) const SOMEWHERE: u32 = u32::MAX - 1;

struct Node<T> {
    key: Key,
    value: T,
    /// The next older one.
    prev: u32,
    /// The next younger one, or the next free one.
    next: u32,
}

/// An indexed place, as found.
#[derive(Clone, Copy)]
pub(super) struct Found {
    at: usize,
    pub(super) place: u32,
}

pub(super) struct Shelf<T> {
    index: Index,
    nodes: Box<[Node<T>]>,
    oldest: u32,
    youngest: u32,
    free: u32,
    free_len: u32,
    in_use: u32,
    /// Most places that are neither free nor in use.
    most: u32,
    /// Where the next place in use is looked for.
    hand: u32,
}

impl<T: Default> Shelf<T> {
    /// `places` places, 1 to 2^30; more or fewer are taken for the nearest.
    pub(super) fn new(places: usize) -> Self {
        Self::with_spare(places, 0)
    }

    /// The same, and at most 2^29 more for mappings in use.
    pub(super) fn with_spare(places: usize, spare: usize) -> Self {
        let most = places.clamp(1, 1 << 30);
        let places = most + spare.min(1 << 29);
        let last = places as u32 - 1;
        let nodes: Vec<_> = (0..=last)
            .map(|place| Node {
                key: Key::FIRST,
                value: T::default(),
                prev: NIL,
                next: if place == last { NIL } else { place + 1 },
            })
            .collect();
        Self {
            index: Index::new(places),
            nodes: nodes.into_boxed_slice(),
            oldest: NIL,
            youngest: NIL,
            free: 0,
            free_len: last + 1,
            in_use: 0,
            most: most as u32,
            hand: 0,
        }
    }

    /// Most places that are neither free nor in use.
    pub(super) fn places(&self) -> usize {
        self.most as usize
    }

    /// All places.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Address that stands for this shelf in batches; it stays when the shelf moves.
    pub(super) fn id(&self) -> usize {
        self.nodes.as_ptr().addr()
    }

    /// Number of places that are neither free nor in use.
    #[inline]
    pub(super) fn occupied(&self) -> u32 {
        self.nodes.len() as u32 - self.free_len - self.in_use
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.occupied() >= self.most
    }

    /// A place for a mapping, indexed and the youngest in the order, its value what it was; `None` where the shelf is full.
    #[inline]
    pub(super) fn insert(&mut self, key: Key) -> Option<u32> {
        if self.is_full() {
            return None;
        }
        if self.free == NIL {
            self.forget_one();
        }
        let place = self.free;
        let node = &mut self.nodes[place as usize];
        self.free = node.next;
        self.free_len -= 1;
        node.key = key;
        self.index.insert(hash(key), place);
        self.link(place);
        Some(place)
    }

    /// One of the places indexed by `key`.
    #[inline]
    pub(super) fn find(&self, key: Key) -> Option<Found> {
        let nodes = &self.nodes;
        let is_it = |place: u32| nodes[place as usize].key == key;
        let (at, place) = self.index.find(hash(key), is_it)?;
        Some(Found { at, place })
    }

    /// One of the linked places indexed by `key`.
    #[inline(always)]
    pub(super) fn find_linked(&self, key: Key) -> Option<Found> {
        let nodes = &self.nodes;
        let is_it = |place: u32| {
            let node = &nodes[place as usize];
            node.key == key && node.prev != IN_USE
        };
        let (at, place) = self.index.find(hash(key), is_it)?;
        Some(Found { at, place })
    }

    /// The mapping of a linked place is taken into use, and may come back.
    #[inline(always)]
    pub(super) fn take_into_use(&mut self, place: u32) {
        self.unlink(place);
        self.nodes[place as usize].prev = IN_USE;
        self.in_use += 1;
    }

    /// The place in which a mapping of `key` is in use that `is_it` accepts: `hint`, or one that is found; with
    /// [`FRESH`] none.
    #[inline(always)]
    pub(super) fn in_use(
        &self,
        hint: u32,
        key: Key,
        is_it: impl Fn(u32, &T) -> bool,
    ) -> Option<u32> {
        let nodes = &self.nodes;
        let is_it = |place: u32, node: &Node<T>| {
            node.prev == IN_USE && node.key == key && is_it(place, &node.value)
        };
        match nodes.get(hint as usize) {
            Some(node) if is_it(hint, node) => Some(hint),
            None if hint == FRESH => None,
            _ => self.look_for(key, |place| is_it(place, &nodes[place as usize])),
        }
    }

    #[inline(never)]
    fn look_for(&self, key: Key, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let (_, place) = self.index.find(hash(key), is_it)?;
        Some(place)
    }

    /// The mapping of a place in use has come back; the shelf is not full.
    #[inline(always)]
    pub(super) fn come_back(&mut self, place: u32) {
        self.in_use -= 1;
        self.link(place);
    }

    /// Makes a place in use a free one: there is no other, and the shelf is not full. The hand goes round once for as many
    /// of them as there are spare places, at least.
    #[cold]
    #[inline(never)]
    fn forget_one(&mut self) {
        let len = self.nodes.len() as u32;
        while self.nodes[self.hand as usize].prev != IN_USE {
            self.hand = (self.hand + 1) % len;
        }
        let place = self.hand;
        let found = self.locate(place);
        self.unindex(found);
        self.in_use -= 1;
        self.give_back(place);
    }

    /// How to find an indexed place again.
    pub(super) fn locate(&self, place: u32) -> Found {
        let key = self.nodes[place as usize].key;
        let found = self.index.find(hash(key), |p| p == place);
        let (at, place) = found.expect("the place is indexed");
        Found { at, place }
    }

    /// Makes the place unfindable.
    #[inline]
    pub(super) fn unindex(&mut self, found: Found) {
        self.index.remove(found.at);
    }

    /// Puts an unlinked place at the young end of the order.
    #[inline(always)]
    pub(super) fn link(&mut self, place: u32) {
        let older = core::mem::replace(&mut self.youngest, place);
        let node = &mut self.nodes[place as usize];
        node.prev = older;
        node.next = NIL;
        if older == NIL {
            self.oldest = place;
        } else {
            self.nodes[older as usize].next = place;
        }
    }

    /// Takes a linked place out of the order.
    #[inline(always)]
    pub(super) fn unlink(&mut self, place: u32) {
        let &Node { prev, next, .. } = &self.nodes[place as usize];
        if prev == NIL {
            self.oldest = next;
        } else {
            self.nodes[prev as usize].next = next;
        }
        if next == NIL {
            self.youngest = prev;
        } else {
            self.nodes[next as usize].prev = prev;
        }
    }

    /// Takes a linked place out of the index and the order.
    #[inline]
    pub(super) fn take_out(&mut self, found: Found) {
        self.unindex(found);
        self.unlink(found.place);
    }

    /// A place that was taken out is free again.
    #[inline]
    pub(super) fn give_back(&mut self, place: u32) {
        let node = &mut self.nodes[place as usize];
        node.prev = NIL;
        node.next = self.free;
        self.free = place;
        self.free_len += 1;
    }

    /// The oldest linked place.
    #[inline]
    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NIL).then_some(self.oldest)
    }

    #[inline]
    pub(super) fn value(&self, place: u32) -> &T {
        &self.nodes[place as usize].value
    }

    #[inline]
    pub(super) fn value_mut(&mut self, place: u32) -> &mut T {
        &mut self.nodes[place as usize].value
    }

    pub(super) fn bytes(&self) -> usize {
        self.index.bytes() + size_of_val(&*self.nodes)
    }
}
