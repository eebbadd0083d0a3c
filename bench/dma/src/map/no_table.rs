//! A table that translates nothing: what is left is the bookkeeping, which is what the loops d measure.
#![expect(
    unsafe_code,
    reason = "the trait's functions that give table pages back are declared so; these do nothing"
)]

use address::{Iova, PhysAddr};
use dma_map::table::{MapError, PageTable, RetiredTable, TableStats, Translation, UnmapError};
use iova::{Access, IovaRange};

/// Maps nothing, unmaps nothing, never fails.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoTable;

impl PageTable for NoTable {
    #[inline]
    fn map(&self, _: IovaRange, _: PhysAddr, _: Access) -> Result<(), MapError> {
        Ok(())
    }

    #[inline]
    fn unmap(&self, _: IovaRange) -> Result<(), UnmapError> {
        Ok(())
    }

    fn lookup(&self, _: Iova) -> Option<Translation> {
        None
    }

    fn root(&self) -> PhysAddr {
        PhysAddr::new(0)
    }

    fn levels(&self) -> u32 {
        4
    }

    fn stats(&self) -> TableStats {
        TableStats::default()
    }

    unsafe fn retire_leaf(&self, _: IovaRange) -> Option<RetiredTable> {
        None
    }

    unsafe fn release(&self, _: RetiredTable) {}
}
