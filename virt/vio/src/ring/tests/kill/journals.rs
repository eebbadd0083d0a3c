//! The trackers as journals, and stores that kill.

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};

use vhost_user::inflight::{MemRegion, Packed, PackedDesc, PackedRequest, Region, Slot, Split};

use crate::ring::{Journal, JournalError, RawDescriptor};

/// Panic payload of a simulated kill.
pub(super) struct Killed;

#[derive(Default)]
struct State {
    left: Option<u32>,
    stored: u32,
    /// Content of the ring before it was written, between `advance` and the first store behind it.
    before: Option<Vec<u8>>,
    /// Position at which a packed ring's batch begins.
    used: u16,
    in_commit: bool,
    /// `before`, if the death came at the first store of `commit`.
    at_commit: Option<Vec<u8>>,
}

/// Countdown of the stores that are left before a simulated kill.
#[derive(Clone, Default)]
pub(super) struct KillCountdown(Arc<Mutex<State>>);

impl KillCountdown {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().expect("nobody panics while holding it")
    }

    /// The process dies at the store of this number, counted from 1.
    pub(super) fn ends_at(&self, number: Option<u32>) {
        let mut state = self.state();
        state.left = number;
        state.at_commit = None;
    }

    /// Called before each store; does not return if it is not to happen.
    pub(super) fn store(&self) {
        let mut state = self.state();
        if let Some(left) = &mut state.left {
            *left -= 1;
            if *left == 0 {
                if state.in_commit {
                    state.at_commit = state.before.take();
                }
                state.in_commit = false;
                drop(state);
                resume_unwind(Box::new(Killed));
            }
        }
        if state.in_commit {
            // The first one behind the ring's has happened.
            state.before = None;
        }
        state.stored += 1;
    }

    pub(super) fn stored(&self) -> u32 {
        self.state().stored
    }

    pub(super) fn snapshot(&self, memory: Vec<u8>) {
        self.state().before = Some(memory);
    }

    pub(super) fn died_at_commit(&self) -> Option<Vec<u8>> {
        self.state().at_commit.take()
    }

    pub(super) fn used_before(&self) -> u16 {
        self.state().used
    }

    fn commit(&self, commit: impl FnOnce()) {
        self.state().in_commit = true;
        commit();
        self.state().in_commit = false;
    }
}

/// A region that outlives its users.
pub(super) struct SurvivingRegion {
    countdown: KillCountdown,
    memory: Arc<Mutex<MemRegion>>,
}

impl SurvivingRegion {
    pub(super) fn new(countdown: &KillCountdown, memory: &Arc<Mutex<MemRegion>>) -> Self {
        Self {
            countdown: countdown.clone(),
            memory: memory.clone(),
        }
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, MemRegion> {
        self.memory.lock().expect("nobody panics while holding it")
    }
}

impl Region for SurvivingRegion {
    fn size(&self) -> usize {
        self.memory().size()
    }

    fn load_u8(&self, at: usize) -> u8 {
        self.memory().load_u8(at)
    }

    fn load_u16(&self, at: usize) -> u16 {
        self.memory().load_u16(at)
    }

    fn load_u64(&self, at: usize) -> u64 {
        self.memory().load_u64(at)
    }

    fn store_u8(&mut self, at: usize, value: u8) {
        self.countdown.store();
        self.memory().store_u8(at, value);
    }

    fn store_u16(&mut self, at: usize, value: u16) {
        self.countdown.store();
        self.memory().store_u16(at, value);
    }

    fn store_u64(&mut self, at: usize, value: u64) {
        self.countdown.store();
        self.memory().store_u64(at, value);
    }
}

pub(super) struct SplitJournal {
    tracker: Split<SurvivingRegion>,
    countdown: KillCountdown,
}

impl SplitJournal {
    pub(super) fn new(tracker: Split<SurvivingRegion>, countdown: &KillCountdown) -> Self {
        let countdown = countdown.clone();
        Self { tracker, countdown }
    }
}

impl Journal for SplitJournal {
    fn begin(&mut self, head: u16, _: &[RawDescriptor]) -> Result<u16, JournalError> {
        self.tracker.begin(head).map_err(|_| JournalError)?;
        Ok(0)
    }

    fn complete(&mut self, head: u16, _: u16) {
        self.tracker.complete(head).expect("in flight");
    }

    fn advance(&mut self) {
        // Stores nothing, but a death between the list and the index must be tried.
        self.countdown.store();
    }

    fn commit(&mut self) {
        let Self { tracker, countdown } = self;
        countdown.commit(|| tracker.commit());
    }
}

pub(super) struct PackedJournal {
    tracker: Packed<SurvivingRegion>,
    countdown: KillCountdown,
}

impl PackedJournal {
    pub(super) fn new(tracker: Packed<SurvivingRegion>, countdown: &KillCountdown) -> Self {
        let countdown = countdown.clone();
        Self { tracker, countdown }
    }
}

impl Journal for PackedJournal {
    fn begin(&mut self, _: u16, descs: &[RawDescriptor]) -> Result<u16, JournalError> {
        let descs: Vec<PackedDesc> = descs
            .iter()
            .map(|desc| PackedDesc {
                addr: desc.addr,
                len: desc.len,
                id: desc.next,
                flags: desc.flags,
            })
            .collect();
        let slot = self.tracker.begin(&descs).map_err(|_| JournalError)?;
        Ok(slot.index())
    }

    fn complete(&mut self, _: u16, slot: u16) {
        self.tracker.complete(Slot::new(slot)).expect("in flight");
    }

    fn advance(&mut self) {
        self.countdown.state().used = self.tracker.used().idx;
        self.tracker.advance();
        // A death between the positions and the ring.
        self.countdown.store();
    }

    fn commit(&mut self) {
        let Self { tracker, countdown } = self;
        countdown.commit(|| tracker.commit());
    }
}

/// A request to be replayed, as a ring wants it.
pub(super) fn replay(request: PackedRequest) -> (u16, Vec<RawDescriptor>) {
    let descs = request.descs.iter().map(|desc| RawDescriptor {
        addr: desc.addr,
        len: desc.len,
        flags: desc.flags,
        next: desc.id,
    });
    (request.slot.index(), descs.collect())
}
