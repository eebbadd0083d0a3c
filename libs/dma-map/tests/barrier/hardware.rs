//! Hardware, clock and table of a mapper, as they may behave at their worst: hardware that takes
//! its time, fails and completes in any order, and a clock and a table at which a core may be
//! stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use address::{Iova, PhysAddr};
use dma_map::invalidate::{Command, InvalidateError, Invalidator, Ticket};
use dma_map::table::{
    IoMap, MapError, PageTable, RetiredTable, TableStats, Translation, UnmapError,
};
use dma_map::testing::ModelIotlb;
use dma_map::{Clock, ManualClock};
use iova::{Access, IovaRange};

use crate::turns::{Random, SwitchPoint, at_once, point};

/// Invalidations that fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failing {
    None,
    /// One of eight, carried out or not.
    Some,
    /// All, and nothing is carried out.
    All,
}

struct Pending {
    commands: Vec<Command>,
    /// Carried out already, but not yet reported.
    is_obeyed: bool,
    fails: bool,
    /// Polls until it is reported.
    looks: u64,
}

struct State {
    random: Random,
    failing: Failing,
    issued: u64,
    pending: BTreeMap<u64, Pending>,
    failed: BTreeSet<u64>,
    failures: u64,
}

/// An IOMMU that holds what it has cached until an invalidation has covered it. A batch is carried
/// out at any moment between its submission and its completion; it may fail at either, carried out
/// or not.
pub struct Hardware {
    pub iotlb: Arc<ModelIotlb>,
    state: Mutex<State>,
}

impl Hardware {
    pub fn new(seed: u64) -> Self {
        Self {
            iotlb: Arc::new(ModelIotlb::new()),
            state: Mutex::new(State {
                random: Random::new(seed ^ 0xa5a5),
                failing: Failing::None,
                issued: 0,
                pending: BTreeMap::new(),
                failed: BTreeSet::new(),
                failures: 0,
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the outcome of batches submitted from now on.
    pub fn set_failing(&self, failing: Failing) {
        self.state().failing = failing;
    }

    /// Batches that failed so far.
    pub fn failures(&self) -> u64 {
        self.state().failures
    }

    fn obey(&self, commands: &[Command]) {
        // No stop: `state` is held.
        let done = at_once(|| {
            let ticket = self.iotlb.submit(commands)?;
            self.iotlb.poll(ticket)
        });
        let done = done.expect("nobody stops while it has the model's lock");
        assert_eq!(done, Ok(true), "the model answers");
    }
}

const DEAD: InvalidateError = InvalidateError::TimedOut { waited_ns: 1 };

impl Invalidator for Hardware {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        point(SwitchPoint::Submit);
        let mut state = self.state();
        let fails = match state.failing {
            Failing::None => false,
            Failing::Some => state.random.one_in(8),
            Failing::All => true,
        };
        let is_obeyed = state.failing != Failing::All && state.random.one_in(2);
        if is_obeyed {
            self.obey(commands);
        }
        if fails && state.random.one_in(2) {
            state.failures += 1;
            return Err(DEAD);
        }
        state.issued += 1;
        let ticket = state.issued;
        let looks = state.random.below(4);
        let pending = Pending {
            commands: commands.to_vec(),
            is_obeyed,
            fails,
            looks,
        };
        state.pending.insert(ticket, pending);
        drop(state);
        point(SwitchPoint::Submit);
        Ok(Ticket(ticket))
    }

    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        point(SwitchPoint::Poll);
        let mut state = self.state();
        if state.failed.contains(&ticket.0) {
            return Err(DEAD);
        }
        let Some(pending) = state.pending.get_mut(&ticket.0) else {
            return Ok(true);
        };
        if pending.looks > 0 {
            pending.looks -= 1;
            return Ok(false);
        }
        let pending = state.pending.remove(&ticket.0).expect("just looked at");
        if pending.fails {
            state.failures += 1;
            state.failed.insert(ticket.0);
            return Err(DEAD);
        }
        if !pending.is_obeyed {
            self.obey(&pending.commands);
        }
        Ok(true)
    }

    fn is_idle(&self) -> bool {
        self.state().random.one_in(2)
    }

    fn whole_domain_from(&self) -> usize {
        4
    }
}

/// Clock that stands still until it is advanced.
#[derive(Default)]
pub struct Time(pub ManualClock);

impl Clock for Time {
    fn now(&self) -> u64 {
        point(SwitchPoint::Clock);
        self.0.now()
    }

    fn coarse(&self) -> u64 {
        point(SwitchPoint::Clock);
        self.0.now()
    }

    fn advance(&self, now: u64) {
        self.0.advance(now);
    }
}

/// A table at which cores stop.
pub struct Stopping<T>(pub T);

impl<T: IoMap> IoMap for Stopping<T> {
    type Error = T::Error;

    fn map(
        &self,
        range: IovaRange,
        phys: PhysAddr,
        access: Access,
    ) -> Result<(), MapError<T::Error>> {
        point(SwitchPoint::Map);
        let done = self.0.map(range, phys, access);
        point(SwitchPoint::Map);
        done
    }

    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError<T::Error>> {
        point(SwitchPoint::Unmap);
        let done = self.0.unmap(range);
        point(SwitchPoint::Unmapped);
        done
    }

    fn lookup(&self, iova: Iova) -> Option<Translation> {
        self.0.lookup(iova)
    }
}

#[expect(unsafe_code, reason = "forwards the unsafe methods of the trait")]
impl<T: PageTable> PageTable for Stopping<T> {
    fn root(&self) -> PhysAddr {
        self.0.root()
    }

    fn stats(&self) -> TableStats {
        self.0.stats()
    }

    unsafe fn retire_leaf(&self, chunk: IovaRange) -> Option<RetiredTable> {
        point(SwitchPoint::Unmap);
        // SAFETY: what the caller promises is what is asked for.
        unsafe { self.0.retire_leaf(chunk) }
    }

    unsafe fn release(&self, retired: RetiredTable) {
        point(SwitchPoint::Unmap);
        // SAFETY: as above.
        unsafe { self.0.release(retired) };
    }
}
