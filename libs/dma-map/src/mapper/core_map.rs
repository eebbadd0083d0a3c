//! Handle of one core, with its map operations.

use alloc::{collections::VecDeque, sync::Arc, vec::Vec};
use core::{cell::Cell, iter::once, marker::PhantomData, num::NonZeroU64};

use address::{Iova, PAGE_SIZE, PhysAddr};
use iova::{
    Access, AllocError, CoreAllocator, IovaAllocator, IovaPfn, IovaRange, Request, RetiredChunk,
};
use lines::Ordering;

use super::cache::Cache;
use super::error::DmaMapError;
use super::limits::{DeviceLimits, too_long};
use super::lines::CoreLines;
use super::policy::{Reuse, Teardown};
use super::queue::Queue;
use super::request::{DeviceSegment, Direction, Mapping, Segment};
use super::shared::Shared;
use crate::clock::Clock;
use crate::invalidate::Invalidator;
use crate::reuse::{Key, OptimisticCache};
use crate::table::{IoMap, MapError, RetiredTable};

/// The parts of a [`Mapping`]: address, length, pages allocated, key.
type Parts = (Iova, NonZeroU64, u64, Option<Key>);

/// Places of the queue under policies that queue only mappings whose invalidation failed.
const STRICT_ROOM: usize = 64;

