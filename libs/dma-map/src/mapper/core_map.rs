//! One core's handle, and how it maps.

use alloc::{boxed::Box, sync::Arc, vec::Vec};
use core::{cell::Cell, marker::PhantomData, num::NonZeroU64};

use address::{Iova, PAGE_SIZE, PhysAddr};
use iova::{
    Access, AllocError, CoreAllocator, CoreId, IovaAllocator, IovaPfn, IovaRange, Pinned, Request,
};
use lines::Ordering;

use super::error::DmaMapError;
use super::idle::IdlePins;
use super::policy::{Optimistic, Reuse, Teardown};
use super::queue::Queue;
use super::reclaim::Quarantine;
use super::request::{Direction, Mapping, Segment};
use super::shared::{BATCH, Shared};
use super::{first_pages, lines::Told};
use crate::clock::Clock;
use crate::invalidate::{Command, Invalidator};
use crate::io_map::IoMap;
use crate::reuse::{
    Batch, Key, OptimisticCache, Released, ReuseCache, SharingCache, SharingTable, Stacked, Windows,
};
use crate::table::MapError;

/// The parts of a [`Mapping`]: address, length, pages allocated, key.
type Parts = (Iova, NonZeroU64, u64, Option<Key>);

/// Places of the queue under policies that queue only what an invalidation failed for.
const STRICT_ROOM: usize = 64;

/// What finds mappings again. An enumeration, so that the calls for each mapping are inlined.
#[expect(
    clippy::large_enum_variant,
    reason = "one per core, and the large one is the one that matters"
)]
pub(super) enum Cache {
    Shared(SharingCache),
    /// With the pins of what it keeps.
    Idle(OptimisticCache<Option<Pinned>>),
    Both(Box<Stacked<SharingCache, OptimisticCache>>),
}

impl Cache {
    /// A mapping that ends now can be kept, if it is to be.
    #[inline]
    pub(super) fn has_room(&mut self) -> bool {
        match self {
            Self::Shared(_) => true,
            Self::Idle(cache) => cache.has_room(),
            Self::Both(both) => both.parts().1.has_room(),
        }
    }

    /// [`OptimisticCache::make_room`].
    pub(super) fn make_room(&mut self, now: u64, batch: &mut Batch) {
        match self {
            Self::Shared(_) => {}
            Self::Idle(cache) => cache.make_room(now, batch),
            Self::Both(both) => both.parts().1.make_room(now, batch),
        }
    }

    /// [`OptimisticCache::hand_over`].
    pub(super) fn hand_over(&mut self, batch: &mut Batch) {
        match self {
            Self::Shared(_) => {}
            Self::Idle(cache) => cache.hand_over(batch),
            Self::Both(both) => both.parts().1.hand_over(batch),
        }
    }

    /// For what is seldom asked.
    pub(super) fn any(&mut self) -> &mut dyn ReuseCache {
        match self {
            Self::Shared(cache) => cache,
            Self::Idle(cache) => cache,
            Self::Both(cache) => &mut **cache,
        }
    }
}

/// What a core has where mappings are reused.
pub(super) struct Reused {
    pub(super) cache: Cache,
    /// The pins of what other caches keep.
    idle: IdlePins,
}

/// What became of a mapping that a user has let go of.
pub(super) enum LetGo {
    /// It stays, with its pin.
    Kept {
        /// Where its place was another's, whom somebody else has torn down, that one's pin.
        gone: Option<Pinned>,
        /// Others have to go.
        wants_room: bool,
    },
    /// The caller lets go of the pin: somebody else uses the mapping.
    InUse(Pinned),
    /// The caller tears it down.
    TearDown(Pinned),
}

impl Reused {
    fn new(reuse: Reuse, table: Option<&Arc<SharingTable>>) -> Option<Self> {
        let shared = || {
            let table = table.expect("a policy that shares has a table");
            SharingCache::new(Arc::clone(table))
        };
        let (cache, quota) = match reuse {
            Reuse::Never => return None,
            Reuse::Shared => (Cache::Shared(shared()), 0),
            Reuse::Optimistic(kept) => {
                let cache = OptimisticCache::keeping(kept.quota, residency(kept));
                (Cache::Idle(cache), 0)
            }
            Reuse::SharedOptimistic(kept) => {
                let idle = OptimisticCache::new(kept.quota, residency(kept));
                let both = Stacked::new(shared(), idle);
                (Cache::Both(Box::new(both)), kept.quota)
            }
        };
        Some(Self {
            cache,
            idle: IdlePins::new(quota),
        })
    }

