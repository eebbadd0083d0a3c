//! A table that translates nothing: only the bookkeeping is left, which the loops d measure.

use std::convert::Infallible;

use address::{Iova, PhysAddr};
use dma_map::IoMap;
use dma_map::table::{MapError, Translation, UnmapError};
use iova::{Access, IovaRange};

/// Maps nothing, unmaps nothing, never fails.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoTable;

impl IoMap for NoTable {
    type Error = Infallible;

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
}
