//! Index of the mappings of a container.

use std::collections::BTreeMap;

use dma_map::iova::{IovaPfn, IovaRange};

/// Mappings by IOVA, no two with a page in common, each with what belongs to it.
pub struct MappingIndex<T>(BTreeMap<u64, Mapping<T>>);

/// One mapping.
pub struct Mapping<T> {
    pub range: IovaRange,
    pub content: T,
}

impl<T> Default for MappingIndex<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> MappingIndex<T> {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a mapping that overlaps none.
    pub fn insert(&mut self, range: IovaRange, content: T) {
        debug_assert!(self.overlapping(range).is_none(), "{range} is mapped");
        let first = range.first().raw();
        self.0.insert(first, Mapping { range, content });
    }

    /// Takes the mapping out that begins with this page.
    pub fn remove(&mut self, first: IovaPfn) -> Option<Mapping<T>> {
        self.0.remove(&first.raw())
    }

    /// The last mapping that has a page of `range`.
    pub fn overlapping(&self, range: IovaRange) -> Option<&Mapping<T>> {
        let (_, mapping) = self.0.range(..=range.last().raw()).next_back()?;
        mapping.range.overlaps(range).then_some(mapping)
    }

    /// The mappings that have a page from `first` to `last`, ascending.
    pub fn touching(&self, first: u64, last: u64) -> impl DoubleEndedIterator<Item = &Mapping<T>> {
        let before = self.0.range(..first).next_back();
        let from = match before {
            Some((start, mapping)) if mapping.range.last().raw() >= first => *start,
            _ => first,
        };
        // Of an empty range of pages there is nothing, also in front of it.
        self.0
            .range(from..=last.max(from))
            .map(|(_, mapping)| mapping)
    }

    /// Moves all mappings of `other` here.
    pub fn append(&mut self, other: &mut Self) {
        self.0.append(&mut other.0);
    }

    /// Takes all mappings out, and gives what belonged to them.
    pub fn take(&mut self) -> impl Iterator<Item = T> + use<T> {
        let all = std::mem::take(&mut self.0);
        all.into_values().map(|mapping| mapping.content)
    }
}

/// The pages from the first mapping to the last, and how many of them are mapped; `None` without
/// mappings.
pub fn extent(ranges: impl Iterator<Item = IovaRange>) -> Option<(IovaRange, u64)> {
    let mut ranges = ranges.peekable();
    let first = ranges.peek()?.first();
    let (mut last, mut pages) = (first, 0);
    for range in ranges {
        last = range.last();
        pages += range.pages();
    }
    let whole = IovaRange::new(first, last.raw() - first.raw() + 1);
    Some((whole.expect("from one mapping to another"), pages))
}
