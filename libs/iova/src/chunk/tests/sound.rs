//! Invariants of every space, checked at its end: in tests, and in those of crates with the feature
//! `testing`.

use super::layout::{FREE, MAX_ORDER};
use super::*;

impl Drop for Shared {
    /// Each word holds starts of its class only, and what is in the set of free chunks is empty.
    fn drop(&mut self) {
        for zone in &self.zones {
            for (page, chunk) in zone.known_chunks() {
                let is_free = zone.free.has(zone.index(page)) || zone.spent.has(zone.index(page));
                assert!(
                    !is_free || chunk.is_empty(),
                    "chunk {page:#x} is free and has classes"
                );

                for word in 0..WORDS {
                    let kind = chunk.kind(word);
                    let order = chunk.order(word);
                    let legal = if order <= MAX_ORDER { FULL[order] } else { 0 };
                    let held = get(chunk.held(word));
                    assert_eq!(
                        held & !legal,
                        0,
                        "word {word} of chunk {page:#x}, class {order}"
                    );
                    for at in 0..WORD_PAGES {
                        let state = chunk.state(word as u64 * WORD_PAGES + at);
                        assert!(
                            state.is_none() || held >> at & 1 != 0 && !is_free,
                            "page {at} of word {word} of chunk {page:#x}: {state:?}"
                        );
                        assert_eq!(state.turn(), get(chunk.taken(word)) >> at & 1);
                    }
                    let is_open = chunk.open() >> word & 1 != 0;
                    assert_eq!(
                        is_open,
                        kind == FREE || kind == RUN,
                        "word {word} of chunk {page:#x}"
                    );
                }
            }
        }
    }
}

impl ChunkAllocator {
    /// The core that owns the chunk of a page.
    pub fn owner(&self, page: IovaPfn) -> Option<CoreId> {
        let (_, zone) = self.shared.zone_of(page.raw())?;
        let owner = owner_of(chunk_of(zone.block(page.raw())?, page.raw()).tag());
        let core = usize::try_from(owner).ok()?.checked_sub(1)?;
        (core < self.cores()).then_some(CoreId(core))
    }
}

impl ChunkCore {
    /// The ranges that it keeps ready, which no other core can have.
    pub fn free_lists(&self) -> Vec<IovaRange> {
        self.local.cache().free_lists().all()
    }
}