    /// [`ReuseCache::acquire`], with the pin where it has one here.
    #[inline]
    fn acquire(&mut self, key: Key, now: u64) -> Option<(IovaRange, Option<Pinned>)> {
        match &mut self.cache {
            Cache::Idle(cache) => cache.acquire_at(key, now),
            other => {
                let range = other.any().acquire(key, now)?;
                Some((range, self.idle.remove(range.first())))
            }
        }
    }

    /// [`ReuseCache::release`], with the pin; what goes to make room goes before and after.
    #[inline]
    pub(super) fn release(
        &mut self,
        key: Key,
        range: IovaRange,
        pinned: Pinned,
        now: u64,
    ) -> LetGo {
        let placed = match &mut self.cache {
            Cache::Shared(cache) => match cache.end_use(key, range) {
                Released::InUse => return LetGo::InUse(pinned),
                _ => None,
            },
            Cache::Idle(cache) => {
                let Some(placed) = cache.release_at(key, range, now) else {
                    cache.refused();
                    return LetGo::TearDown(pinned);
                };
                return LetGo::Kept {
                    gone: cache.kept(placed.place).replace(pinned),
                    wants_room: placed.wants_room,
                };
            }
            Cache::Both(both) => {
                let (shared, idle) = both.parts();
                if shared.end_use(key, range) == Released::InUse {
                    return LetGo::InUse(pinned);
                }
                let placed = idle.release_at(key, range, now);
                if placed.is_none() {
                    idle.refused();
                }
                placed
            }
        };
        match placed {
            Some(placed) => {
                self.idle.insert(pinned);
                LetGo::Kept {
                    gone: None,
                    wants_room: placed.wants_room,
                }
            }
            None => LetGo::TearDown(pinned),
        }
    }

    /// The pin of a mapping that starts at `page` and was torn down, by whom ever. In its place there may be another's
    /// by now: then its own has come out when that one came.
    pub(super) fn take_pin(&mut self, place: u32, page: IovaPfn) -> Option<Pinned> {
        match &mut self.cache {
            Cache::Idle(cache) => {
                let kept = cache.kept(place);
                kept.take_if(|pinned| pinned.range().first() == page)
            }
            _ => self.idle.remove(page),
        }
    }
}

fn residency(idle: Optimistic) -> u64 {
    u64::try_from(idle.residency.as_nanos()).unwrap_or(u64::MAX)
}

