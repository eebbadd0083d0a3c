//! The chunks that a core has in mind: a direct-mapped cache of the directory, and of which of them it is the giver.

use alloc::sync::Arc;

use super::Shared;
use super::layout::Chunk;
use crate::{CHUNK_PAGES, IovaRange};

/// Chunks that a handle has in mind.
const HOT: usize = if cfg!(loom) { 2 } else { 64 };

#[derive(Debug)]
pub(super) struct Hot {
    places: [Place; HOT],
    /// Places where this core is a stranger who has freed something, and where it is the giver.
    visited: u64,
    gives: u64,
}

#[derive(Debug)]
struct Place {
    key: u64,
    chunk: Arc<Chunk>,
}

/// What a page's chunk is known by, and its place.
#[inline(always)]
fn key_and_place(page: u64) -> (u64, usize) {
    let key = page / CHUNK_PAGES;
    (key, key as usize % HOT)
}

impl Hot {
    pub(super) fn new() -> Self {
        // Looked at by nobody: its key is no chunk's.
        let none = Arc::new(Chunk::new(0));
        Self {
            places: core::array::from_fn(|_| Place {
                key: u64::MAX,
                chunk: Arc::clone(&none),
            }),
            visited: 0,
            gives: 0,
        }
    }

    /// The chunk of `page`; `None` where the page is in no zone or its block was never used.
    #[inline(always)]
    pub(super) fn chunk(&mut self, shared: &Shared, page: u64) -> Option<&Chunk> {
        let (key, at) = key_and_place(page);
        if self.places[at].key != key {
            self.load(shared, page)?;
        }
        Some(&self.places[at].chunk)
    }

    #[cold]
    #[inline(never)]
    fn load(&mut self, shared: &Shared, page: u64) -> Option<()> {
        let (key, at) = key_and_place(page);
        let chunk = Arc::clone(shared.zone_of(page)?.1.block(page)?.chunk(page));
        self.let_go(at);
        self.places[at] = Place { key, chunk };
        Some(())
    }

    /// Frees in a chunk of another core than `core`, which calls, if it is the chunk's giver; whether it did.
    #[inline(always)]
    pub(super) fn give(&self, core: u64, range: IovaRange) -> bool {
        let (key, at) = key_and_place(range.first().raw());
        self.gives >> at & 1 != 0
            && self.places[at].key == key
            && self.places[at].chunk.give(core, range)
    }

    /// The same if it is not the giver, and has the chunk in mind; `false` where the slow path must find out what is wrong
    /// or special.
    pub(super) fn free_foreign(&mut self, core: u64, range: IovaRange) -> bool {
        let (_, at) = key_and_place(range.first().raw());
        let (chunk, bit) = (&self.places[at].chunk, 1 << at);
        if self.gives & bit != 0 {
            return false;
        }
        // Once is no reason: whoever frees here and there would pay for becoming the giver and for letting go.
        if self.visited & bit != 0 && chunk.is_anothers(core) && chunk.become_giver() {
            self.gives |= bit;
            return chunk.give(core, range);
        }
        self.visited |= bit;
        chunk.is_anothers(core) && chunk.check_foreign(range) && chunk.give_back(range)
    }

    /// Is the giver no longer, where `page` lies.
    pub(super) fn leave(&mut self, page: u64) {
        let (key, at) = key_and_place(page);
        if self.places[at].key == key {
            self.let_go(at);
        }
    }

    /// Is the giver nowhere.
    pub(super) fn leave_all(&mut self) {
        (0..HOT).for_each(|at| self.let_go(at));
    }

    fn let_go(&mut self, at: usize) {
        if self.gives >> at & 1 != 0 {
            self.places[at].chunk.let_go();
        }
        self.gives &= !(1 << at);
        self.visited &= !(1 << at);
    }
}
