//! A fixed number of places for mappings, found by key and ordered by age: plain memory of one owner.
//!
//! A place is free, or *indexed* (found by its key), or taken out (neither: whoever took it gives it back). An
//! indexed place may be *linked* into the order, oldest first. Nothing is allocated after construction; links
//! are numbers of places, free places hang on each other (the last given back is the first taken, being warm).
//!
//! One page is often mapped many times at once (packets that share it), so mappings of one key are many: they form a
//! stack, and the index knows its top. The youngest comes first, and neither a look nor a removal meets the others.
//!
//! Three arrays, by how often a place's part is touched: the index; links of the order, of which an operation writes
//! those of three places; and the rest.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::Key;
use super::index::{Index, hash};

/// No place.
const NIL: u32 = u32::MAX;

struct Node<T> {
    key: Key,
    value: T,
    /// The next younger one of this key; means something only where this is not the top.
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

/// An indexed place, and where the index has its key.
#[derive(Clone, Copy)]
pub struct Found {
    at: usize,
    /// The place.
    pub place: u32,
}

/// Places by key and by age.
pub struct SlotMap<T> {
    index: Index,
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
                above: NIL,
                below: NIL,
            })
            .collect();
        let mut order: Vec<_> = (1..=last + 1)
            .map(|next| Links { prev: NIL, next })
            .collect();
        order[last as usize].next = NIL;
        Self {
            index: Index::new(places),
            nodes: nodes.into_boxed_slice(),
            order: order.into_boxed_slice(),
            oldest: NIL,
            youngest: NIL,
            free: 0,
            free_len: last + 1,
        }
    }

    /// How many places there are.
    pub fn places(&self) -> usize {
        self.nodes.len()
    }

    /// Address that stands for this map in batches; it stays when the map moves.
    #[cfg(feature = "parts")]
    pub fn id(&self) -> usize {
        self.nodes.as_ptr().addr()
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

    /// A place for a mapping, indexed and the youngest in the order, its value what it was last; `None` where no place is
    /// free.
    #[inline(always)]
    pub fn insert(&mut self, key: Key) -> Option<u32> {
        let place = self.free;
        let &Links { next, .. } = self.order.get(place as usize)?;
        self.free = next;
        self.free_len -= 1;
        let below = match self.look(key) {
            Ok((at, top)) => {
                self.nodes[top as usize].above = place;
                self.index.set_place(at, place);
                top
            }
            Err(at) => {
                self.index.put(at, hash(key), place);
                NIL
            }
        };
        let node = &mut self.nodes[place as usize];
        node.key = key;
        node.below = below;
        self.link(place);
        Some(place)
    }

    /// The youngest place of `key`, and where the index has it; or where it would have it.
    #[inline(always)]
    fn look(&self, key: Key) -> Result<(usize, u32), usize> {
        let nodes = &self.nodes;
        self.index
            .find(hash(key), |place| nodes[place as usize].key == key)
    }

    /// The youngest of the places indexed by `key`.
    #[inline(always)]
    pub fn find(&self, key: Key) -> Option<Found> {
        let (at, place) = self.look(key).ok()?;
        Some(Found { at, place })
    }

    /// How to take out an indexed place.
    pub fn locate(&self, place: u32) -> Found {
        let key = self.nodes[place as usize].key;
        let found = self.look(key).ok();
        let (at, _) = found.expect("the place is indexed, so its key is");
        Found { at, place }
    }

    /// Makes the place unfindable.
    #[inline(always)]
    fn unindex(&mut self, Found { at, place }: Found) {
        let &Node { above, below, .. } = &self.nodes[place as usize];
        let is_top = self.index.place(at) == place;
        match (is_top, below) {
            (true, NIL) => self.index.remove(at),
            (true, below) => self.index.set_place(at, below),
            (false, below) => {
                self.nodes[above as usize].below = below;
                if below != NIL {
                    self.nodes[below as usize].above = above;
                }
            }
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

    /// What is kept at a place.
    #[cfg(feature = "parts")]
    #[inline(always)]
    pub fn value(&self, place: u32) -> &T {
        &self.nodes[place as usize].value
    }

    /// The same, to change it.
    #[inline(always)]
    pub fn value_mut(&mut self, place: u32) -> &mut T {
        &mut self.nodes[place as usize].value
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> usize {
        self.index.bytes() + size_of_val(&*self.nodes) + size_of_val(&*self.order)
    }
}
