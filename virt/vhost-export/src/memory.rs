//! Guest memory as a front end describes it, and what translates a device's addresses to it:
//! nothing, or a device IOTLB.

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

/// Guest memory in regions that a front end describes. An access may be pending because a page is
/// not there yet: the pager that brings it in sends
/// [`TicketDone`](crate::ExportMessage::TicketDone) then.
pub trait RegionMemory: PhysMem + Clone + Send + 'static {
    /// Returns the memory of these regions, in any order. Regions that stay keep their mapping.
    ///
    /// # Errors
    /// A region that cannot be had.
    fn with_regions(&self, regions: &[ForeignRegion]) -> Result<Self, ForeignError>;

    /// Whether some of it has vanished for good: the front end has truncated its file.
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

/// Translation between the device and memory.
enum Translation {
    /// Nothing: addresses are guest addresses.
    Direct(DirectMap),
    /// The front end's IOMMU: addresses are IOVAs (ACCESS_PLATFORM).
    Tlb(Box<DeviceTlb>),
}

/// Device's view of memory, by kind of translation. Chosen once for a visit, so that accesses
/// within it need no dispatch.
pub(crate) enum Views<'a, M: PhysMem> {
    Direct(View<'a, DirectMap, M>),
    Tlb(View<'a, DeviceTlb, M>),
}

/// Uses the device's view of a [`Memory`], whichever it is.
macro_rules! with_view {
    ($memory:expr, $view:ident => $use_it:expr) => {
        match &mut $memory.views() {
            $crate::memory::Views::Direct($view) => $use_it,
            $crate::memory::Views::Tlb($view) => $use_it,
        }
    };
}
pub(crate) use with_view;

/// Guest memory and the way to it.
pub(crate) struct Memory<M> {
    ram: M,
    translation: Translation,
    regions: Arc<[Region]>,
}

impl<M: RegionMemory> Memory<M> {
    /// No region yet.
    pub(crate) fn new(ram: M) -> Self {
        Self {
            ram,
            translation: Translation::Direct(DirectMap::new()),
            regions: Arc::new([]),
        }
    }

    /// Whether the device's addresses are the front end's IOMMU's. Nothing is in flight. What was
    /// known of such addresses stays if nothing changes.
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

    /// The device IOTLB, where the device's addresses are IOVAs.
    #[inline]
    pub(crate) fn tlb(&mut self) -> Option<&mut DeviceTlb> {
        match &mut self.translation {
            Translation::Direct(_) => None,
            Translation::Tlb(tlb) => Some(tlb),
        }
    }

    /// Whether there is one.
    #[inline]
    pub(crate) fn is_translated(&self) -> bool {
        matches!(self.translation, Translation::Tlb(_))
    }

    /// Whether translations are to be asked for.
    pub(crate) fn has_unsent_miss(&self) -> bool {
        match &self.translation {
            Translation::Direct(_) => false,
            Translation::Tlb(tlb) => tlb.has_unsent_miss(),
        }
    }

    /// Returns the time at which the oldest outstanding translation was asked for, in nanoseconds.
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
                // What lay in a region that has gone leads nowhere, or to another one's memory.
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

    /// Takes a translation from the front end. One that spans regions is stored as several.
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
            // Bytes of the region behind this one.
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

    /// The region of a user address of the front end, and where in it that is.
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

    /// A page of it has vanished: its file was truncated.
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

    /// Reads memory without a device's view, for the recovery of a ring. An address that is not
    /// known to be memory faults.
    pub(crate) fn peek(&self, at: Iova, buf: &mut [u8]) -> Access<()> {
        let gpa = match &self.translation {
            Translation::Direct(_) => Some(Gpa::new(at.raw())),
            Translation::Tlb(tlb) => tlb.known(at, Perm::Read),
        };
        self.ram
            .read(gpa.ok_or(DmaFault::Blocked { iova: at })?, buf)
    }

    /// The ticket to wait for before all of `ranges` can be accessed, if some are not there. A
    /// range that is not memory is found to be none when it is accessed.
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
