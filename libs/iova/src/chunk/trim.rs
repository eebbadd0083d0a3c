//! Giving back: words to their chunks, chunks to the space or to those that wait until their leaf
//! tables are reclaimed.
//!
//! A sweep visits the words that have something free.

use lines::Ordering;

use super::Shared;
use super::core_zone::CoreZones;
use super::layout::{AWAY, MAX_ORDER, NO_CORE, WORDS, get, owner_of, word_of};
use super::zone::Zone;
use crate::CHUNK_PAGES;

/// Number of empty chunks that a sweep leaves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RetainEmpty {
    /// A core that maps one page at a time must not fetch a chunk for each.
    One,
    Nothing,
}

impl CoreZones {
    /// Returns empty words to their chunks, and empty chunks to the space (or, where leaf tables
    /// are reclaimed, to those that may be retired).
    pub(super) fn sweep(&mut self, shared: &Shared, lane: usize, retain: RetainEmpty) {
        let zone = &shared.zones[lane];
        let own = &mut self.zones[lane];
        for order in 0..=MAX_ORDER {
            let (words, roomy) = (&mut own.words[order], &mut own.roomy);
            own.partial[order].retain(|base| {
                let chunk = zone.known(*base);
                let word = word_of(*base);
                if get(chunk.held(word)) != 0 {
                    return true;
                }
                if chunk.open() == 0 {
                    roomy.push(base / CHUNK_PAGES * CHUNK_PAGES);
                }
                chunk.unassign(word, order);
                *words -= 1;
                false
            });
        }
        own.emptied = 0;
        let most = match retain {
            RetainEmpty::One => own.own.len().saturating_sub(1),
            RetainEmpty::Nothing => usize::MAX,
        };
        let mut left = 0;
        own.roomy.retain(|page| {
            let goes = left < most && zone.known(*page).is_empty();
            if goes {
                left += 1;
                release(zone, *page, shared.retires);
            }
            !goes
        });
        if left > 0 {
            let owner = self.owner;
            own.own
                .retain(|page| owner_of(zone.known(*page).tag()) == owner);
            self.publish(shared);
        }
    }

    /// Publishes the number of chunks that this core keeps.
    pub(super) fn publish(&self, shared: &Shared) {
        let chunks = &shared.cores[self.id.0].chunks;
        chunks.store(self.chunks() as u64, Ordering::Relaxed);
    }
}

/// Takes the highest of the emptied chunks in which no remote core has claimed a range, out of
/// circulation ([`AWAY`]).
pub(super) fn take_spent(zone: &Zone) -> Option<u64> {
    let mut bound = usize::MAX;
    loop {
        let index = zone.spent.take_highest(bound)?;
        let page = zone.page(index);
        let chunk = zone.known(page);
        // Read-modify-write: a remote core that claims after this sees that nothing is allocated,
        // and releases its claim.
        if (0..WORDS).all(|word| chunk.claimed(word).fetch_or(0, Ordering::AcqRel) == 0) {
            chunk.set_owner(AWAY);
            return Some(page);
        }
        zone.put_spent(index);
        bound = index.checked_sub(1)?;
    }
}

/// Puts an emptied chunk where all cores find it.
pub(super) fn release(zone: &Zone, page: u64, is_spent: bool) {
    zone.known(page).set_owner(NO_CORE);
    let index = zone.index(page);
    match is_spent {
        true => zone.put_spent(index),
        false => zone.free.put(index),
    }
}