/// Handle through which one core maps and unmaps. It may move to another thread, and is used by one
/// at a time.
///
/// Dropping it gives everything back. Work that a failed invalidation keeps from being given back
/// is taken over by the other cores after a later one.
pub struct MapperCore<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> {
    pub(super) shared: Arc<Shared<A, T, I, C>>,
    pub(super) alloc: A::Core,
    pub(super) core: usize,
    /// This core's lines of the mapper.
    pub(super) line: Arc<CoreLines>,
    pub(super) queue: Queue,
    /// Chunks without a table that devices may still walk.
    pub(super) quarantine: VecDeque<(RetiredChunk, RetiredTable)>,
    pub(super) cache: Cache,
    /// Value of the line's `notices` that this core last handled.
    pub(super) notices: u64,
    /// Time at which the queue's oldest entry has to be flushed, in nanoseconds.
    pub(super) due_ns: u64,
    /// Mappings freed since chunks were last searched.
    pub(super) freed: u32,
    /// Time at which the reuse cache last published its counts, in nanoseconds.
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
        // The last owner of the handle left nothing in a queue, and nothing open on the line.
        let queue = Queue::new(
            policy.window().map_or(STRICT_ROOM, |window| window.entries),
            line.owner.queued.load(Ordering::Relaxed),
            matches!(policy.teardown, Teardown::Async(_)),
        );
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
            due_ns: 0,
            // Not the current value: notices left there are handled once.
            notices: line.flusher.notices.load(Ordering::Relaxed).wrapping_sub(1),
            shared,
            alloc,
            core,
            line,
            queue,
            quarantine: VecDeque::new(),
            cache,
            freed: 0,
            published_ns: 0,
            is_not_sync: PhantomData,
        }
    }

    /// Maps memory as one stretch of IOVAs. Several segments have to meet at page boundaries. The
    /// device may do what `direction` says, with the whole of each page that the memory touches.
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
        self.map_within(None, segments, direction)
    }

    /// As [`map`](Self::map), for memory that stays mapped for long (rings, mailboxes): the mapping
    /// takes no part in reuse.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn map_coherent(
        &mut self,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        self.map_for(&DeviceLimits::default(), segments, direction)
    }

    /// As [`map_coherent`](Self::map_coherent), for a device of the domain that takes less than the
    /// mapper's own limits: a lower highest address, shorter segments, a boundary that none may
    /// cross. What the mapper's own limits exclude stays excluded.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn map_for(
        &mut self,
        device: &DeviceLimits,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        self.map_within(Some(device), segments, direction)
    }

    #[inline(always)]
    fn map_within(
        &mut self,
        device: Option<&DeviceLimits>,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        // The parts one by one, and one place where they become a mapping: it stays in registers.
        let (iova, len, allocated, key) = match segments {
            &[segment] => self.map_one(device, segment, direction)?,
            segments => {
                let (iova, len, allocated) = self.map_joined(device, segments, direction)?;
                (iova, len, allocated, None)
            }
        };
        Ok(Mapping {
            iova,
            len,
            allocated,
            domain: self.shared.id,
            key,
        })
    }

    #[inline(always)]
    fn map_one(
        &mut self,
        device: Option<&DeviceLimits>,
        segment: Segment,
        direction: Direction,
    ) -> Result<Parts, DmaMapError<T::Error>> {
        let (Some(pages), Some(len)) = (segment.pages(), NonZeroU64::new(segment.len)) else {
            return Err(no_segment(0, segment));
        };
        // Field by field: a copy of the whole would be spilled to memory for the rarely called
        // functions.
        let limits = self.limits(device);
        if segment.len > limits.max_segment {
            return Err(too_long(segment.len, limits.max_segment));
        }
        if self.shared.policy.is_off {
            let iova = match limits.has(segment) {
                true => Iova::new(segment.phys.raw()),
                false => self.map_joined(device, &[segment], direction)?.0,
            };
            return Ok((iova, len, 0, None));
        }
        let (phys, access) = (segment.phys.align_down(PAGE_SIZE), direction.access());
        let key = match (&self.cache, device) {
            (Cache::Shared(_) | Cache::Idle(_), None) => Key::new(phys, pages, access),
            // For a device with limits of its own: what is found may lie where it does not reach.
            _ => None,
        };
        let (start, allocated) = match key {
            Some(key) => self.find_or_make(key)?,
            None => {
                let request = limits.request(pages)?;
                let allocated = self.make(request, once((phys, pages)), access)?;
                (allocated.start(), allocated.pages())
            }
        };
        let iova = Iova::new(start.raw() | segment.phys.offset_in(PAGE_SIZE));
        Ok((iova, len, allocated, key))
    }

    /// Maps a list whose segments may begin and end anywhere, in one stretch of pages, and adds the
    /// device's elements to `out`: one for segments that meet, cut where `device`, which narrows
    /// the mapper's own limits as in [`map_for`](Self::map_for), takes no more.
    ///
    /// # Errors
    /// [`DmaMapError`]; nothing is mapped then, and `out` is as it was.
    pub fn map_list(
        &mut self,
        device: &DeviceLimits,
        segments: &[Segment],
        direction: Direction,
        out: &mut Vec<DeviceSegment>,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        let pages = check_list(segments)?;
        let limits = self.limits(Some(device));
        // Before anything is mapped, which the device would see.
        let elements = segments.iter().map(|one| limits.most_pieces(one.len));
        let elements = elements.fold(0, usize::saturating_add);
        out.try_reserve(elements)
            .map_err(|_| DmaMapError::OutOfMemory { elements })?;
        let request = Request::pages(pages).at_most(limits.last_page);
        let (first, allocated) = self.place(limits, request, segments, direction)?;
        let mut elements = self.elements(first, segments);
        let mut element = elements.next().expect("the list has a segment");
        // Without translation, where nothing is allocated, only the first.
        let mut len = element.len;
        for next in elements {
            if allocated > 0 {
                len = next.iova.raw() - first.raw() + next.len;
            }
            if element.iova.checked_add(element.len) == Some(next.iova) {
                element.len += next.len;
            } else {
                out.extend(limits.cut(element));
                element = next;
            }
        }
        out.extend(limits.cut(element));
        Ok(Mapping {
            iova: first,
            len: NonZeroU64::new(len).expect("every segment has a byte"),
            allocated,
            domain: self.shared.id,
            key: None,
        })
    }

    /// Memory as one element: several segments, or, without translation, one that the device cannot
    /// take just so.
    #[cold]
    #[inline(never)]
    pub(super) fn map_joined(
        &mut self,
        device: Option<&DeviceLimits>,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<(Iova, NonZeroU64, u64), DmaMapError<T::Error>> {
        let pages = check_list(segments)?;
        let limits = self.limits(device);
        // From page 0 on, since it is not known yet where they will be.
        let ends = self.elements(Iova::new(0), segments);
        let ends = ends.map(|one| one.iova.checked_add(one.len));
        let next = self.elements(Iova::new(0), segments).skip(1);
        if let Some(index) = ends
            .zip(next)
            .position(|(end, next)| end != Some(next.iova))
        {
            return Err(DmaMapError::Gap { index });
        }
        let len = segments.iter().map(|segment| segment.len).sum();
        if len > limits.max_segment {
            return Err(too_long(len, limits.max_segment));
        }
        let request = limits.request(pages)?;
        let (iova, allocated) = self.place(limits, request, segments, direction)?;
        let room = limits.room_at(iova);
        if len > room {
            // Only without translation, where nothing was mapped: with it, the request keeps within
            // the boundary.
            return Err(too_long(len, room));
        }
        let len = NonZeroU64::new(len).expect("every segment has a byte");
        Ok((iova, len, allocated))
    }

    /// Gives the segments a place, each from a page of its own on, or, without translation, finds
    /// that the device addresses all of the memory. Gives where the first begins, and the pages
    /// allocated.
    fn place(
        &mut self,
        limits: DeviceLimits,
        request: Request,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<(Iova, u64), DmaMapError<T::Error>> {
        let first = segments[0].phys;
        if self.shared.policy.is_off {
            let last = limits.last.raw();
            return match segments
                .iter()
                .find(|one| one.phys.raw() + (one.len - 1) > last)
            {
                Some(&Segment { phys, .. }) => Err(DmaMapError::Unaddressable { phys, last }),
                None => Ok((Iova::new(first.raw()), 0)),
            };
        }
        let pieces = segments.iter().map(|one| {
            let pages = one.pages().expect("checked");
            (one.phys.align_down(PAGE_SIZE), pages)
        });
        let allocated = self.make(request, pieces, direction.access())?;
        let iova = allocated.start().raw() | first.offset_in(PAGE_SIZE);
        Ok((Iova::new(iova), allocated.pages()))
    }

    /// Returns the device's elements for the segments, if the first is in the page of `first`.
    /// Without translation, their own addresses.
    fn elements(&self, first: Iova, segments: &[Segment]) -> impl Iterator<Item = DeviceSegment> {
        let is_off = self.shared.policy.is_off;
        let mut page = first.align_down(PAGE_SIZE).raw();
        segments.iter().map(move |segment| {
            let translated = page | segment.phys.offset_in(PAGE_SIZE);
            page = page.wrapping_add(segment.pages().expect("checked") * PAGE_SIZE);
            let iova = if is_off {
                segment.phys.raw()
            } else {
                translated
            };
            DeviceSegment {
                iova: Iova::new(iova),
                len: segment.len,
            }
        })
    }

    /// A mapping that is found, or else made. Gives its start, and the pages allocated where they
    /// are known, else 0.
    #[inline(always)]
    fn find_or_make(&mut self, key: Key) -> Result<(Iova, u64), DmaMapError<T::Error>> {
        if let Cache::Idle(cache) = &mut self.cache
            && let Some(pinned) = cache.hit(key, self.shared.clock.coarse())
        {
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
        let request = self.shared.limits.request(pages)?;
        let allocated = self.make(request, once((key.phys(), pages)), key.access())?;
        match &mut self.cache {
            Cache::Idle(cache) => cache.missed(),
            Cache::Shared(table) => {
                let range = IovaRange::new(allocated.first(), pages);
                table.insert(key, range.expect("within what was allocated"));
            }
            Cache::Never => {}
        }
        Ok((allocated.start(), allocated.pages()))
    }

    /// One stretch of IOVAs, for each piece of memory in turn, of whole pages and so many, pages of
    /// its own, which are mapped there now. Gives all that was allocated.
    #[inline(always)]
    pub(super) fn make(
        &mut self,
        request: Request,
        pieces: impl ExactSizeIterator<Item = (PhysAddr, u64)>,
        access: Access,
    ) -> Result<IovaRange, DmaMapError<T::Error>> {
        if pieces.len() > 1 && self.queue.is_full() {
            // A list that fails halfway has been seen by the device, and needs a place in the
            // queue.
            self.make_room().map_err(DmaMapError::Invalidation)?;
        }
        let allocated = match self.alloc.alloc(request) {
            Ok(allocated) => allocated,
            Err(error) => self.alloc_again(request, error)?,
        };
        let mut next = allocated.first().raw();
        for (phys, pages) in pieces {
            let range = IovaRange::new(IovaPfn::new(next), pages);
            let range = range.expect("within what was allocated");
            if let Err(error) = self.shared.table.map(range, phys, access) {
                self.map_again(allocated, range, phys, access, error)?;
            }
            next += pages;
        }
        Ok(allocated)
    }

    /// No IOVA: everything cached goes back first, and others are asked.
    #[cold]
    #[inline(never)]
    fn alloc_again(
        &mut self,
        request: Request,
        error: AllocError,
    ) -> Result<IovaRange, DmaMapError<T::Error>> {
        if let AllocError::Impossible { .. } = error {
            return Err(DmaMapError::Alloc(error));
        }
        self.shared.ask_others(self.core);
        // A failed invalidation leaves less to be given back; the result of the allocation below
        // shows whether it suffices.
        let _ = self.give_back();
        // Mappings that other cores have unmapped can be freed as soon as those cores run.
        let shared = &self.shared;
        let is_stale = || shared.lines().iter().any(|line| line.stale() > 0);
        let _ = shared.flush_if(|| is_stale() || shared.abandoned.lock().stale() > 0);
        // The deferred work of dropped cores that this flush or an earlier one has covered becomes
        // free with it.
        self.process_notices();
        self.alloc.alloc(request).map_err(DmaMapError::Alloc)
    }

    /// Retries after the back end refused `range`: where it has no room, idle mappings are given
    /// back first. If that does not help, the pages mapped before `range` are unmapped too.
    #[cold]
    #[inline(never)]
    fn map_again(
        &mut self,
        allocated: IovaRange,
        range: IovaRange,
        phys: PhysAddr,
        access: Access,
        error: MapError<T::Error>,
    ) -> Result<(), DmaMapError<T::Error>> {
        let may_help = match error {
            MapError::OutOfTables { .. } => self.shared.reclaim.is_some(),
            MapError::Full(_) => matches!(self.cache, Cache::Idle(_)),
            _ => false,
        };
        let result = match may_help && self.give_back().is_ok() {
            true => self.shared.table.map(range, phys, access),
            false => Err(error),
        };
        result.map_err(|error| {
            self.undo(allocated, range.first().raw() - allocated.first().raw());
            DmaMapError::Table(error)
        })
    }

    /// Returns the limits of a device of the domain, or the mapper's own limits without one.
    #[inline(always)]
    pub(super) fn limits(&self, device: Option<&DeviceLimits>) -> DeviceLimits {
        match device {
            None => self.shared.limits,
            Some(device) => self.shared.limits.and(device),
        }
    }

    /// Publishes the counts of the reuse cache, for [`DmaMapper::risk`](super::DmaMapper::risk).
    /// Happens by itself whenever mappings are torn down or the core parks.
    pub fn publish(&mut self) {
        let Cache::Idle(cache) = &self.cache else {
            return;
        };
        *self.line.reuse.lock() = cache.own_counts();
        self.published_ns = self.shared.clock.coarse();
    }
}

#[cold]
pub(super) fn no_segment<E>(index: usize, Segment { phys, len }: Segment) -> DmaMapError<E> {
    match len {
        0 => DmaMapError::Empty { index, phys },
        _ => DmaMapError::Wraps { index, phys, len },
    }
}

/// Pages of all segments.
fn check_list<E>(segments: &[Segment]) -> Result<u64, DmaMapError<E>> {
    let mut pages = 0_u64;
    for (index, &segment) in segments.iter().enumerate() {
        let more = segment.pages().ok_or(no_segment(index, segment))?;
        pages += more;
        if pages > IovaPfn::MAX.raw() {
            let Segment { phys, len } = segment;
            return Err(DmaMapError::Wraps { index, phys, len });
        }
    }
    match pages {
        0 => Err(DmaMapError::NoSegments),
        pages => Ok(pages),
    }
}
