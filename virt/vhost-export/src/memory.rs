//! Guest memory as a front end describes it, and the IOMMU that is not there.

use std::sync::Arc;

use guest_mem::{
    Access, DirectMap, ForeignError, ForeignRam, ForeignRegion, Gpa, Intent, Iova, KeepAlive,
    PhysMem, SourceId, Stop, Ticket, View,
};
use vhost_user::backend::{Refusal, Region};
use vhost_user::chain;

/// The device's name in the view; there is no IOMMU that would tell devices apart.
const SOURCE: SourceId = SourceId(0);

/// Guest memory in regions that a front end describes. It may answer that something is not there yet: whoever brings it in
/// sends [`TicketDone`](crate::ExportMessage::TicketDone) then.
pub trait RegionMemory: PhysMem + Clone + Send + 'static {
    /// The memory of these regions, in any order. What stays of the former ones keeps its mapping.
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

/// Guest memory and the way to it.
pub(crate) struct Memory<M> {
    ram: M,
    map: DirectMap,
    regions: Arc<[Region]>,
}

impl<M: RegionMemory> Memory<M> {
    /// No region yet.
    pub(crate) fn new(ram: M) -> Self {
        Self {
            ram,
            map: DirectMap::new(),
            regions: Arc::new([]),
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
        self.regions = regions;
        self.map.memory_changed();
        Ok(())
    }

    /// What keeps it mapped.
    pub(crate) fn keep_alive(&self) -> KeepAlive {
        self.ram.keep_alive()
    }

    /// A page of it has vanished: its file was truncated.
    pub(crate) fn is_lost(&self) -> bool {
        self.ram.is_lost()
    }

    /// The device's door to it.
    #[inline]
    pub(crate) fn view(&mut self) -> View<'_, DirectMap, M> {
        View::new(&mut self.map, &self.ram, SOURCE)
    }

    /// Reads guest memory without a device's view, for the recovery of a ring.
    pub(crate) fn peek(&self, at: Iova, buf: &mut [u8]) -> Access<()> {
        self.ram.read(Gpa::new(at.raw()), buf)
    }

    /// The ticket to wait for before `len` bytes can be read and written, if they are not there. A range that is not memory is
    /// found to be none when it is accessed.
    pub(crate) fn absent(&self, at: Iova, len: u64) -> Option<Ticket> {
        match self.ram.gather(&[(Gpa::new(at.raw()), len, Intent::Write)]) {
            Err(Stop::Pending(ticket)) => Some(ticket),
            Ok(()) | Err(Stop::Fault(_)) => None,
        }
    }

    /// The guest address behind a user address of the front end.
    pub(crate) fn guest_addr(&self, user: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let place = &region.place;
            let inside = user.checked_sub(place.user_addr)?;
            (inside < place.size).then(|| place.guest_addr + inside)
        })
    }
}
