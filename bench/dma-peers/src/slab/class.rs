//! Slabs of one class, and the free objects in them.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec,
    vec::Vec,
};

use super::SLAB_ORDER;

/// 4,096 pages cut into objects of one size.
struct Slab {
    /// A bit per object, set where it is free and in no core's list.
    free: Vec<u64>,
    count: u32,
}

/// The slabs of one order.
pub(super) struct Class {
    order: u8,
    /// Slabs by number: first page shifted right by [`SLAB_ORDER`].
    slabs: BTreeMap<u64, Slab>,
    /// Those with free objects; the highest is used first.
    partial: BTreeSet<u64>,
}

impl Slab {
    fn new(order: u8) -> Self {
        let objects = 1usize << (SLAB_ORDER - order);
        // With 512 pages each there are 8 objects: part of a word.
        let word = match objects {
            64.. => u64::MAX,
            few => (1 << few) - 1,
        };
        Self {
            free: vec![word; objects.div_ceil(64)],
            count: objects as u32,
        }
    }

    fn pop(&mut self) -> Option<u64> {
        let (at, word) = self.free.iter_mut().enumerate().find(|(_, w)| **w != 0)?;
        let bit = word.trailing_zeros();
        *word &= *word - 1;
        self.count -= 1;
        Some(at as u64 * 64 + u64::from(bit))
    }
}

impl Class {
    pub(super) fn new(order: u8) -> Self {
        Self {
            order,
            slabs: BTreeMap::new(),
            partial: BTreeSet::new(),
        }
    }

    /// A free object's first page.
    pub(super) fn pop(&mut self) -> Option<u64> {
        let &number = self.partial.last()?;
        let slab = self.slabs.get_mut(&number)?;
        let object = slab.pop()?;
        if slab.count == 0 {
            self.partial.remove(&number);
        }
        Some((number << SLAB_ORDER) + (object << self.order))
    }

    /// Whether an object of this class's size lies in one of its slabs.
    pub(super) fn has_slab_of(&self, first: u64) -> bool {
        self.slabs.contains_key(&(first >> SLAB_ORDER))
    }

    /// Takes back a free object of one of its slabs. The number of a slab that is all free now, and
    /// the class's no more.
    pub(super) fn push(&mut self, first: u64) -> Option<u64> {
        let number = first >> SLAB_ORDER;
        let slab = self.slabs.get_mut(&number)?;
        let object = (first & ((1 << SLAB_ORDER) - 1)) >> self.order;
        let (word, bit) = (object as usize / 64, object % 64);
        debug_assert_eq!(slab.free[word] >> bit & 1, 0, "freed once");
        slab.free[word] |= 1 << bit;
        slab.count += 1;
        if slab.count == 1 << (SLAB_ORDER - self.order) {
            self.slabs.remove(&number);
            self.partial.remove(&number);
            return Some(number);
        }
        self.partial.insert(number);
        None
    }

    /// Adds a slab, all of it free.
    pub(super) fn add(&mut self, number: u64) {
        self.slabs.insert(number, Slab::new(self.order));
        self.partial.insert(number);
    }

    /// Gives up every slab with a free object: its number, and the first pages of its objects that
    /// are out or in lists.
    pub(super) fn dissolve(&mut self) -> impl Iterator<Item = (u64, Vec<u64>)> {
        let order = self.order;
        let partial = core::mem::take(&mut self.partial).into_iter();
        partial.filter_map(move |number| {
            let slab = self.slabs.remove(&number)?;
            let objects = 0..1u64 << (SLAB_ORDER - order);
            let is_used = |object: &u64| slab.free[*object as usize / 64] >> (object % 64) & 1 == 0;
            let first = |object: u64| (number << SLAB_ORDER) + (object << order);
            Some((number, objects.filter(is_used).map(first).collect()))
        })
    }

    pub(super) fn bytes(&self) -> usize {
        let bitmaps = self.slabs.values().map(|s| s.free.capacity() * 8);
        let entry = size_of::<(u64, Slab)>() + 2 * size_of::<u64>();
        bitmaps.sum::<usize>() + self.slabs.len() * entry * 4 / 3
    }
}
