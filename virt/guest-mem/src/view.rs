//! A device's view of guest memory: every address translated, every access permission-checked.
//!
//! The VM's owner makes a [`View`] for the time of one call into a device's poller, from the IOMMU
//! and the memory that it owns, and the device's own requester id. The view keeps no state of its
//! own.
//!
//! Cost: [`lease`](Dma::lease) is the path of every I/O request and is inlined as a whole into the
//! device: the IOMMU's lookup, a region lookup and a slab insertion.

use crate::access::{Access, DmaFault, Intent, Perm, Stop};
use crate::addr::{Gpa, Hva, Iova, SourceId};
use crate::direct_run::DirectRun;
use crate::dma::{Dma, Lease, LeaseStop, Wanted};
use crate::follow::{Attachment, Next};
use crate::iommu::{Iommu, Run};
use crate::lease::{Budget, LeaseId, Leases};
use crate::phys::PhysMem;
use crate::window::{Window, WindowTarget};

/// Permission-checked, IOMMU-aware view of guest memory for one device.
#[derive(Debug)]
pub struct View<'a, I: Iommu, M: PhysMem> {
    iommu: &'a mut I,
    mem: &'a M,
    source: SourceId,
}

impl<'a, I: Iommu, M: PhysMem> View<'a, I, M> {
    /// The view of device `source`, through `iommu`, of `mem`.
    #[inline]
    pub fn new(iommu: &'a mut I, mem: &'a M, source: SourceId) -> Self {
        Self { iommu, mem, source }
    }

    /// Splits `[iova, iova + len)` into translated pieces and gives each to `each`, with its range
    /// in the buffer.
    #[inline]
    fn for_each_piece(
        &mut self,
        iova: Iova,
        len: usize,
        perm: Perm,
        mut each: impl FnMut(&M, Gpa, std::ops::Range<usize>) -> Access<()>,
    ) -> Access<()> {
        if len == 0 {
            return Ok(());
        }
        check_range(iova, len as u64)?;
        let mut done = 0;
        while done < len {
            // Inside the range that was checked not to wrap.
            let at = Iova::new(iova.raw() + done as u64);
            let run = self.iommu.translate(self.mem, self.source, at, perm)?;
            assert!(run.len != 0, "an IOMMU answered an empty run");
            let left = (len - done) as u64;
            let piece = run.len.min(left) as usize;
            each(self.mem, run.gpa, done..done + piece)?;
            done += piece;
        }
        Ok(())
    }
}

/// Refuses empty ranges and those that wrap around the end of the space.
#[inline]
fn check_range(iova: Iova, len: u64) -> Access<()> {
    // The exclusive end is not above the start of either; nor is it of a range up to the last byte
    // of the space.
    if iova.raw().wrapping_add(len) <= iova.raw() {
        return check_last(iova, len);
    }
    Ok(())
}

#[cold]
fn check_last(iova: Iova, len: u64) -> Access<()> {
    if len == 0 || iova.checked_add(len - 1).is_none() {
        return Err(DmaFault::BadRange.into());
    }
    Ok(())
}

/// Returns the first contiguous piece of `len` bytes for which [`PhysMem::host`] has returned
/// `stop`: even if all of them are RAM, they may not be contiguous in the host's memory.
#[cold]
fn first_piece<M: PhysMem>(
    mem: &M,
    gpa: Gpa,
    len: u32,
    intent: Intent,
    stop: Stop,
) -> Access<(Hva, u32)> {
    if stop != Stop::Fault(DmaFault::BadRange) {
        return Err(stop);
    }
    // At most `len`, so it fits.
    let len = mem.run(gpa)?.min(u64::from(len)) as u32;
    Ok((mem.host(gpa, u64::from(len), intent)?, len))
}

