//! One core's handle, and how it maps.

use alloc::sync::Arc;
use core::{cell::Cell, marker::PhantomData, num::NonZeroU64};

use address::{Iova, PAGE_SIZE, PhysAddr};
use iova::{Access, AllocError, CoreAllocator, CoreId, IovaAllocator, IovaRange, Request};
use lines::Ordering;

use super::error::DmaMapError;
use super::first_pages;
use super::limits::{DeviceLimits, Reach};
use super::lines::CoreLines;
use super::policy::{Reuse, Teardown};
use super::queue::Queue;
use super::reclaim::Quarantine;
use super::request::{Direction, Mapping, Segment};
use super::shared::Shared;
use crate::clock::Clock;
use crate::invalidate::Invalidator;
use crate::reuse::{Key, OptimisticCache, SharingTable};
use crate::table::{IoMap, MapError};

/// The parts of a [`Mapping`]: address, length, pages allocated, key.
type Parts = (Iova, NonZeroU64, u64, Option<Key>);

/// Places of the queue under policies that queue only what an invalidation failed for.
const STRICT_ROOM: usize = 64;

/// What finds mappings again. An enumeration, so that the calls for each mapping are inlined.
#[derive(Default)]
#[expect(
    clippy::large_enum_variant,
    reason = "one per core, and the large one is the one that matters"
)]
pub(super) enum Cache {
    /// Nothing.
    #[default]
    Never,
    Shared(Arc<SharingTable>),
    /// With the pins of what it keeps: a second unmap of an idle mapping, by any core, is refused by the allocator.
    Idle(OptimisticCache),
}

/// Whether a mapping may be found again.
#[derive(Clone, Copy)]
enum MayReuse {
    No,
    Yes,
}

