//! Identity translation for memory of another process, for a vhost-user back end without a device
//! IOTLB.

use crate::access::{Access, Perm};
use crate::addr::{Gpa, Iova, SourceId};
use crate::direct_run::DirectRun;
use crate::iommu::{Iommu, Run};
use crate::lease::{Full, LeaseId, Leases};
use crate::pages::Pages;
use crate::phys::PhysMem;

/// Identity mapping: an IOVA is the GPA of the same value, and a run reaches as far as host memory
/// is contiguous.
///
/// Unlike [`NoIommu`](crate::NoIommu), which splits at pages and records each lease, this type is
/// for the path of every request: one piece per buffer, and leases are only counted, so that a
/// change of the memory table can wait until there are none. All permissions are granted: there is
/// no page table that could deny them.
#[derive(Debug, Default)]
pub struct DirectMap {
    leases: LeaseCount,
    generation: u64,
}

/// Number of leases in flight, without a record of each.
#[derive(Debug, Default)]
pub struct LeaseCount(usize);

impl DirectMap {
    /// Creates a count of zero.
    pub const fn new() -> Self {
        Self {
            leases: LeaseCount(0),
            generation: 0,
        }
    }

    /// Leases begun and not ended.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.leases.0
    }

    /// The memory given to views from now on is another: makes every [`Window`](crate::Window)
    /// stale.
    pub fn memory_changed(&mut self) {
        self.generation += 1;
    }
}

impl Iommu for DirectMap {
    #[inline]
    fn translate<M: PhysMem>(
        &mut self,
        mem: &M,
        _source: SourceId,
        iova: Iova,
        _perm: Perm,
    ) -> Access<Run> {
        let gpa = Gpa::new(iova.raw());
        let len = mem.run(gpa)?;
        Ok(Run { gpa, len })
    }

    /// The whole of it: its leases are only counted.
    #[inline]
    fn translate_run<M: PhysMem>(
        &mut self,
        mem: &M,
        source: SourceId,
        iova: Iova,
        len: u64,
        perm: Perm,
    ) -> Access<Run> {
        let run = self.translate(mem, source, iova, perm)?;
        Ok(Run {
            gpa: run.gpa,
            len: run.len.min(len),
        })
    }

    #[inline]
    fn direct_run<M: PhysMem>(&self, mem: &M, _source: SourceId, iova: Iova) -> Option<DirectRun> {
        let piece = mem.lasting_piece(Gpa::new(iova.raw()))?;
        Some(DirectRun {
            iova: Iova::new(piece.gpa.raw()),
            len: piece.len,
            hva: piece.hva,
        })
    }

    #[inline]
    fn generation(&self, _source: SourceId) -> u64 {
        self.generation
    }

    type Leases = LeaseCount;

    #[inline]
    fn leases(&self) -> &LeaseCount {
        &self.leases
    }

    #[inline]
    fn leases_mut(&mut self) -> &mut LeaseCount {
        &mut self.leases
    }
}

impl Leases for LeaseCount {
    #[inline]
    fn begin(
        &mut self,
        _source: SourceId,
        _iova: Iova,
        _gpa: Gpa,
        _len: u32,
        _perm: Perm,
    ) -> Result<LeaseId, Full> {
        self.0 += 1;
        Ok(LeaseId::COUNTED)
    }

    /// All have the same name, so ending one twice is noticed only when none is left: that panics.
    #[inline]
    fn end(&mut self, id: LeaseId) {
        assert!(
            id == LeaseId::COUNTED && self.0 != 0,
            "ended a lease that is not in flight"
        );
        self.0 -= 1;
    }

    /// Returns false: the memory at an address changes only while there is no lease.
    fn is_stale(&self, _id: LeaseId) -> bool {
        false
    }

    fn has_room(&self, _source: SourceId, _leases: usize) -> bool {
        true
    }

    /// All, while there is a lease.
    fn in_use(&self, pages: &Pages) -> u32 {
        if self.0 == 0 { 0 } else { pages.all() }
    }
}
