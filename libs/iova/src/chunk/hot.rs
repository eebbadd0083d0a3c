//! The chunks that a core has in mind: a direct-mapped cache of the directory, and of which of them it is the giver.

use alloc::sync::Arc;

use super::Shared;
use super::layout::Chunk;
use crate::{CHUNK_PAGES, IovaRange};

/// Chunks that a handle has in mind: 512 MiB of addresses in use.
const HOT: usize = if cfg!(loom) { 2 } else { 256 };

#[derive(Debug)]
pub(super) struct Hot {
    places: [Place; HOT],
    /// What this core is in the chunk of each place.
    roles: [Role; HOT],
    /// Where it is the giver.
    gives: usize,
}

#[derive(Debug)]
struct Place {
    key: u64,
    chunk: Option<Arc<Chunk>>,
}

/// What a core is in a chunk of another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    None,
    /// It has freed something.
    Visitor,
    Giver,
}

/// What a page's chunk is known by, and its place.
#[inline(always)]
fn key_and_place(page: u64) -> (u64, usize) {
    let key = page / CHUNK_PAGES;
    (key, key as usize % HOT)
}

impl Hot {
    pub(super) fn new() -> Self {
        Self {
            places: [const {
                Place {
                    key: u64::MAX,
                    chunk: None,
                }
            }; HOT],
            roles: [Role::None; HOT],
            gives: 0,
        }
    }

    /// The chunk of `page` if it is in mind.
    #[inline(always)]
    pub(super) fn known(&self, page: u64) -> Option<&Chunk> {
        let (key, at) = key_and_place(page);
        let place = &self.places[at];
        if place.key == key {
            place.chunk.as_deref()
        } else {
            None
        }
    }

    /// The chunk of `page`; `None` where the page is in no zone or its block was never used.
    #[inline]
    pub(super) fn chunk(&mut self, shared: &Shared, page: u64) -> Option<&Chunk> {
        let (key, at) = key_and_place(page);
        if self.places[at].key != key {
            self.load(shared, page)?;
        }
        self.places[at].chunk.as_deref()
    }

    #[cold]
    #[inline(never)]
    fn load(&mut self, shared: &Shared, page: u64) -> Option<()> {
        let (key, at) = key_and_place(page);
        let chunk = Arc::clone(shared.zone_of(page)?.1.block(page)?.chunk(page));
        self.let_go(at);
        self.places[at] = Place {
            key,
            chunk: Some(chunk),
        };
        Some(())
    }

    /// Frees in a chunk of another core than `core`, which calls, if it is the chunk's giver; whether it did.
    #[inline(always)]
    pub(super) fn give(&self, core: u64, range: IovaRange) -> bool {
        let (key, at) = key_and_place(range.first().raw());
        let Place { key: known, chunk } = &self.places[at];
        self.roles[at] == Role::Giver
            && *known == key
            && chunk.as_ref().is_some_and(|chunk| chunk.give(core, range))
    }

    /// The same if it is not the giver, and has the chunk in mind; `false` where the slow path must find out what is wrong
    /// or special.
    pub(super) fn free_foreign(&mut self, shared: &Shared, core: u64, range: IovaRange) -> bool {
        let (_, at) = key_and_place(range.first().raw());
        let Some(chunk) = &self.places[at].chunk else {
            return false;
        };
        if self.roles[at] == Role::Giver || !chunk.is_anothers(core) {
            return false;
        }
        // Once is no reason: whoever frees here and there would pay for becoming the giver and for letting go.
        if self.roles[at] == Role::Visitor && chunk.become_giver(shared) {
            self.roles[at] = Role::Giver;
            self.gives += 1;
            return chunk.give(core, range);
        }
        self.roles[at] = Role::Visitor;
        chunk.check_foreign(range) && chunk.give_back(shared, range)
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
        for at in 0..HOT {
            if self.gives == 0 {
                return;
            }
            self.let_go(at);
        }
    }

    fn let_go(&mut self, at: usize) {
        if let (Role::Giver, Some(chunk)) = (self.roles[at], &self.places[at].chunk) {
            chunk.let_go();
            self.gives -= 1;
        }
        self.roles[at] = Role::None;
    }
}
