//! Fake of the kernel's VFIO type 1 (version 2) interface, controlled by tests and without an
//! IOMMU.
//!
//! [`FakeKernel`] answers as Linux 6.1 was observed to: a map over a mapping is EEXIST; an unmap
//! that cuts a mapping is EINVAL, with nothing unmapped; an unmap over gaps removes whole mappings
//! and returns their bytes; an unmap where nothing is mapped succeeds with 0; a mapping above the
//! limit is ENOSPC; locked memory above its limit is ENOMEM.
//!
//! ```
//! use dma_map::iova::{Access, IovaPfn, IovaRange};
//! use vfio::testing::{FakeCall, FakeKernel};
//! use vfio::{DmaBuffer, Errno, ExternalMap};
//! let kernel = FakeKernel::new();
//! let map = ExternalMap::over(kernel.clone());
//! let range = IovaRange::new(IovaPfn::new(16), 1).unwrap();
//! kernel.fail_nth(1, Errno(5)); // the call after the next one
//! let page = std::sync::Arc::new(DmaBuffer::new(4096).unwrap());
//! map.map(range, page, 0, Access::Read).unwrap();
//! assert!(map.unmap(range).is_err());
//! assert!(kernel.vaddr_of(range.start()).is_some(), "it still reaches the page");
//! assert_eq!(kernel.calls()[1].call, FakeCall::Unmap { range });
//! ```
#![expect(
    unsafe_code,
    reason = "it answers for a device, of which there is none"
)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dma_map::address::{Iova, PAGE_SHIFT};
use dma_map::iova::{Access, IovaPfn, IovaRange};

use crate::error::Errno;
use crate::map::Kernel;

/// Number of mappings that type 1 allows in a container unless it is configured otherwise.
pub const ENTRY_LIMIT: usize = 65_535;
/// Time after which a wait of a test has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// Call to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeCall {
    /// `VFIO_IOMMU_MAP_DMA`.
    Map {
        /// Range to map.
        range: IovaRange,
        /// Address in this process.
        vaddr: u64,
        /// Permission.
        access: Access,
    },
    /// `VFIO_IOMMU_UNMAP_DMA`.
    Unmap {
        /// Range to unmap.
        range: IovaRange,
    },
    /// `VFIO_GROUP_UNSET_CONTAINER` of all groups.
    Detach,
}

/// A call and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FakeRecord {
    /// Call.
    pub call: FakeCall,
    /// Answer: bytes unmapped, 0 for other calls. `None` while the call is held.
    pub answer: Option<Result<u64, Errno>>,
}

/// Mapping that a device reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FakeMapping {
    /// IOVAs.
    pub range: IovaRange,
    /// Address in this process.
    pub vaddr: u64,
    /// Permission.
    pub access: Access,
}

/// Kernel side of one container. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct FakeKernel(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Mappings by first page.
    mapped: BTreeMap<u64, FakeMapping>,
    /// Bytes of all mappings.
    locked: u64,
    records: Vec<FakeRecord>,
    /// Planned errors, by the index of the call in `records`.
    errors: BTreeMap<usize, Errno>,
    /// Planned answers of unmaps that unmap nothing, by the index of the call.
    idle_unmaps: BTreeMap<usize, u64>,
    /// Error of every call for which no other is planned.
    error: Option<Errno>,
    entry_limit: usize,
    lock_limit: Option<u64>,
    allowed: Option<Vec<IovaRange>>,
    is_detachable: bool,
    /// Calls wait until they are released.
    is_held: bool,
    /// Number of waiting calls that may continue, the oldest first.
    permits: usize,
    /// Indices in `records` of the calls that wait.
    waiting: VecDeque<usize>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            mapped: BTreeMap::new(),
            locked: 0,
            records: Vec::new(),
            errors: BTreeMap::new(),
            idle_unmaps: BTreeMap::new(),
            error: None,
            entry_limit: ENTRY_LIMIT,
            lock_limit: None,
            allowed: None,
            is_detachable: true,
            is_held: false,
            permits: 0,
            waiting: VecDeque::new(),
        }
    }
}

impl FakeKernel {
    /// Creates a container in which nothing is mapped.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the largest number of mappings, [`ENTRY_LIMIT`] at first.
    pub fn limit_entries(&self, entries: usize) {
        self.state().entry_limit = entries;
    }

