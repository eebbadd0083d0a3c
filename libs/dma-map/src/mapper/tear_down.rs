//! Tearing down idle mappings, by whoever takes them: their owner here, any other thread in `shared.rs`.

use iova::{CoreAllocator, IovaAllocator, IovaPfn, Pinned};

use super::MapperCore;
use super::core_map::Cache;
use super::shared::BATCH;
use crate::clock::Clock;
use crate::invalidate::{Command, InvalidateError, Invalidator};
use crate::reuse::{OptimisticCache, Progress};
use crate::table::IoMap;

/// Time between two reports of a reuse cache, in nanoseconds.
const PUBLISH_NS: u64 = 100_000_000;

/// Which idle mappings are to go.
#[derive(Clone, Copy)]
pub(super) enum Idle {
    /// Those that are due; where none is and no place is free, the oldest.
    Due,
    All,
}

/// Whether others who tear down some of the same core's are waited for.
#[derive(Clone, Copy)]
pub(super) enum Wait {
    No,
    Yes,
}

/// The pin of a mapping that starts at `page` and was torn down, by whomever. In its place there may be another's by now: then
/// its own has come out when that one came.
pub(super) fn take_pin(cache: &mut OptimisticCache, place: u32, page: IovaPfn) -> Option<Pinned> {
    cache
        .kept(place)
        .take_if(|pinned| pinned.range().first() == page)
}

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// Tears down idle mappings of this core, with one invalidation for each batch of them; before that, what waits since an
    /// invalidation failed. False where somebody else tears down some, who was not to be waited for.
    ///
    /// # Errors
    /// [`InvalidateError`]: what was to go waits, counted as stale, for whoever tears down some of this core's next.
    #[cold]
    pub(super) fn tear_down_idle(
        &mut self,
        which: Idle,
        wait: Wait,
    ) -> Result<bool, InvalidateError> {
        let is_done = self.tear_down_unpublished(which, wait)?;
        let now = self.shared.clock.coarse();
        if now.saturating_sub(self.published_ns) >= PUBLISH_NS {
            self.publish();
        }
        Ok(is_done)
    }

    fn tear_down_unpublished(&mut self, which: Idle, wait: Wait) -> Result<bool, InvalidateError> {
        let Cache::Idle(cache) = &mut self.cache else {
            return Ok(true);
        };
        let shared = &*self.shared;
        let line = &self.line;
        #[cfg(shuttle)]
        let nobodys = lines::Lock::new(super::lines::Leaving::default());
        let leaving = match wait {
            Wait::Yes => Some(line.leaving.lock()),
            Wait::No => line.leaving.try_lock(),
        };
        let Some(mut leaving) = leaving else {
            return Ok(false);
        };
        #[cfg(shuttle)]
        if crate::planted::has(crate::planted::Mistake::TakesUnlocked) {
            leaving = nobodys.lock();
        }
        let batch = leaving.batch();
        if !batch.is_empty()
            && let Some(expirer) = line.expirer()
        {
            shared.finish(line, &expirer, batch)?;
        }
        loop {
            let progress = match which {
                Idle::All => cache.drain(batch),
                Idle::Due => {
                    cache.make_room(shared.clock.coarse(), batch);
                    Progress::Done
                }
            };
            if !batch.is_empty() {
                shared.clear_expired(batch.entries());
                let room = &mut [Command::Domain; BATCH];
                let commands = shared.commands(batch.entries(), room);
                shared.invalidate(self.core, commands)?;
                for expired in batch.entries() {
                    if let Some(pinned) = take_pin(cache, expired.place, expired.range.first()) {
                        self.alloc.free_pinned(pinned);
                    }
                }
                cache.torn_down(batch, shared.clock.now());
            }
            if progress == Progress::Done {
                return Ok(true);
            }
        }
    }
}
