//! Model of a run of pieces: the mappings that a program has made, and the content that memory must
//! have.

use std::collections::BTreeMap;

use super::PAGE;

/// A mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First page of its IOVAs, from the start of the window.
    pub first: usize,
    /// Number of pages.
    pub pages: usize,
    /// First page of its memory.
    pub memory: usize,
}

impl Piece {
    /// Returns the first page behind it.
    pub fn end(&self) -> usize {
        self.first + self.pages
    }

    /// Returns whether `next` continues this mapping, in IOVAs and in memory: a layer below may
    /// have joined them.
    pub fn continues_in(&self, next: &Self) -> bool {
        self.end() == next.first && self.memory + self.pages == next.memory
    }
}

/// Mappings in a window of IOVAs, onto memory that several of them may share.
#[derive(Debug)]
pub struct Model {
    pieces: BTreeMap<usize, Piece>,
    window_pages: usize,
    memory: Vec<u8>,
}

impl Model {
    /// Creates a window without mappings, and memory of zeroes.
    pub fn new(window_pages: usize, memory_pages: usize) -> Self {
        Self {
            pieces: BTreeMap::new(),
            window_pages,
            memory: vec![0; memory_pages * PAGE],
        }
    }

    /// Returns the number of mappings.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the mapping of this rank in the order of IOVAs.
    pub fn nth(&self, rank: usize) -> Option<Piece> {
        self.pieces.values().nth(rank).copied()
    }

    /// Returns whether these pages are in the window, and in no mapping.
    pub fn is_free(&self, first: usize, pages: usize) -> bool {
        let end = first + pages;
        let last = self.pieces.range(..end).next_back();
        end <= self.window_pages && last.is_none_or(|(_, piece)| piece.end() <= first)
    }

    /// Returns whether these pages are memory.
    pub fn has_memory(&self, first: usize, pages: usize) -> bool {
        (first + pages) * PAGE <= self.memory.len()
    }

    /// Adds a mapping.
    pub fn insert(&mut self, piece: Piece) {
        debug_assert!(self.is_free(piece.first, piece.pages), "{piece:?}");
        self.pieces.insert(piece.first, piece);
    }

    /// Removes a mapping.
    pub fn remove(&mut self, piece: Piece) {
        self.pieces.remove(&piece.first);
    }

    /// Returns the mappings before and behind `piece`, which is removed, that continued into it, or
    /// it into them.
    pub fn neighbours(&self, piece: Piece) -> impl Iterator<Item = Piece> {
        let before = self.pieces.range(..piece.first).next_back();
        let before = before.filter(|(_, other)| other.continues_in(&piece));
        let behind = self.pieces.get(&piece.end());
        let behind = behind.filter(|other| piece.continues_in(other));
        before
            .map(|(_, other)| *other)
            .into_iter()
            .chain(behind.copied())
    }

    /// Notes that memory holds `data` at this byte.
    pub fn write(&mut self, at: usize, data: &[u8]) {
        self.memory[at..][..data.len()].copy_from_slice(data);
    }

    /// Returns the content that memory must have.
    pub fn memory(&self) -> &[u8] {
        &self.memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(first: usize, pages: usize, memory: usize) -> Piece {
        Piece {
            first,
            pages,
            memory,
        }
    }

    #[test]
    fn pages_are_free_only_beside_mappings_and_inside_the_window() {
        let mut model = Model::new(16, 4);
        model.insert(piece(4, 4, 0));
        for (first, pages, is_free) in [
            (0, 4, true),
            (0, 5, false),
            (7, 1, false),
            (8, 8, true),
            (8, 9, false),
            (5, 1, false),
            (3, 6, false),
        ] {
            assert_eq!(model.is_free(first, pages), is_free, "{first} {pages}");
        }
        assert!(model.has_memory(0, 4) && !model.has_memory(1, 4));
    }

    #[test]
    fn neighbours_continue_in_iovas_and_in_memory() {
        let mut model = Model::new(64, 64);
        let cut = piece(8, 8, 20);
        model.insert(piece(4, 4, 16));
        model.insert(piece(16, 2, 28));
        model.insert(piece(18, 2, 0));
        assert_eq!(
            model.neighbours(cut).collect::<Vec<_>>(),
            [piece(4, 4, 16), piece(16, 2, 28)]
        );
        assert_eq!(model.neighbours(piece(20, 1, 40)).count(), 0);
        assert_eq!(model.neighbours(piece(20, 1, 2)).count(), 1);
    }
}