    /// Sets the largest number of bytes that may be locked, counted by mapping; at first there is
    /// no limit.
    pub fn limit_locked(&self, bytes: u64) {
        self.state().lock_limit = Some(bytes);
    }

    /// Allows these IOVAs only; all of them at first. Maps elsewhere are EINVAL.
    pub fn allow(&self, ranges: &[IovaRange]) {
        self.state().allowed = Some(ranges.to_vec());
    }

    /// Fails the `n`th call that begins from now on with `errno`, 0 being the next. The call has no
    /// effect.
    pub fn fail_nth(&self, n: usize, errno: Errno) {
        let mut state = self.state();
        let at = state.records.len() + n;
        state.errors.insert(at, errno);
    }

    /// Fails every call that is answered from now on, held ones included; `None` ends this.
    pub fn fail_all(&self, errno: Option<Errno>) {
        self.state().error = errno;
    }

    /// Makes the `n`th call that begins from now on, if it is an unmap, unmap nothing and return
    /// `bytes`.
    pub fn ignore_unmap_nth(&self, n: usize, bytes: u64) {
        let mut state = self.state();
        let at = state.records.len() + n;
        state.idle_unmaps.insert(at, bytes);
    }

    /// Cancels the effects of `fail_nth` and `ignore_unmap_nth` on calls to come.
    pub fn forget_plans(&self) {
        let mut state = self.state();
        state.errors.clear();
        state.idle_unmaps.clear();
    }

    /// Sets whether the groups can be detached from the container, as at first. Otherwise detaching
    /// is EBUSY, as if a device were still open.
    pub fn set_detachable(&self, is_detachable: bool) {
        self.state().is_detachable = is_detachable;
    }

    /// Holds every call that begins from now on, before it has an effect, until
    /// [`release`](Self::release).
    pub fn hold(&self) {
        self.state().is_held = true;
    }

    /// Releases one call: the one that has waited longest, or, where none waits, the next one.
    pub fn release_one(&self) {
        self.state().permits += 1;
        self.0.changed.notify_all();
    }

    /// Releases all calls, and holds none any more.
    pub fn release(&self) {
        let mut state = self.state();
        (state.is_held, state.permits) = (false, 0);
        drop(state);
        self.0.changed.notify_all();
    }

    /// Waits until `count` calls have begun in all, held ones included.
    ///
    /// # Panics
    /// They have not within a minute.
    pub fn wait_begun(&self, count: usize) {
        self.wait("begun", count, |state| state.records.len());
    }

    /// Waits until `count` calls have been answered in all.
    ///
    /// # Panics
    /// They have not within a minute.
    pub fn wait_answered(&self, count: usize) {
        self.wait("been answered", count, |state| {
            let records = state.records.iter();
            records.filter(|record| record.answer.is_some()).count()
        });
    }

    /// Number of calls that are held now, without those already released.
    pub fn held(&self) -> usize {
        let state = self.state();
        match state.is_held {
            true => state.waiting.len().saturating_sub(state.permits),
            false => 0,
        }
    }

    /// All calls, in the order in which they began.
    pub fn calls(&self) -> Vec<FakeRecord> {
        self.state().records.clone()
    }

    /// Everything that is mapped, by IOVA.
    pub fn mapped(&self) -> Vec<FakeMapping> {
        self.state().mapped.values().copied().collect()
    }

    /// Number of mappings.
    pub fn mappings(&self) -> usize {
        self.state().mapped.len()
    }

    /// Bytes of all mappings, as they are accounted as locked.
    pub fn locked(&self) -> u64 {
        self.state().locked
    }

    /// The mapping that a device's access to this IOVA goes through.
    pub fn mapping_at(&self, iova: Iova) -> Option<FakeMapping> {
        self.state().mapping_at(IovaPfn::of(iova).raw())
    }

    /// Address in this process that a device's access to this IOVA reaches.
    pub fn vaddr_of(&self, iova: Iova) -> Option<u64> {
        let mapping = self.mapping_at(iova)?;
        Some(mapping.vaddr + iova.offset_from(mapping.range.start())?)
    }