/// One core's way to map and unmap. It may move to another thread, and is used by one at a time.
///
/// Dropping it gives everything back; what an invalidation that fails then keeps from being given back is
/// adopted by the other cores after a later one.
pub struct MapperCore<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> {
    pub(super) shared: Arc<Shared<A, T, I, C>>,
    pub(super) alloc: A::Core,
    pub(super) core: usize,
    pub(super) queue: Queue,
    pub(super) quarantine: Quarantine,
    pub(super) reused: Option<Reused>,
    /// Every mapping is made, none is found: translation is on and nothing is reused.
    pub(super) makes_each: bool,
    /// As well, and what is unmapped goes into the queue.
    pub(super) queues_each: bool,
    /// What our line said when we last looked.
    pub(super) notices: u64,
    /// Age of the queue's oldest entry at which it is flushed, in nanoseconds.
    pub(super) age_ns: u64,
    /// Mappings freed since chunks were last looked for.
    pub(super) freed: u32,
    /// When the reuse cache last told what it has counted.
    pub(super) published_ns: u64,
    pub(super) commands: Vec<Command>,
    /// Not `Sync`: one thread at a time.
    is_not_sync: PhantomData<Cell<()>>,
}

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    pub(super) fn new(shared: Arc<Shared<A, T, I, C>>, alloc: A::Core) -> Self {
        let core = alloc.core().0;
        shared.used.fetch_max(core + 1, Ordering::AcqRel);
        let line = &shared.lines[core];
        let window = shared.policy.window();
        // Whoever had the handle before left nothing in a queue, and nothing open on the line.
        let queue = Queue::new(
            window.map_or(STRICT_ROOM, |window| window.entries),
            line.owner.queued.load(Ordering::Relaxed),
        );
        let quarantine = Quarantine::new(line.owner.retired.load(Ordering::Relaxed));
        let left = line.left.lock().take();
        let mut reused = left.or_else(|| Reused::new(shared.policy.reuse, shared.sharing.as_ref()));
        *line.expirer.lock() = reused
            .as_mut()
            .and_then(|reused| reused.cache.any().expirer());
        let makes_each = !shared.policy.is_off && reused.is_none();
        let is_deferred = matches!(shared.policy.teardown, Teardown::Deferred(_));
        Self {
            makes_each,
            queues_each: makes_each && is_deferred,
            age_ns: u64::try_from(shared.age.as_nanos()).unwrap_or(u64::MAX),
            // Not what it says now: what was left there is looked at once.
            notices: line.flusher.notices.load(Ordering::Relaxed).wrapping_sub(1),
            shared,
            alloc,
            core,
            queue,
            quarantine,
            reused,
            freed: 0,
            published_ns: 0,
            commands: Vec::with_capacity(BATCH),
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
        let quick = match segments {
            &[segment] => self.map_quickly(segment, direction),
            _ => None,
        };
        let (start, offset, len, allocated, key) = match (quick, segments) {
            (Some((start, len, allocated, key)), &[segment]) => {
                let offset = segment.phys.offset_in(PAGE_SIZE);
                (start.raw(), offset, len, allocated, key)
            }
            _ => match self.map_carefully(segments, direction) {
                Ok((iova, len, allocated, key)) => (iova.raw(), 0, len, allocated, key),
                Err(error) => return Err(error),
            },
        };
        Ok(Mapping {
            iova: Iova::new(start | offset),
            len,
            allocated,
            domain: self.domain(),
            key,
        })
    }

    /// The common case: one segment, nothing out of the ordinary. Gives where its first page is mapped, and the pages
    /// allocated. `None` leaves things as they were, and [`map_carefully`](Self::map_carefully) does it or says why not.
    #[inline(always)]
    fn map_quickly(
        &mut self,
        segment: Segment,
        direction: Direction,
    ) -> Option<(Iova, NonZeroU64, u64, Option<Key>)> {
        let shared = &*self.shared;
        let len = NonZeroU64::new(segment.len)?;
        let pages = segment.pages()?;
        if segment.len > shared.limits.max_segment {
            return None;
        }
        let phys = segment.phys.align_down(PAGE_SIZE);
        if !self.makes_each {
            if shared.policy.is_off {
                let is_within = segment.phys.raw() + (segment.len - 1) <= shared.limits.last.raw();
                return is_within.then_some((Iova::new(phys.raw()), len, 0, None));
            }
            let key = Key::new(phys, pages, direction.access())?;
            let (start, allocated) = self.find_quickly(key)?;
            return Some((start, len, allocated, Some(key)));
        }
        let access = direction.access();
        let allocated = self.try_make(phys, pages, access)?;
        Some((allocated.start(), len, allocated.pages(), None))
    }

    /// A new mapping of so many pages, where nothing is out of the ordinary. `None` leaves things as they were.
    #[inline(always)]
    fn try_make(&mut self, phys: PhysAddr, pages: u64, access: Access) -> Option<IovaRange> {
        let request = self.request(pages);
        let allocated = self.alloc.alloc(request).ok()?;
        let range = first_pages(allocated, pages);
        if self.shared.table.map(range, phys, access).is_err() {
            self.take_back(allocated);
            return None;
        }
        Some(allocated)
    }

    /// An idle mapping of this core, in use again, or a new one. `None` leaves things as they were.
    #[inline(always)]
    fn find_quickly(&mut self, key: Key) -> Option<(Iova, u64)> {
        let reused = self.reused.as_mut()?;
        let Cache::Idle(cache) = &mut reused.cache else {
            return None;
        };
        let Some((range, pinned)) = cache.hit(key, self.shared.clock.coarse()) else {
            return self.make_quickly(key);
        };
        let Some(pinned) = pinned else {
            return Some((range.range().start(), 0));
        };
        // It starts where the mapping does.
        let allocated = pinned.range();
        self.alloc.unpin(pinned);
        Some((allocated.start(), allocated.pages()))
    }

    /// A mapping, where none was found. `None` leaves things as they were.
    #[inline(never)]
    fn make_quickly(&mut self, key: Key) -> Option<(Iova, u64)> {
        let allocated = self.try_make(key.phys(), key.pages(), key.access())?;
        if let Some(Cache::Idle(cache)) = self.reused.as_mut().map(|reused| &mut reused.cache) {
            cache.missed();
        }
        Some((allocated.start(), allocated.pages()))
    }

    /// Nothing was mapped there.
    #[cold]
    #[inline(never)]
    fn take_back(&mut self, allocated: IovaRange) {
        self.alloc.free(allocated).expect("just allocated");
    }

    /// All other cases, and those that [`map_quickly`](Self::map_quickly) gave up, from the start. Gives the parts of the
    /// mapping: were it the mapping itself, that of the common case would have to lie in the same memory.
    #[inline(never)]
    fn map_carefully(
        &mut self,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<Parts, DmaMapError<T::Error>> {
        let mapping = match segments {
            &[segment] => self.map_one(segment, direction, true),
            segments => self.map_joined(segments, direction),
        }?;
        Ok((mapping.iova, mapping.len, mapping.allocated, mapping.key))
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
        match segments {
            &[segment] => self.map_one(segment, direction, false),
            segments => self.map_joined(segments, direction),
        }
    }

    #[inline]
    fn map_one(
        &mut self,
        segment: Segment,
        direction: Direction,
        may_reuse: bool,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        let shared = &*self.shared;
        let (Some(pages), Some(len)) = (segment.pages(), NonZeroU64::new(segment.len)) else {
            return Err(no_segment(0, segment));
        };
        if segment.len > shared.limits.max_segment {
            return Err(too_long(segment.len, shared.limits.max_segment));
        }
        if shared.policy.is_off {
            return self.map_off(segment, direction);
        }
        let phys = segment.phys.align_down(PAGE_SIZE);
        let access = direction.access();
        let key = match may_reuse && self.reused.is_some() {
            true => Key::new(phys, pages, access),
            false => None,
        };
        let (start, allocated) = match key {
            Some(key) => self.map_reusable(key)?,
            None => {
                let allocated = self.make(phys, pages, access)?;
                (allocated.start(), allocated.pages())
            }
        };
        Ok(Mapping {
            iova: Iova::new(start.raw() | segment.phys.offset_in(PAGE_SIZE)),
            len,
            allocated,
            domain: self.domain(),
            key,
        })
    }

    /// An IOVA for pages that are mapped there now. Gives all that was allocated.
    #[inline]
    fn make(
        &mut self,
        phys: PhysAddr,
        pages: u64,
        access: Access,
    ) -> Result<IovaRange, DmaMapError<T::Error>> {
        let request = self.request(pages);
        let allocated = match self.alloc.alloc(request) {
            Ok(allocated) => allocated,
            Err(error) => self.alloc_again(request, error)?,
        };
        let range = first_pages(allocated, pages);
        match self.shared.table.map(range, phys, access) {
            Ok(()) => Ok(allocated),
            Err(error) => self.map_again(allocated, range, phys, access, error),
        }
    }

    #[inline]
    pub(super) fn request(&self, pages: u64) -> Request {
        Request::pages(pages).at_most(self.shared.last_page)
    }

    /// No IOVA: everything cached goes back first, and others are asked.
    #[cold]
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
    fn map_again(
        &mut self,
        allocated: IovaRange,
        range: IovaRange,
        phys: PhysAddr,
        access: Access,
        error: MapError<T::Error>,
    ) -> Result<IovaRange, DmaMapError<T::Error>> {
        let may_help = match error {
            MapError::OutOfTables { .. } => self.shared.reclaim.is_some(),
            MapError::Full(_) => self.reused.is_some(),
            _ => false,
        };
        let result = match may_help && self.give_back().is_ok() {
            true => self.shared.table.map(range, phys, access),
            false => Err(error),
        };
        result.map(|()| allocated).map_err(|error| {
            self.take_back(allocated);
            DmaMapError::Table(error)
        })
    }

    /// A mapping that is found, or else made and told to the cache. Gives the start, and the pages allocated where
    /// they are known, else 0.
    #[inline]
    fn map_reusable(&mut self, key: Key) -> Result<(Iova, u64), DmaMapError<T::Error>> {
        let now = self.shared.clock.coarse();
        let reused = self.reused.as_mut().expect("the caller has looked");
        if let Some((range, pinned)) = reused.acquire(key, now) {
            // Live elsewhere, it has no pin here.
            let Some(pinned) = pinned else {
                return Ok((range.start(), 0));
            };
            let pages = pinned.range().pages();
            self.alloc.unpin(pinned);
            return Ok((range.start(), pages));
        }
        let allocated = self.make(key.phys(), key.pages(), key.access())?;
        let range = first_pages(allocated, key.pages());
        if let Some(reused) = &mut self.reused {
            reused.cache.any().adopt(key, range, now);
        }
        Ok((allocated.start(), allocated.pages()))
    }

    /// Which mapper this is.
    #[inline]
    pub(super) fn domain(&self) -> u64 {
        self.shared.id
    }

    /// Tells the mapper what the reuse cache has counted, for [`DmaMapper::risk`](super::DmaMapper::risk). Done by
    /// itself whenever mappings are torn down or the core parks.
    pub fn publish(&mut self) {
        let Some(reused) = &mut self.reused else {
            return;
        };
        let cache = reused.cache.any();
        let outside = cache.expirer().map(|expirer| expirer.counts());
        let told = Told {
            counts: cache.counts(),
            outside: outside.map_or(Windows::EMPTY, |counts| counts.windows),
        };
        *self.shared.lines[self.core].reuse.lock() = told;
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
