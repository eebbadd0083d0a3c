//! Translation interface of an IOMMU, for a [`View`](crate::View), and its implementation for a
//! machine without one.

use crate::access::{Access, Perm};
use crate::addr::{Gpa, Iova, SourceId};
use crate::direct_run::DirectRun;
use crate::follow::{Attachment, Next};
use crate::lease::{Budget, LEASE_SPAN, LeaseTable, Leases};
use crate::phys::PhysMem;

/// A translated run: `len` contiguous bytes of guest-physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Address to which the requested one translates.
    pub gpa: Gpa,
    /// Length in bytes, at least 1: to the end of the mapping's page (4 KiB, 2 MiB or 1 GiB), or of
    /// the last of several that follow each other ([`Iommu::translate_run`]).
    pub len: u64,
}

/// An IOMMU as its devices see it. Called on the one thread that owns both (ARCHITECTURE.md: one
/// owner).
pub trait Iommu {
    /// Translates `source`'s access to `iova`. The IOMMU records a refusal before it returns
    /// [`DmaFault::Blocked`](crate::DmaFault::Blocked).
    fn translate<M: PhysMem>(
        &mut self,
        mem: &M,
        source: SourceId,
        iova: Iova,
        perm: Perm,
    ) -> Access<Run>;

    /// As [`translate`](Iommu::translate), over as many mappings as continue each other in
    /// guest-physical memory: 1 to `len` bytes, and no more than one lease may have. Only the first
    /// mapping may be refused, or wait: a run ends before one that would be.
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
            len: run.len.min(len).min(left_in_span(iova)),
        })
    }

    /// Returns the piece of memory around `iova` that `source` may access in any way without a
    /// translation: it cannot change before the call into the device returns. By default: none,
    /// each access has to be translated.
    #[inline]
    fn direct_run<M: PhysMem>(&self, mem: &M, source: SourceId, iova: Iova) -> Option<DirectRun> {
        let _ = (mem, source, iova);
        None
    }

    /// Returns the number of bytes from `iova` on that need no request of their own when a
    /// translation of it pends, since the awaited table serves them as well: for page tables, all
    /// that one table maps.
    fn left_behind_pending(iova: Iova) -> u64 {
        left_in_span(iova)
    }

    /// Changes whenever a translation of `source` obtained earlier may no longer hold. A pointer
    /// kept with the value it was obtained under is usable while the value is unchanged.
    fn generation(&self, source: SourceId) -> u64;

    /// Reads the attachment of `source`, from the tables as they are now.
    ///
    /// Silent: no fault is recorded, no cache is filled, no count moves. Errs only with
    /// [`Stop::Pending`](crate::Stop::Pending).
    fn attachment<M: PhysMem>(&self, mem: &M, source: SourceId) -> Access<Attachment> {
        let _ = (mem, source);
        Ok(Attachment::Off)
    }

    /// Finds the first mapping of `source` that has a byte in `from..=last`, clipped to that range.
    ///
    /// Silent as [`attachment`](Iommu::attachment) is, and past every cache: the tables as they are
    /// now, each entry read once and then used. A malformed entry maps nothing, and neither does
    /// one by which no access would succeed. [`Attachment::Off`] and [`Attachment::PassThrough`]
    /// have no mappings: the result is [`Next::None`].
    ///
    /// Each entry read is charged to `budget` ([`Budget::ENTRY`]). An unspent budget, however
    /// small, advances the search by at least one entry; with a spent one nothing is read. Fails
    /// only with [`Stop::Pending`](crate::Stop::Pending), and only if nothing is known about `from`
    /// itself: once the ticket is done, continue from the same `from`.
    fn next_mapping<M: PhysMem>(
        &self,
        mem: &M,
        source: SourceId,
        from: Iova,
        last: Iova,
        budget: &mut Budget,
    ) -> Access<Next> {
        let _ = (mem, source, from, last, budget);
        Ok(Next::None)
    }

    /// Type of its account of asynchronous accesses.
    type Leases: Leases;

    /// The leases in flight. They are all that keeps a host address between two calls: an IOMMU
    /// reaches its tables through memory each time.
    fn leases(&self) -> &Self::Leases;

    /// Returns the account, to begin or end a lease.
    fn leases_mut(&mut self) -> &mut Self::Leases;
}

/// Bytes that one lease from `iova` on may have.
#[inline]
pub fn left_in_span(iova: Iova) -> u64 {
    LEASE_SPAN - iova.offset_in(LEASE_SPAN)
}

/// No IOMMU: an IOVA is the GPA of the same value. Leases are counted, so that a reset still
/// drains.
#[derive(Debug)]
pub struct NoIommu {
    leases: LeaseTable,
}

impl NoIommu {
    /// A machine without an IOMMU, with room for `max_leases` asynchronous pieces in flight.
    pub fn new(max_leases: usize) -> Self {
        Self {
            leases: LeaseTable::new(max_leases),
        }
    }
}

impl Iommu for NoIommu {
    #[inline]
    fn translate<M: PhysMem>(
        &mut self,
        _mem: &M,
        _source: SourceId,
        iova: Iova,
        _perm: Perm,
    ) -> Access<Run> {
        // Clipped to the 4 KiB page like a mapping: a longer run would only hide bugs that pages
        // show.
        Ok(Run {
            gpa: Gpa::new(iova.raw()),
            len: iova.left_in_page(),
        })
    }

    #[inline]
    fn translate_run<M: PhysMem>(
        &mut self,
        _mem: &M,
        _source: SourceId,
        iova: Iova,
        len: u64,
        _perm: Perm,
    ) -> Access<Run> {
        Ok(Run {
            gpa: Gpa::new(iova.raw()),
            len: len.min(left_in_span(iova)),
        })
    }

    #[inline]
    fn generation(&self, _source: SourceId) -> u64 {
        0
    }

    type Leases = LeaseTable;

    #[inline(always)]
    fn leases(&self) -> &LeaseTable {
        &self.leases
    }

    #[inline(always)]
    fn leases_mut(&mut self) -> &mut LeaseTable {
        &mut self.leases
    }
}