    /// Whether a device reaches the page of this number.
    pub fn reaches(&self, page: u64) -> bool {
        self.state().mapping_at(page).is_some()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        let state = self.0.state.lock();
        state.unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, what: &str, count: usize, of: impl Fn(&State) -> usize) {
        let is_short = |state: &mut State| of(state) < count;
        let changed = &self.0.changed;
        let waited = changed.wait_timeout_while(self.state(), PATIENCE, is_short);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        assert!(
            !timeout.timed_out(),
            "{} calls of {count} have {what}: {state:?}",
            of(&state)
        );
    }

    /// Records a call, waits while calls are held, and answers it.
    fn call(&self, call: FakeCall) -> Result<u64, Errno> {
        let mut state = self.state();
        let place = state.records.len();
        let answer = None;
        state.records.push(FakeRecord { call, answer });
        state.waiting.push_back(place);
        self.0.changed.notify_all();
        let is_held = |state: &mut State| !state.lets_in(place);
        let waited = self.0.changed.wait_while(state, is_held);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        if state.is_held {
            state.permits -= 1;
        }
        state.waiting.retain(|waiting| *waiting != place);
        let answer = state.answer(call, place);
        state.records[place].answer = Some(answer);
        drop(state);
        self.0.changed.notify_all();
        answer
    }
}

impl State {
    fn lets_in(&self, place: usize) -> bool {
        !self.is_held || self.permits > 0 && self.waiting.front() == Some(&place)
    }

    fn answer(&mut self, call: FakeCall, place: usize) -> Result<u64, Errno> {
        let planned = self.errors.remove(&place);
        let idle_unmap = self.idle_unmaps.remove(&place);
        if let Some(errno) = planned.or(self.error) {
            return Err(errno);
        }
        match call {
            FakeCall::Map {
                range,
                vaddr,
                access,
            } => {
                let mapping = FakeMapping {
                    range,
                    vaddr,
                    access,
                };
                self.map(mapping).map(|()| 0)
            }
            FakeCall::Unmap { range } => idle_unmap.map_or_else(|| self.unmap(range), Ok),
            FakeCall::Detach if self.is_detachable => {
                self.mapped.clear();
                self.locked = 0;
                Ok(0)
            }
            FakeCall::Detach => Err(Errno(libc::EBUSY)),
        }
    }

    fn mapping_at(&self, page: u64) -> Option<FakeMapping> {
        let (_, mapping) = self.mapped.range(..=page).next_back()?;
        (page <= mapping.range.last().raw()).then_some(*mapping)
    }

    /// Maps, with the checks in the kernel's order.
    fn map(&mut self, mapping: FakeMapping) -> Result<(), Errno> {
        let range = mapping.range;
        let len = range.len().ok_or(Errno(libc::EINVAL))?;
        if !mapping.vaddr.is_multiple_of(1 << PAGE_SHIFT) {
            return Err(Errno(libc::EINVAL));
        }
        let before = self.mapped.range(..=range.last().raw()).next_back();
        if before.is_some_and(|(_, mapping)| mapping.range.overlaps(range)) {
            return Err(Errno(libc::EEXIST));
        }
        if self.mapped.len() >= self.entry_limit {
            return Err(Errno(libc::ENOSPC));
        }
        let allowed = self.allowed.as_ref();
        if allowed.is_some_and(|allowed| !allowed.iter().any(|one| one.contains(range))) {
            return Err(Errno(libc::EINVAL));
        }
        let locked = self.locked.saturating_add(len);
        if self.lock_limit.is_some_and(|limit| locked > limit) {
            return Err(Errno(libc::ENOMEM));
        }
        self.locked = locked;
        self.mapped.insert(range.first().raw(), mapping);
        Ok(())
    }

    fn unmap(&mut self, range: IovaRange) -> Result<u64, Errno> {
        let (first, last) = (range.first().raw(), range.last().raw());
        let ends = [first, last]
            .into_iter()
            .filter_map(|page| self.mapping_at(page));
        if ends
            .into_iter()
            .any(|mapping| !range.contains(mapping.range))
        {
            return Err(Errno(libc::EINVAL));
        }
        let inside: Vec<u64> = self.mapped.range(first..=last).map(|(at, _)| *at).collect();
        let unmapped = inside.iter().filter_map(|at| self.mapped.remove(at));
        let pages: u64 = unmapped.map(|mapping| mapping.range.pages()).sum();
        self.locked -= pages << PAGE_SHIFT;
        Ok(pages << PAGE_SHIFT)
    }
}

