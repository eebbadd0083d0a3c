//! Guest memory as a front end describes it, and the translation of a device's addresses to it:
//! none, or a device IOTLB.

use std::sync::Arc;

use guest_mem::{
    Access, DeviceTlb, DirectMap, Dma, DmaFault, ForeignError, ForeignRam, ForeignRegion, Gpa,
    Iova, IovaRange, KeepAlive, MAX_LEASES, Perm, PhysMem, Rights, SourceId, Stop, Ticket, View,
    Wanted,
};
use vhost_user::backend::{Refusal, Region};
use vhost_user::chain;
use vhost_user::wire::{IotlbAccess, IotlbRange, MemRegion};

/// The device's source id in the view; there is no IOMMU that would distinguish devices.
const SOURCE: SourceId = SourceId(0);

/// Guest memory in regions that a front end describes. An access may have to wait for an absent
/// page. When the pager has brought it in, it sends
/// [`TicketDone`](crate::ExportMessage::TicketDone).
pub trait RegionMemory: PhysMem + Clone + Send + 'static {
    /// Returns the memory of these regions, in any order. Regions that were there before keep their
    /// mapping.
    ///
    /// # Errors
    /// A region cannot be mapped.
    fn with_regions(&self, regions: &[ForeignRegion]) -> Result<Self, ForeignError>;

    /// Whether a part of it is lost for good: the front end has truncated its file.
    fn is_lost(&self) -> bool;
}

impl RegionMemory for ForeignRam {
    fn with_regions(&self, regions: &[ForeignRegion]) -> Result<Self, ForeignError> {
        ForeignRam::with_regions(self, regions)
    }

    fn is_lost(&self) -> bool {
        ForeignRam::is_lost(self)
    }
}

/// Translation of the device's addresses.
enum Translation {
    /// None: addresses are guest-physical.
    Direct(DirectMap),
    /// The front end's IOMMU: addresses are IOVAs (ACCESS_PLATFORM).
    Tlb(Box<DeviceTlb>),
}