/// One core's way to map and unmap. It may move to another thread, and is used by one at a time.
///
/// Dropping it gives everything back; what an invalidation that fails then keeps from being given back is
/// adopted by the other cores after a later one.
pub struct MapperCore<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> {
    pub(super) shared: Arc<Shared<A, T, I, C>>,
    pub(super) alloc: A::Core,
    pub(super) core: usize,
    /// Ours of the mapper's lines.
    pub(super) line: Arc<CoreLines>,
    pub(super) queue: Queue,
    pub(super) quarantine: Quarantine,
    pub(super) cache: Cache,
    /// What our line said when we last looked.
    pub(super) notices: u64,
    /// Age of the queue's oldest entry at which it is flushed, in nanoseconds.
    pub(super) age_ns: u64,
    /// Mappings freed since chunks were last looked for.
    pub(super) freed: u32,
    /// When the reuse cache last reported what it has counted.
    pub(super) published_ns: u64,
    /// Not `Sync`: one thread at a time.
    is_not_sync: PhantomData<Cell<()>>,
}

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    pub(super) fn new(shared: Arc<Shared<A, T, I, C>>, alloc: A::Core) -> Self {
        let core = alloc.core().0;
        shared.used.fetch_max(core + 1, Ordering::AcqRel);
        let line = Arc::clone(&shared.lines[core]);
        let policy = &shared.policy;
        // Whoever had the handle before left nothing in a queue, and nothing open on the line.
        let queue = Queue::new(
            policy.window().map_or(STRICT_ROOM, |window| window.entries),
            line.owner.queued.load(Ordering::Relaxed),
            matches!(policy.teardown, Teardown::Async(_)),
        );
        let quarantine = Quarantine::new(line.owner.retired.load(Ordering::Relaxed));
        let mut cache = core::mem::take(&mut *line.left.lock());
        if let Cache::Never = cache {
            cache = match (policy.reuse, &shared.sharing) {
                (Reuse::Shared, Some(table)) => Cache::Shared(Arc::clone(table)),
                (Reuse::Optimistic(idle), _) => {
                    Cache::Idle(OptimisticCache::new(idle.quota, idle.residency_ns()))
                }
                _ => Cache::Never,
            };
        }
        *line.expirer.lock() = match &cache {
            Cache::Idle(cache) => Some(cache.slab()),
            Cache::Never | Cache::Shared(_) => None,
        };
        Self {
            age_ns: shared.age_ns,
            // Not what it says now: what was left there is looked at once.
            notices: line.flusher.notices.load(Ordering::Relaxed).wrapping_sub(1),
            shared,
            alloc,
            core,
            line,
            queue,
            quarantine,
            cache,
            freed: 0,
            published_ns: 0,
            is_not_sync: PhantomData,
        }
    }

    /// Which core this is.
    pub fn id(&self) -> CoreId {
        self.alloc.core()
    }

    /// Maps memory as one stretch of IOVAs. Several segments have to meet at page boundaries. The device may do
    /// what `direction` says, with the whole of each page that the memory touches.
    ///
    /// A page may be mapped any number of times, with any directions.
    ///
    /// # Errors
    /// [`DmaMapError`]; nothing is mapped then.
    // Inlined whatever its size, so that the mapping does not pass through memory.
    #[inline(always)]
    pub fn map(
        &mut self,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        self.map_within(None, segments, direction, MayReuse::Yes)
    }

    /// As [`map`](Self::map), for memory that stays mapped for long (rings, mailboxes): the mapping takes no part in
    /// reuse.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn map_coherent(
        &mut self,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        self.map_within(None, segments, direction, MayReuse::No)
    }

    /// As [`map_coherent`](Self::map_coherent), for a device of the domain that takes less than the mapper's own limits: a lower
    /// highest address, shorter segments, a boundary that none may cross. What the mapper's own limits exclude stays excluded.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn map_for(
        &mut self,
        device: &DeviceLimits,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        self.map_within(Some(device), segments, direction, MayReuse::No)
    }

    #[inline(always)]
    fn map_within(
        &mut self,
        device: Option<&DeviceLimits>,
        segments: &[Segment],
        direction: Direction,
        may_reuse: MayReuse,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        // The parts one by one, and one place where they become a mapping: it stays in registers.
        let (iova, len, allocated, key) = match segments {
            &[segment] => self.map_one(device, segment, direction, may_reuse)?,
            segments => {
                let (iova, len, allocated) = self.map_joined(device, segments, direction)?;
                (iova, len, allocated, None)
            }
        };
        Ok(Mapping {
            iova,
            len,
            allocated,
            domain: self.domain(),
            key,
        })
    }

    #[inline(always)]
    fn map_one(
        &mut self,
        device: Option<&DeviceLimits>,
        segment: Segment,
        direction: Direction,
        may_reuse: MayReuse,
    ) -> Result<Parts, DmaMapError<T::Error>> {
        let (Some(pages), Some(len)) = (segment.pages(), NonZeroU64::new(segment.len)) else {
            return Err(no_segment(0, segment));
        };
        // Its numbers one by one: as a whole it would lie in memory for those who are seldom called.
        let reach = self.reach(device);
        if segment.len > reach.max_len {
            return Err(too_long(segment.len, reach.max_len));
        }
        if self.shared.policy.is_off {
            let iova = match reach.has(segment) {
                true => Iova::new(segment.phys.raw()),
                false => self.map_off(device, segment, direction)?,
            };
            return Ok((iova, len, 0, None));
        }
        let phys = segment.phys.align_down(PAGE_SIZE);
        let access = direction.access();
        let key = match (&self.cache, may_reuse) {
            (Cache::Never, _) | (_, MayReuse::No) => None,
            _ => Key::new(phys, pages, access),
        };
        let (start, allocated) = match key {
            Some(key) => self.find_or_make(key)?,
            None => {
                let request = reach.request(pages)?;
                let allocated = self.make(request, pages, phys, access)?;
                (allocated.start(), allocated.pages())
            }
        };
        let iova = Iova::new(start.raw() | segment.phys.offset_in(PAGE_SIZE));
        Ok((iova, len, allocated, key))
    }

    /// A mapping that is found, or else made. Gives its start, and the pages allocated where they are known, else 0.
    #[inline(always)]
    fn find_or_make(&mut self, key: Key) -> Result<(Iova, u64), DmaMapError<T::Error>> {
        if let Cache::Idle(cache) = &mut self.cache
            && let Some((range, pinned)) = cache.hit(key, self.shared.clock.coarse())
        {
            let Some(pinned) = pinned else {
                return Ok((range.range().start(), 0));
            };
            // It starts where the mapping does.
            let allocated = pinned.range();
            self.alloc.unpin(pinned);
            return Ok((allocated.start(), allocated.pages()));
        }
        self.share_or_make(key)
    }

    /// A mapping that another user has, or, where none was found, a new one.
    #[inline(never)]
    fn share_or_make(&mut self, key: Key) -> Result<(Iova, u64), DmaMapError<T::Error>> {
        if let Cache::Shared(table) = &self.cache
            && let Some(range) = table.acquire(key)
        {
            return Ok((range.start(), 0));
        }
        let pages = key.pages();
        let request = self.shared.reach.request(pages)?;
        let allocated = self.make(request, pages, key.phys(), key.access())?;
        match &mut self.cache {
            Cache::Idle(cache) => cache.missed(),
            Cache::Shared(table) => table.adopt(key, first_pages(allocated, pages)),
            Cache::Never => {}
        }
        Ok((allocated.start(), allocated.pages()))
    }

    /// An IOVA for pages that are mapped there now. Gives all that was allocated.
    #[inline(always)]
    fn make(
        &mut self,
        request: Request,
        pages: u64,
        phys: PhysAddr,
        access: Access,
    ) -> Result<IovaRange, DmaMapError<T::Error>> {
        let allocated = match self.alloc.alloc(request) {
            Ok(allocated) => allocated,
            Err(error) => self.alloc_again(request, error)?,
        };
        match self
            .shared
            .table
            .map(first_pages(allocated, pages), phys, access)
        {
            Ok(()) => Ok(allocated),
            Err(error) => self.map_again(allocated, pages, phys, access, error),
        }
    }

    /// No IOVA: everything cached goes back first, and others are asked.
    #[cold]
    #[inline(never)]
    pub(super) fn alloc_again(
        &mut self,
        request: Request,
        error: AllocError,
    ) -> Result<IovaRange, DmaMapError<T::Error>> {
        if let AllocError::Impossible { .. } = error {
            return Err(DmaMapError::Alloc(error));
        }
        self.shared.ask_others(self.core);
        // A failed invalidation leaves less to be given back; the allocator says whether it suffices.
        let _ = self.give_back();
        // What others have unmapped can be freed as soon as they run.
        let _ = self.shared.flush_if(|| self.shared.has_stale());
        self.alloc.alloc(request).map_err(DmaMapError::Alloc)
    }

    /// The back end refused: where it has no room, what nobody needs is given back first.
    #[cold]
    #[inline(never)]
    fn map_again(
        &mut self,
        allocated: IovaRange,
        pages: u64,
        phys: PhysAddr,
        access: Access,
        error: MapError<T::Error>,
    ) -> Result<IovaRange, DmaMapError<T::Error>> {
        let may_help = match error {
            MapError::OutOfTables { .. } => self.shared.reclaim.is_some(),
            MapError::Full(_) => matches!(self.cache, Cache::Idle(_)),
            _ => false,
        };
        let result = match may_help && self.give_back().is_ok() {
            true => self
                .shared
                .table
                .map(first_pages(allocated, pages), phys, access),
            false => Err(error),
        };
        result.map(|()| allocated).map_err(|error| {
            let freed = self.alloc.free(allocated);
            freed.expect("this core has just allocated it");
            DmaMapError::Table(error)
        })
    }

    /// What a device of the domain can take, and without one the mapper's own limits.
    #[inline(always)]
    pub(super) fn reach(&self, device: Option<&DeviceLimits>) -> Reach {
        match device {
            None => self.shared.reach,
            Some(device) => self.shared.reach.and(Reach::of(device)),
        }
    }

    /// Which mapper this is.
    #[inline(always)]
    pub(super) fn domain(&self) -> u64 {
        self.shared.id
    }

    /// Tells the mapper what the reuse cache has counted, for [`DmaMapper::risk`](super::DmaMapper::risk). Done by
    /// itself whenever mappings are torn down or the core parks.
    pub fn publish(&mut self) {
        let Cache::Idle(cache) = &self.cache else {
            return;
        };
        *self.line.reuse.lock() = cache.own_counts();
        self.published_ns = self.shared.clock.coarse();
    }
}

#[cold]
pub(super) fn no_segment<E>(index: usize, segment: Segment) -> DmaMapError<E> {
    match segment.len {
        0 => DmaMapError::Empty {
            index,
            phys: segment.phys,
        },
        _ => wraps(index, segment),
    }
}

#[cold]
pub(super) fn wraps<E>(index: usize, Segment { phys, len }: Segment) -> DmaMapError<E> {
    DmaMapError::Wraps { index, phys, len }
}

#[cold]
pub(super) fn too_long<E>(len: u64, max: u64) -> DmaMapError<E> {
    DmaMapError::TooLong { len, max }
}

#[cold]
pub(super) fn unaddressable<E>(segment: Segment, last: u64) -> DmaMapError<E> {
    let phys = segment.phys;
    DmaMapError::Unaddressable { phys, last }
}
