//! A fixed number of places for mappings, found by key and ordered by age: plain memory of one
//! owner.
//!
//! A place is free, or *indexed* (found by its key), or taken out (neither: the thread that took it
//! gives it back). An indexed place may be *linked* into the order, oldest first. Nothing is
//! allocated after construction. Links are numbers of places. Free places form a list (the last
//! given back is the first taken, being warm).
//!
//! The index is a hash table of chains, at least two for each place. One page is often mapped many
//! times at once (packets that share it), so mappings of one key are many: they form a stack, and
//! the chain knows its top. The youngest comes first, and neither a look nor a removal meets the
//! others. The hash is not secret: a driver that chooses its pages so that they collide slows
//! itself, by at most one probe for each place.
//!
//! Three arrays, by how often a place's part is touched: the index; links of the order, of which an
//! operation writes those of three places; and the rest.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use super::Key;

/// No place.
const NIL: u32 = u32::MAX;
/// The odd number nearest to 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A well-mixed word, the high bits best; the index uses the highest.
#[inline]
pub(super) fn hash(key: Key) -> u64 {
    let word = key.word();
    (word ^ word >> 29).wrapping_mul(GOLDEN)
}

struct Node<T> {
    key: Key,
    value: T,
    /// Of a top: the next one in its chain, of another key.
    next: u32,
    /// The next younger one of this key; of a top: `NIL`.
    above: u32,
    /// The next older one of this key.
    below: u32,
}

/// A place in the order.
#[derive(Clone, Copy)]
struct Links {
    /// The next older one.
    prev: u32,
    /// The next younger one, or the next free one.
    next: u32,
}

/// An indexed place, and where its chain leads to the top of its key.
#[derive(Clone, Copy)]
pub struct Found {
    /// The chain.
    chain: usize,
    /// The place before the top in the chain, if it is not the first.
    before: u32,
    /// The place.
    pub place: u32,
}

/// Places by key and by age.
pub struct SlotMap<T> {
    /// The first places of the chains.
    chains: Box<[u32]>,
    /// Shifts a hash to its chain.
    shift: u32,
    nodes: Box<[Node<T>]>,
    order: Box<[Links]>,
    oldest: u32,
    youngest: u32,
    free: u32,
    free_len: u32,
}

impl<T: Default> SlotMap<T> {
    /// `places` places, 1 to 2^30; more or fewer are taken for the nearest.
    pub fn new(places: usize) -> Self {
        let places = places.clamp(1, 1 << 30);
        let last = places as u32 - 1;
        let nodes: Vec<_> = (0..=last)
            .map(|_| Node {
                key: Key::FIRST,
                value: T::default(),
                next: NIL,
                above: NIL,
                below: NIL,
            })
            .collect();
        let mut order: Vec<_> = (1..=last + 1)
            .map(|next| Links { prev: NIL, next })
            .collect();
        order[last as usize].next = NIL;
        let chains = (places * 2).next_power_of_two();
        Self {
            chains: vec![NIL; chains].into_boxed_slice(),
            shift: u64::BITS - chains.ilog2(),
            nodes: nodes.into_boxed_slice(),
            order: order.into_boxed_slice(),
            oldest: NIL,
            youngest: NIL,
            free: 0,
            free_len: last + 1,
        }
    }

    /// Number of places.
    pub fn places(&self) -> usize {
        self.nodes.len()
    }

    /// Number of places that are not free.
    #[inline]
    pub fn occupied(&self) -> u32 {
        self.nodes.len() as u32 - self.free_len
    }

    /// Whether no place is free.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.free == NIL
    }

    /// A place for a mapping, indexed and the youngest in the order, its value what it was last;
    /// `None` where no place is free.
    #[inline(always)]
    pub fn insert(&mut self, key: Key) -> Option<u32> {
        let place = self.free;
        let &Links { next, .. } = self.order.get(place as usize)?;
        self.free = next;
        self.free_len -= 1;
        let top = self.look(key);
        let next = match self.nodes.get_mut(top.place as usize) {
            Some(node) => {
                node.above = place;
                node.next
            }
            None => NIL,
        };
        self.set_top(top, place);
        let node = &mut self.nodes[place as usize];
        node.key = key;
        (node.next, node.above, node.below) = (next, NIL, top.place);
        self.link(place);
        Some(place)
    }

    /// The youngest place of `key`; where there is none, `NIL`, and the end of the chain that it
    /// would be in.
    #[inline(always)]
    fn look(&self, key: Key) -> Found {
        let chain = (hash(key) >> self.shift) as usize;
        let (mut before, mut place) = (NIL, self.chains[chain]);
        while let Some(node) = self.nodes.get(place as usize)
            && node.key != key
        {
            (before, place) = (place, node.next);
        }
        Found {
            chain,
            before,
            place,
        }
    }

    /// Makes the chain lead to `place` where `top` was found.
    #[inline(always)]
    fn set_top(&mut self, top: Found, place: u32) {
        match self.nodes.get_mut(top.before as usize) {
            Some(before) => before.next = place,
            None => self.chains[top.chain] = place,
        }
    }

    /// The youngest of the places indexed by `key`.
    #[inline(always)]
    pub fn find(&self, key: Key) -> Option<Found> {
        let found = self.look(key);
        (found.place != NIL).then_some(found)
    }

    /// Returns the position of an indexed place, for its removal.
    pub fn locate(&self, place: u32) -> Found {
        Found {
            place,
            ..self.look(self.nodes[place as usize].key)
        }
    }

    /// Removes the place from the index.
    #[inline(always)]
    fn unindex(&mut self, found: Found) {
        let &Node {
            next, above, below, ..
        } = &self.nodes[found.place as usize];
        let rest = match self.nodes.get_mut(below as usize) {
            Some(node) => {
                node.above = above;
                if above == NIL {
                    node.next = next;
                }
                below
            }
            None => next,
        };
        match self.nodes.get_mut(above as usize) {
            Some(node) => node.below = below,
            None => self.set_top(found, rest),
        }
    }

    /// Puts an unlinked place at the young end of the order.
    #[inline(always)]
    pub fn link(&mut self, place: u32) {
        let older = core::mem::replace(&mut self.youngest, place);
        self.order[place as usize] = Links {
            prev: older,
            next: NIL,
        };
        match self.order.get_mut(older as usize) {
            Some(older) => older.next = place,
            None => self.oldest = place,
        }
    }

    /// Takes a linked place out of the order.
    #[inline(always)]
    pub fn unlink(&mut self, place: u32) {
        let Links { prev, next } = self.order[place as usize];
        match self.order.get_mut(prev as usize) {
            Some(older) => older.next = next,
            None => self.oldest = next,
        }
        match self.order.get_mut(next as usize) {
            Some(younger) => younger.prev = prev,
            None => self.youngest = prev,
        }
    }

    /// Takes a linked place out of the index and the order.
    #[inline(always)]
    pub fn take_out(&mut self, found: Found) {
        self.unindex(found);
        self.unlink(found.place);
    }

    /// A place that was taken out is free again.
    #[inline(always)]
    pub fn give_back(&mut self, place: u32) {
        self.order[place as usize].next = self.free;
        self.free = place;
        self.free_len += 1;
    }

    /// The oldest linked place.
    #[inline]
    pub fn oldest(&self) -> Option<u32> {
        (self.oldest != NIL).then_some(self.oldest)
    }

    /// The value kept at a place.
    #[inline(always)]
    pub fn value_mut(&mut self, place: u32) -> &mut T {
        &mut self.nodes[place as usize].value
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.chains) + size_of_val(&*self.nodes) + size_of_val(&*self.order)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
