//! An identity-mapped IOMMU with holes, and DMA of a device through it.

use guest_mem::{
    Access, Dma, DmaFault, Gpa, Hva, Intent, Iommu, Iova, Lease, LeaseId, LeaseStop, LeaseTable,
    Leases, PAGE_SIZE, Perm, PhysMem, Run, SourceId, View, Wanted, Window, left_in_span,
};

use crate::ArrayMem;

/// An IOMMU that maps every address to itself, except ranges that the test has denied.
///
/// A denial has the effect of a guest's unmap and invalidation: later accesses fault, windows
/// become stale, and leases in the range count as stale until they end.
#[derive(Debug)]
pub struct FlatIommu {
    denied: Vec<Denied>,
    faults: Vec<(Iova, Perm)>,
    generation: u64,
    page: u64,
    leases: LeaseTable,
}

#[derive(Clone, Copy, Debug)]
struct Denied {
    start: u64,
    last: u64,
    perm: Perm,
}

impl FlatIommu {
    /// Creates an IOMMU with everything mapped in pages of 4 KiB, and room for `max_leases` leases.
    pub fn new(max_leases: usize) -> Self {
        Self {
            denied: Vec::new(),
            faults: Vec::new(),
            generation: 1,
            page: PAGE_SIZE,
            leases: LeaseTable::new(max_leases),
        }
    }

    /// Sets the size of the mappings from now on, a power of two: less than a page splits accesses
    /// more often, more than a page splits them less often.
    pub fn set_page(&mut self, bytes: u64) {
        assert!(bytes.is_power_of_two());
        self.page = bytes;
        self.generation += 1;
    }

    /// Removes the permission `perm` from `len` bytes, at least 1.
    pub fn deny(&mut self, iova: Iova, len: u64, perm: Perm) {
        let start = iova.raw();
        let last = start.checked_add(len - 1).expect("the range does not wrap");
        let denied = Denied { start, last, perm };
        self.denied.push(denied);
        self.generation += 1;
        let range = Some((Iova::new(start), Iova::new(last)));
        self.leases.recheck_now(range, |lease| lease.perm != perm);
    }

    /// Removes both permissions from `len` bytes, at least 1.
    pub fn unmap(&mut self, iova: Iova, len: u64) {
        self.deny(iova, len, Perm::Read);
        self.deny(iova, len, Perm::Write);
    }

    /// Maps everything again. Leases that became stale stay stale.
    pub fn allow_all(&mut self) {
        self.denied.clear();
        self.generation += 1;
    }

    /// Makes every window stale without changing any mapping, as an invalidation of unchanged pages
    /// does.
    pub fn flush(&mut self) {
        self.generation += 1;
    }

    /// Returns the accesses refused so far: the first refused address of each, oldest first.
    pub fn faults(&self) -> &[(Iova, Perm)] {
        &self.faults
    }
}

impl Iommu for FlatIommu {
    fn translate<M: PhysMem>(
        &mut self,
        _mem: &M,
        _source: SourceId,
        iova: Iova,
        perm: Perm,
    ) -> Access<Run> {
        let mut len = self.page - iova.offset_in(self.page);
        for denied in self.denied.iter().filter(|denied| denied.perm == perm) {
            if (denied.start..=denied.last).contains(&iova.raw()) {
                self.faults.push((iova, perm));
                return Err(DmaFault::Blocked { iova }.into());
            }
            if let Some(distance) = denied.start.checked_sub(iova.raw()) {
                len = len.min(distance);
            }
        }
        Ok(Run {
            gpa: Gpa::new(iova.raw()),
            len,
        })
    }

    fn generation(&self, _source: SourceId) -> u64 {
        self.generation
    }

    type Leases = LeaseTable;

    fn leases(&self) -> &LeaseTable {
        &self.leases
    }

    fn leases_mut(&mut self) -> &mut LeaseTable {
        &mut self.leases
    }

    /// Translates mapping by mapping, as an IOMMU with page tables does.
    fn translate_run<M: PhysMem>(
        &mut self,
        mem: &M,
        source: SourceId,
        iova: Iova,
        len: u64,
        perm: Perm,
    ) -> Access<Run> {
        let mut run = self.translate(mem, source, iova, perm)?;
        let len = len.min(left_in_span(iova));
        while run.len < len {
            let at = iova.raw() + run.len;
            let denied = self
                .denied
                .iter()
                .find(|denied| denied.perm == perm && (denied.start..=denied.last).contains(&at));
            if denied.is_some() {
                break;
            }
            run.len += self.translate(mem, source, Iova::new(at), perm)?.len;
        }
        run.len = run.len.min(len);
        Ok(run)
    }
}

/// DMA of a device through a [`FlatIommu`] of its own: an IOVA is the GPA of the same value.
#[derive(Debug)]
pub struct FlatDma<M: PhysMem = ArrayMem> {
    /// The IOMMU: the test denies ranges, counts leases and reads faults here.
    pub iommu: FlatIommu,
    mem: M,
    source: SourceId,
}

impl<M: PhysMem> FlatDma<M> {
    /// Creates device 00:01.0 on `mem`, with room for 1024 leases.
    pub fn new(mem: M) -> Self {
        Self::with_max_leases(mem, 1024)
    }

    /// Creates device 00:01.0 on `mem`, with room for `max_leases` leases.
    pub fn with_max_leases(mem: M, max_leases: usize) -> Self {
        Self {
            iommu: FlatIommu::new(max_leases),
            mem,
            source: SourceId::new(0, 1, 0),
        }
    }

    /// Returns the memory that the device accesses.
    pub fn mem(&self) -> &M {
        &self.mem
    }

    fn view(&mut self) -> View<'_, FlatIommu, M> {
        View::new(&mut self.iommu, &self.mem, self.source)
    }
}

impl<M: PhysMem> Dma for FlatDma<M> {
    fn read(&mut self, iova: Iova, buf: &mut [u8]) -> Access<()> {
        self.view().read(iova, buf)
    }

    fn write(&mut self, iova: Iova, buf: &[u8]) -> Access<()> {
        self.view().write(iova, buf)
    }

    fn generation(&self) -> u64 {
        self.iommu.generation(self.source)
    }

    fn window(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Window> {
        self.view().window(iova, len, perm)
    }

    fn refresh(&mut self, window: &mut Window) -> Access<()> {
        self.view().refresh(window)
    }

    fn lease(
        &mut self,
        iova: Iova,
        len: u32,
        intent: impl Into<Intent>,
    ) -> Result<Lease, LeaseStop> {
        self.view().lease(iova, len, intent)
    }

    fn host(&mut self, iova: Iova, len: u32, intent: Intent) -> Access<(Hva, u32)> {
        self.view().host(iova, len, intent)
    }

    fn locate(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Run> {
        self.view().locate(iova, len, perm)
    }

    fn gather(&mut self, ranges: impl Iterator<Item = Wanted>) -> Access<()> {
        self.view().gather(ranges)
    }

    fn has_lease_room(&self, leases: usize) -> bool {
        self.iommu.leases().has_room(self.source, leases)
    }

    fn is_stale(&self, id: LeaseId) -> bool {
        self.iommu.leases().is_stale(id)
    }

    fn release(&mut self, id: LeaseId) {
        self.view().release(id);
    }
}
