//! Guest memory as a front end describes it, and the IOMMU that is not there.

use guest_mem::{DirectMap, ForeignRam, ForeignRegion, Gpa, Iova, PhysMem, SourceId, View};
use vhost_user::backend::{Refusal, Region};
use vhost_user::chain;

/// The device's name in the view; there is no IOMMU that would tell devices apart.
const SOURCE: SourceId = SourceId(0);

/// Guest memory and the way to it.
pub(crate) struct Memory {
    ram: ForeignRam,
    map: DirectMap,
    regions: std::sync::Arc<[Region]>,
}

impl Memory {
    pub(crate) fn new() -> Self {
        Self {
            ram: ForeignRam::empty(),
            map: DirectMap::new(),
            regions: std::sync::Arc::new([]),
        }
    }

    /// Maps these regions instead of the former ones. After an error everything is as it was.
    pub(crate) fn set(&mut self, regions: std::sync::Arc<[Region]>) -> Result<(), Refusal> {
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
    pub(crate) fn keep_alive(&self) -> guest_mem::KeepAlive {
        self.ram.keep_alive()
    }

    /// A page of it has vanished: its file was truncated.
    pub(crate) fn is_lost(&self) -> bool {
        self.ram.is_lost()
    }

    /// The device's door to it.
    #[inline]
    pub(crate) fn view(&mut self) -> View<'_, DirectMap, ForeignRam> {
        View::new(&mut self.map, &self.ram, SOURCE)
    }

    /// Reads guest memory without a device's view, for the recovery of a ring.
    pub(crate) fn peek(&self, at: Iova, buf: &mut [u8]) -> guest_mem::Access<()> {
        self.ram.read(Gpa::new(at.raw()), buf)
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
