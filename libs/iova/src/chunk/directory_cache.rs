//! Direct-mapped cache of the directory's blocks of chunks in one core, with the core's role in
//! each chunk: whether it is the chunk's designated remote freer.

use alloc::sync::Arc;

use super::Shared;
use super::layout::{BLOCK_CHUNKS, BLOCK_SHIFT, Block, Chunk, chunk_of};
use super::state::State;
use crate::{CHUNK_PAGES, IovaRange};

/// Blocks that a handle caches: 4 GiB of addresses in use.
const CACHED_BLOCKS: usize = if cfg!(loom) { 2 } else { 128 };

#[derive(Debug)]
pub(super) struct DirectoryCache {
    entries: [CachedBlock; CACHED_BLOCKS],
    /// Number of chunks in which it is the designated remote freer.
    gives: usize,
}

#[derive(Debug)]
struct CachedBlock {
    key: u64,
    block: Option<Arc<Block>>,
    /// This core's role in each chunk.
    roles: [Role; BLOCK_CHUNKS],
}

/// Role of a core in a chunk of another: the number of ranges it has freed there, or designated
/// remote freer. One byte, so that a place has 32 and is found by a shift.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Role(u8);

impl Role {
    const NONE: Self = Self(0);
    /// It is the designated remote freer.
    const REMOTE_FREER: Self = Self(u8::MAX);
}

#[cfg(not(any(loom, shuttle)))]
const _: () = assert!(size_of::<CachedBlock>() == 32);

/// Ranges that a core frees in a chunk of another before it becomes the designated remote freer. A
/// chunk that has one costs its owner a look at a line that the other writes at every free, for as
/// long as the other has the role; a few frees are collected instead
/// ([`MEETINGS`](super::owner_side::MEETINGS)).
const VISITS: u8 = if cfg!(any(loom, shuttle)) { 1 } else { 16 };

/// Returns the key of a page's block, and its place in the cache.
#[inline(always)]
fn key_and_place(page: u64) -> (u64, usize) {
    let key = page >> BLOCK_SHIFT;
    (key, key as usize % CACHED_BLOCKS)
}

/// The number of a page's chunk in its block.
#[inline(always)]
fn chunk_at(page: u64) -> usize {
    (page / CHUNK_PAGES) as usize % BLOCK_CHUNKS
}

impl DirectoryCache {
    pub(super) fn new() -> Self {
        Self {
            entries: [const {
                CachedBlock {
                    key: u64::MAX,
                    block: None,
                    roles: [Role::NONE; BLOCK_CHUNKS],
                }
            }; CACHED_BLOCKS],
            gives: 0,
        }
    }

    /// Returns the chunk of `page` if it is cached.
    #[inline(always)]
    pub(super) fn known(&self, page: u64) -> Option<&Chunk> {
        let (key, at) = key_and_place(page);
        let place = &self.entries[at];
        let block = place.block.as_deref().filter(|_| place.key == key)?;
        Some(chunk_of(block, page))
    }

    /// Returns the chunk of `page`; `None` where its block was never used, or lies in no zone. For
    /// a page of the block outside its zone this is a chunk that no core ever owns, in which
    /// nothing is ever allocated.
    #[inline]
    pub(super) fn chunk(&mut self, shared: &Shared, page: u64) -> Option<&Chunk> {
        let (key, at) = key_and_place(page);
        if self.entries[at].key != key {
            self.load(shared, page)?;
        }
        Some(chunk_of(self.entries[at].block.as_deref()?, page))
    }

    #[cold]
    #[inline(never)]
    fn load(&mut self, shared: &Shared, page: u64) -> Option<()> {
        let (key, at) = key_and_place(page);
        let block = Arc::clone(shared.zone_of(page)?.1.block(page)?);
        (0..BLOCK_CHUNKS).for_each(|chunk| self.let_go(at, chunk));
        let place = &mut self.entries[at];
        place.key = key;
        place.block = Some(block);
        Some(())
    }

    /// Frees the allocated range at a page, which is in this state, in a cached chunk of another
    /// core than `core`, which calls, if it is the chunk's designated remote freer. Returns whether
    /// it did.
    #[inline(always)]
    pub(super) fn give(&self, core: u64, page: u64, state: State) -> bool {
        let (key, at) = key_and_place(page);
        let CachedBlock { block, roles, .. } = &self.entries[at];
        debug_assert_eq!(self.entries[at].key, key, "of another block");
        let block = block
            .as_deref()
            .filter(|_| roles[chunk_at(page)] == Role::REMOTE_FREER);
        block.is_some_and(|block| chunk_of(block, page).give(core, page, state))
    }

    /// The same for a core that is not the designated remote freer, in a cached chunk. Returns
    /// `false` where the slow path must find out what is wrong or special.
    pub(super) fn free_foreign(&mut self, shared: &Shared, core: u64, range: IovaRange) -> bool {
        let page = range.first().raw();
        let (key, at) = key_and_place(page);
        debug_assert_eq!(self.entries[at].key, key, "of another block");
        let CachedBlock { block, roles, .. } = &mut self.entries[at];
        let Some(block) = block else {
            return false;
        };
        let (chunk, role) = (chunk_of(block, page), &mut roles[chunk_at(page)]);
        if *role == Role::REMOTE_FREER || !chunk.is_anothers(core) {
            return false;
        }
        if role.0 >= VISITS && chunk.become_giver(shared) {
            *role = Role::REMOTE_FREER;
            self.gives += 1;
            let state = chunk.state(page);
            return state.is_out_of(range) && chunk.give(core, page, state);
        }
        *role = Role((role.0 + 1).min(VISITS));
        chunk.check_foreign(range) && chunk.give_back(shared, range)
    }

    /// Gives up the role of designated remote freer in the chunk of `page`.
    pub(super) fn leave(&mut self, page: u64) {
        let (key, at) = key_and_place(page);
        if self.entries[at].key == key {
            self.let_go(at, chunk_at(page));
        }
    }

    /// Returns whether this core is the designated remote freer of any chunk.
    pub(super) fn is_remote_freer(&self) -> bool {
        self.gives > 0
    }

    /// Gives up the role of designated remote freer in all chunks.
    pub(super) fn leave_all(&mut self) {
        for at in 0..CACHED_BLOCKS {
            if self.gives == 0 {
                return;
            }
            (0..BLOCK_CHUNKS).for_each(|chunk| self.let_go(at, chunk));
        }
    }

    fn let_go(&mut self, at: usize, chunk: usize) {
        let CachedBlock { block, roles, .. } = &mut self.entries[at];
        if let (Role::REMOTE_FREER, Some(block)) = (roles[chunk], block) {
            block[chunk].let_go();
            self.gives -= 1;
        }
        roles[chunk] = Role::NONE;
    }
}
