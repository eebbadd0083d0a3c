//! A fixed number of places for mappings, found by key and ordered by age: plain memory of one owner.
//!
//! A place is free, or *indexed* (found by its key), or taken out (neither: whoever took it gives it back). An
//! indexed place may be *linked* into the order, oldest first. Nothing is allocated after construction; links
//! are numbers of places, free places hang on each other (the last given back is the first taken, being warm).

use alloc::boxed::Box;
use alloc::vec::Vec;

use iova::IovaRange;

use super::Key;
use super::index::{Index, hash};
use super::key::PackedRange;

/// No place.
const NIL: u32 = u32::MAX;

struct Node<T> {
    key: Key,
    range: PackedRange,
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
}

impl<T: Copy + Default> Shelf<T> {
    /// `places` places, 1 to 2^30; more or fewer are taken for the nearest.
    pub(super) fn new(places: usize) -> Self {
        let places = places.clamp(1, 1 << 30);
        let last = places as u32 - 1;
        let nodes: Vec<_> = (0..=last)
            .map(|place| Node {
                key: Key::FIRST,
                range: PackedRange::from_word(1),
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
        }
    }

    pub(super) fn places(&self) -> usize {
        self.nodes.len()
    }

    /// Address that stands for this shelf in batches; it stays when the shelf moves.
    pub(super) fn id(&self) -> usize {
        self.nodes.as_ptr().addr()
    }

    /// Number of places that are not free.
    #[inline]
    pub(super) fn occupied(&self) -> u32 {
        self.nodes.len() as u32 - self.free_len
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.free == NIL
    }

    /// A place for a mapping, indexed and the youngest in the order; `None` where no place is free.
    #[inline]
    pub(super) fn insert(&mut self, key: Key, range: PackedRange, value: T) -> Option<u32> {
        let place = self.free;
        if place == NIL {
            return None;
        }
        let node = &mut self.nodes[place as usize];
        self.free = node.next;
        self.free_len -= 1;
        node.key = key;
        node.range = range;
        node.value = value;
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
    #[inline]
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
    #[inline]
    pub(super) fn unlink(&mut self, place: u32) {
        let Node { prev, next, .. } = self.nodes[place as usize];
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
        self.nodes[place as usize].next = self.free;
        self.free = place;
        self.free_len += 1;
    }

    /// The oldest linked place.
    #[inline]
    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NIL).then_some(self.oldest)
    }

    #[inline]
    pub(super) fn range(&self, place: u32) -> IovaRange {
        self.nodes[place as usize].range.range()
    }

    #[inline]
    pub(super) fn value(&self, place: u32) -> T {
        self.nodes[place as usize].value
    }

    #[inline]
    pub(super) fn value_mut(&mut self, place: u32) -> &mut T {
        &mut self.nodes[place as usize].value
    }

    pub(super) fn bytes(&self) -> usize {
        self.index.bytes() + size_of_val(&*self.nodes)
    }
}
