//! A device's way to memory that counts the bytes of data that are copied through it.

use std::ops::Range;

use guest_mem::{
    Access, Dma, Hva, Intent, Iova, Lease, LeaseId, LeaseStop, Perm, Run, Wanted, Window,
};

/// Passes everything on to the view `below`. Not for timed windows.
pub struct Counted<D> {
    below: D,
    /// Addresses of data; headers, status bytes and rings are not counted.
    data: Range<u64>,
    /// Bytes copied so far. A piece that is found for a copy in place counts as copied.
    pub copied: u64,
}

impl<D> Counted<D> {
    /// Counts the bytes at the addresses in `data`.
    pub fn new(below: D, data: Range<u64>) -> Self {
        Self {
            below,
            data,
            copied: 0,
        }
    }

    fn count(&mut self, iova: Iova, len: u64) {
        if self.data.contains(&iova.raw()) {
            self.copied += len;
        }
    }
}

impl<D: Dma> Dma for Counted<D> {
    fn read(&mut self, iova: Iova, buf: &mut [u8]) -> Access<()> {
        self.count(iova, buf.len() as u64);
        self.below.read(iova, buf)
    }

    fn write(&mut self, iova: Iova, buf: &[u8]) -> Access<()> {
        self.count(iova, buf.len() as u64);
        self.below.write(iova, buf)
    }

    fn generation(&self) -> u64 {
        self.below.generation()
    }

    fn window(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Window> {
        self.below.window(iova, len, perm)
    }

    fn refresh(&mut self, window: &mut Window) -> Access<()> {
        self.below.refresh(window)
    }

    fn lease(
        &mut self,
        iova: Iova,
        len: u32,
        intent: impl Into<Intent>,
    ) -> Result<Lease, LeaseStop> {
        self.below.lease(iova, len, intent)
    }

    fn locate(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Run> {
        self.below.locate(iova, len, perm)
    }

    fn host(&mut self, iova: Iova, len: u32, intent: Intent) -> Access<(Hva, u32)> {
        let found = self.below.host(iova, len, intent)?;
        self.count(iova, u64::from(found.1));
        Ok(found)
    }

    fn gather(&mut self, ranges: impl Iterator<Item = Wanted>) -> Access<()> {
        self.below.gather(ranges)
    }

    fn has_lease_room(&self, leases: usize) -> bool {
        self.below.has_lease_room(leases)
    }

    fn is_stale(&self, id: LeaseId) -> bool {
        self.below.is_stale(id)
    }

    fn release(&mut self, id: LeaseId) {
        self.below.release(id);
    }
}