// SAFETY: no device reaches memory through the fake, before an unmap or after.
unsafe impl Kernel for FakeKernel {
    unsafe fn map_dma(&self, range: IovaRange, vaddr: u64, access: Access) -> Result<(), Errno> {
        let call = FakeCall::Map {
            range,
            vaddr,
            access,
        };
        self.call(call).map(|_| ())
    }

    fn unmap_dma(&self, range: IovaRange) -> Result<u64, Errno> {
        self.call(FakeCall::Unmap { range })
    }

    fn detach_all(&self) -> Result<(), Errno> {
        self.call(FakeCall::Detach).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u64, pages: u64) -> IovaRange {
        IovaRange::new(IovaPfn::new(first), pages).unwrap()
    }

    fn map(kernel: &FakeKernel, first: u64, pages: u64) -> Result<(), Errno> {
        // SAFETY: no device reaches anything.
        unsafe { kernel.map_dma(range(first, pages), first << 20, Access::ReadWrite) }
    }

    /// The table of what Linux 6.1 answered, line by line.
    #[test]
    fn answers_are_those_of_type_1() {
        let kernel = FakeKernel::new();
        map(&kernel, 16, 16).unwrap();
        assert_eq!(map(&kernel, 31, 2), Err(Errno(libc::EEXIST)));
        for part in [range(16, 8), range(24, 8), range(17, 2), range(10, 10)] {
            assert_eq!(kernel.unmap_dma(part), Err(Errno(libc::EINVAL)), "{part}");
        }
        assert_eq!(kernel.mappings(), 1);
        assert_eq!(kernel.unmap_dma(range(15, 18)), Ok(16 << 12), "wider");
        assert_eq!(kernel.unmap_dma(range(16, 16)), Ok(0), "nothing there");
        for at in (0..16).step_by(2) {
            map(&kernel, 0x200 + at, 1).unwrap();
        }
        assert_eq!(kernel.unmap_dma(range(0x200, 16)), Ok(8 << 12), "gaps");
        (0..4).for_each(|at| map(&kernel, at, 1).unwrap());
        assert_eq!(kernel.unmap_dma(range(1, 2)), Ok(2 << 12), "middle 2 of 4");
        kernel.detach_all().unwrap();
        (0..ENTRY_LIMIT as u64).for_each(|at| map(&kernel, at, 1).unwrap());
        assert_eq!(map(&kernel, 1 << 20, 1), Err(Errno(libc::ENOSPC)));
        assert_eq!(kernel.unmap_dma(range(0, 1 << 30)), Ok(65_535 << 12));
        kernel.limit_locked(256 << 12);
        (0..256).for_each(|at| map(&kernel, at, 1).unwrap());
        assert_eq!(map(&kernel, 256, 1), Err(Errno(libc::ENOMEM)), "the 257th");
        kernel.allow(&[range(0, 0xfee00), range(0xfef00, 16)]);
        assert_eq!(map(&kernel, 0xfee00, 1), Err(Errno(libc::EINVAL)), "MSI");
    }

    #[test]
    fn held_calls_have_no_effect_until_they_are_released() {
        let kernel = FakeKernel::new();
        kernel.hold();
        kernel.fail_nth(1, Errno(libc::EIO));
        std::thread::scope(|scope| {
            let maps = [1, 2, 3].map(|at| {
                let begun = kernel.calls().len();
                let kernel = &kernel;
                let thread = scope.spawn(move || map(kernel, at, 1));
                kernel.wait_begun(begun + 1);
                thread
            });
            assert_eq!((kernel.held(), kernel.mappings()), (3, 0));
            kernel.release_one();
            kernel.wait_answered(1);
            assert_eq!((kernel.held(), kernel.mappings()), (2, 1));
            assert!(kernel.reaches(1) && !kernel.reaches(2));
            kernel.release();
            let answers = maps.map(|thread| thread.join().unwrap());
            assert_eq!(answers, [Ok(()), Err(Errno(libc::EIO)), Ok(())]);
        });
        let calls = kernel.calls();
        assert_eq!(calls[1].answer, Some(Err(Errno(libc::EIO))));
        assert_eq!(kernel.vaddr_of(Iova::new(0x3123)), Some(0x30_0123));
    }
}