/// The device's view of memory, by kind of translation. The kind is matched once per poll, so that
/// the accesses within it need no dispatch.
pub(crate) enum Views<'a, M: PhysMem> {
    Direct(View<'a, DirectMap, M>),
    Tlb(View<'a, DeviceTlb, M>),
}

/// Evaluates an expression with the device's view of a [`Memory`], of either kind.
macro_rules! with_view {
    ($memory:expr, $view:ident => $use_it:expr) => {
        match &mut $memory.views() {
            $crate::memory::Views::Direct($view) => $use_it,
            $crate::memory::Views::Tlb($view) => $use_it,
        }
    };
}
pub(crate) use with_view;

/// Guest memory with the translation to it.
pub(crate) struct Memory<M> {
    ram: M,
    translation: Translation,
    regions: Arc<[Region]>,
}

impl<M: RegionMemory> Memory<M> {
    /// Creates a memory without regions.
    pub(crate) fn new(ram: M) -> Self {
        Self {
            ram,
            translation: Translation::Direct(DirectMap::new()),
            regions: Arc::new([]),
        }
    }

    /// Sets whether the device's addresses are those of the front end's IOMMU. No request is in
    /// flight. If nothing changes, cached translations stay.
    pub(crate) fn set_translated(&mut self, is_translated: bool) {
        match (&self.translation, is_translated) {
            (Translation::Tlb(_), true) | (Translation::Direct(_), false) => {}
            (Translation::Tlb(_), false) => {
                self.translation = Translation::Direct(DirectMap::new());
            }
            (Translation::Direct(_), true) => {
                self.translation = Translation::Tlb(Box::new(DeviceTlb::new(MAX_LEASES)));
            }
        }
    }

    /// Returns the device IOTLB, if the device's addresses are IOVAs.
    #[inline]
    pub(crate) fn tlb(&mut self) -> Option<&mut DeviceTlb> {
        match &mut self.translation {
            Translation::Direct(_) => None,
            Translation::Tlb(tlb) => Some(tlb),
        }
    }

    /// Whether the device's addresses are IOVAs.
    #[inline]
    pub(crate) fn is_translated(&self) -> bool {
        matches!(self.translation, Translation::Tlb(_))
    }

    /// Whether there are translations to be requested from the front end.
    pub(crate) fn has_unsent_miss(&self) -> bool {
        match &self.translation {
            Translation::Direct(_) => false,
            Translation::Tlb(tlb) => tlb.has_unsent_miss(),
        }
    }

    /// Returns the time at which the oldest outstanding translation was requested, in nanoseconds.
    pub(crate) fn oldest_miss_ns(&self) -> Option<u64> {
        match &self.translation {
            Translation::Direct(_) => None,
            Translation::Tlb(tlb) => tlb.oldest_miss_ns(),
        }
    }

    /// Maps these regions instead of the former ones. After an error everything is as it was.
    pub(crate) fn set(&mut self, regions: Arc<[Region]>) -> Result<(), Refusal> {
        let wanted: Vec<ForeignRegion> = regions
            .iter()
            .map(|region| ForeignRegion {
                gpa: Gpa::new(region.place.guest_addr),
                len: region.place.size,
                file: region.fd.clone(),
                offset: region.place.mmap_offset,
            })
            .collect();
        self.ram = self
            .ram
            .with_regions(&wanted)
            .map_err(|error| Refusal(chain(&error)))?;
        let former = std::mem::replace(&mut self.regions, regions);
        match &mut self.translation {
            Translation::Direct(map) => map.memory_changed(),
            Translation::Tlb(tlb) => {
                tlb.memory_changed();
                // Remove translations to regions that are gone: another region may take their
                // place.
                let stays = |old: &Region| self.regions.iter().any(|new| new.place == old.place);
                for MemRegion {
                    guest_addr, size, ..
                } in former.iter().filter(|old| !stays(old)).map(|old| old.place)
                {
                    let last = Gpa::new(guest_addr + (size - 1));
                    tlb.forget_memory(Gpa::new(guest_addr), last);
                }
            }
        }
        Ok(())
    }

    /// Stores a translation from the front end. One that spans regions is stored as several.
    pub(crate) fn update(
        &mut self,
        range: IotlbRange,
        user_addr: u64,
        access: IotlbAccess,
    ) -> Result<(), Refusal> {
        let rights = match access {
            IotlbAccess::None => Rights::NONE,
            IotlbAccess::Read => Rights::READ,
            IotlbAccess::Write => Rights::WRITE,
            IotlbAccess::ReadWrite => Rights::ALL,
        };
        let pieces = self.pieces(range, user_addr).ok_or_else(|| {
            Refusal(format!(
                "the translation of {:#x} leads to {user_addr:#x}, where no memory is",
                range.first
            ))
        })?;
        let tlb = self.tlb().ok_or_else(not_negotiated)?;
        for (range, gpa) in pieces {
            tlb.update(range, gpa, rights);
        }
        Ok(())
    }

    /// Returns the pieces of `range` with their guest addresses; `None` if some of it is not in
    /// guest memory.
    fn pieces(&self, range: IotlbRange, user_addr: u64) -> Option<Vec<(IovaRange, Gpa)>> {
        let mut pieces = Vec::new();
        let mut first = range.first;
        loop {
            let user = user_addr.checked_add(first - range.first)?;
            let (place, inside) = self.place(user)?;
            // Bytes of the region after this one.
            let left = place.size - 1 - inside;
            let last = range.last.min(first.saturating_add(left));
            let piece = IovaRange::new(Iova::new(first), Iova::new(last))?;
            pieces.push((piece, Gpa::new(place.guest_addr + inside)));
            if last == range.last {
                return Some(pieces);
            }
            first = last + 1;
        }
    }

    /// Returns the region of a user address of the front end, and the offset in it.
    fn place(&self, user: u64) -> Option<(MemRegion, u64)> {
        self.regions.iter().find_map(|region| {
            let inside = user.checked_sub(region.place.user_addr)?;
            (inside < region.place.size).then_some((region.place, inside))
        })
    }

    /// Returns a handle that keeps the memory mapped.
    pub(crate) fn keep_alive(&self) -> KeepAlive {
        self.ram.keep_alive()
    }

    /// Whether a part of it is lost: its file was truncated.
    pub(crate) fn is_lost(&self) -> bool {
        self.ram.is_lost()
    }

    /// Returns the device's view of it: see [`with_view`].
    #[inline]
    pub(crate) fn views(&mut self) -> Views<'_, M> {
        match &mut self.translation {
            Translation::Direct(map) => Views::Direct(View::new(map, &self.ram, SOURCE)),
            Translation::Tlb(tlb) => Views::Tlb(View::new(&mut **tlb, &self.ram, SOURCE)),
        }
    }

    /// Reads memory without a device's view, for the recovery of a ring. An address without a
    /// cached translation to memory faults.
    pub(crate) fn peek(&self, at: Iova, buf: &mut [u8]) -> Access<()> {
        let gpa = match &self.translation {
            Translation::Direct(_) => Some(Gpa::new(at.raw())),
            Translation::Tlb(tlb) => tlb.known(at, Perm::Read),
        };
        self.ram
            .read(gpa.ok_or(DmaFault::Blocked { iova: at })?, buf)
    }

    /// Returns the ticket to wait for before all of `ranges` can be accessed, if some of them are
    /// absent. A range that is not memory is detected later, when it is accessed.
    pub(crate) fn absent(&mut self, ranges: &[Wanted]) -> Option<Ticket> {
        let gathered = with_view!(self, view => view.gather(ranges.iter().copied()));
        match gathered {
            Err(Stop::Pending(ticket)) => Some(ticket),
            Ok(()) | Err(Stop::Fault(_)) => None,
        }
    }

    /// Converts a ring's address as the front end gives it, an IOVA already or a user address of
    /// its own, to the device's address.
    pub(crate) fn ring_addr(&self, addr: u64) -> Option<Iova> {
        match self.is_translated() {
            true => Some(Iova::new(addr)),
            false => {
                let (place, inside) = self.place(addr)?;
                Some(Iova::new(place.guest_addr + inside))
            }
        }
    }
}

/// The answer to a message about translations from a front end that has not acknowledged
/// ACCESS_PLATFORM.
pub(crate) fn not_negotiated() -> Refusal {
    Refusal("translations were not negotiated".into())
}