impl<I: Iommu, M: PhysMem> Dma for View<'_, I, M> {
    #[inline]
    fn read(&mut self, iova: Iova, buf: &mut [u8]) -> Access<()> {
        self.for_each_piece(iova, buf.len(), Perm::Read, |mem, gpa, piece| {
            mem.read(gpa, &mut buf[piece])
        })
    }

    #[inline]
    fn write(&mut self, iova: Iova, buf: &[u8]) -> Access<()> {
        self.for_each_piece(iova, buf.len(), Perm::Write, |mem, gpa, piece| {
            mem.write(gpa, &buf[piece])
        })
    }

    #[inline]
    fn generation(&self) -> u64 {
        self.iommu.generation(self.source)
    }

    fn window(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Window> {
        check_range(iova, u64::from(len))?;
        // Taken before the walk: should anything change under it, the window is stale from birth.
        let generation = self.generation();
        let run = self.iommu.translate(self.mem, self.source, iova, perm)?;
        if run.len < u64::from(len) {
            return Err(DmaFault::BadRange.into());
        }
        let hva = self.mem.host(run.gpa, u64::from(len), perm.into())?;
        Window::new(
            self.mem,
            WindowTarget {
                iova,
                gpa: run.gpa,
                hva,
                len,
                perm,
                generation,
            },
        )
    }

    fn refresh(&mut self, window: &mut Window) -> Access<()> {
        if window.is_current(self.generation()) {
            return Ok(());
        }
        // Closed until everything below has succeeded, so that no error leaves a revoked pointer
        // usable.
        window.close();
        let generation = self.generation();
        let (iova, len) = (window.iova(), u64::from(window.len()));
        let run = self
            .iommu
            .translate(self.mem, self.source, iova, window.perm())?;
        if run.len < len {
            return Err(DmaFault::BadRange.into());
        }
        let hva = self.mem.host(run.gpa, len, window.perm().into())?;
        window.repoint(self.mem, run.gpa, hva)?;
        window.set_generation(generation);
        window.open();
        Ok(())
    }

    #[inline(always)]
    fn lease(
        &mut self,
        iova: Iova,
        len: u32,
        intent: impl Into<Intent>,
    ) -> Result<Lease, LeaseStop> {
        let intent = intent.into();
        let perm = intent.perm();
        check_range(iova, u64::from(len))?;
        let run = self
            .iommu
            .translate_run(self.mem, self.source, iova, u64::from(len), perm)?;
        // At most `len` from here on, so it fits.
        let (hva, len) = match self.mem.host(run.gpa, run.len, intent) {
            Ok(hva) => (hva, run.len as u32),
            Err(stop) => first_piece(self.mem, run.gpa, run.len as u32, intent, stop)?,
        };
        let id = self
            .iommu
            .leases_mut()
            .begin(self.source, iova, run.gpa, len, perm)?;
        Ok(Lease { id, hva, len })
    }

    #[inline]
    fn release(&mut self, id: LeaseId) {
        self.iommu.leases_mut().end(id);
    }

    fn locate(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Run> {
        check_range(iova, u64::from(len))?;
        self.iommu
            .translate_run(self.mem, self.source, iova, u64::from(len), perm)
    }

    #[inline]
    fn host(&mut self, iova: Iova, len: u32, intent: Intent) -> Access<(Hva, u32)> {
        check_range(iova, u64::from(len))?;
        let perm = intent.perm();
        let run = self
            .iommu
            .translate_run(self.mem, self.source, iova, u64::from(len), perm)?;
        // At most `len`, so it fits.
        match self.mem.host(run.gpa, run.len, intent) {
            Ok(hva) => Ok((hva, run.len as u32)),
            Err(stop) => first_piece(self.mem, run.gpa, run.len as u32, intent, stop),
        }
    }

    #[inline]
    fn direct_run(&mut self, iova: Iova) -> Option<DirectRun> {
        self.iommu.direct_run(self.mem, self.source, iova)
    }

    fn attachment(&self) -> Access<Attachment> {
        self.iommu.attachment(self.mem, self.source)
    }

    fn next_mapping(&self, from: Iova, last: Iova, budget: &mut Budget) -> Access<Next> {
        self.iommu
            .next_mapping(self.mem, self.source, from, last, budget)
    }

    /// Tables may be absent as well: memory behind an absent table is requested when the table has
    /// come in, and all other memory now.
    #[cold]
    fn gather(&mut self, ranges: impl Iterator<Item = Wanted>) -> Access<()> {
        let mut pieces = Vec::new();
        let mut waits = Ok(());
        for (iova, len, intent) in ranges {
            let mut done = 0;
            while done < u64::from(len)
                && let Some(at) = iova.checked_add(done)
            {
                let left = u64::from(len) - done;
                let perm = intent.perm();
                match self
                    .iommu
                    .translate_run(self.mem, self.source, at, left, perm)
                {
                    Ok(run) => {
                        pieces.push((run.gpa, run.len, intent));
                        done += run.len;
                    }
                    Err(stop @ Stop::Pending(_)) => {
                        waits = Err(stop);
                        done += I::left_behind_pending(at);
                    }
                    Err(Stop::Fault(_)) => break,
                }
            }
        }
        self.mem.gather(&pieces).and(waits)
    }

    fn has_lease_room(&self, leases: usize) -> bool {
        self.iommu.leases().has_room(self.source, leases)
    }

    fn is_stale(&self, id: LeaseId) -> bool {
        self.iommu.leases().is_stale(id)
    }
}
