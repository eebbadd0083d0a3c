//! Translation of the buffers of one burst, with as few queries as memory allows.

use guest_mem::{Access, Dma, Intent, Iova, KeepAlive, MappedRun, VolatileSlice};

/// Translation of a burst's buffers. Not kept for longer: its results hold until the call into the
/// device returns.
pub(super) struct Reach<'k> {
    keep: &'k KeepAlive,
    /// Run of memory in which the last buffers were, if all of it may be accessed without a query.
    run: MappedRun<'k>,
}

impl<'k> Reach<'k> {
    pub(super) fn new(keep: &'k KeepAlive) -> Self {
        Self {
            keep,
            run: MappedRun::EMPTY,
        }
    }

    /// Returns the `len` bytes at `iova`, at least 1; `None` if they are not in one piece.
    #[inline(always)]
    pub(super) fn slice<D: Dma>(
        &mut self,
        dma: &mut D,
        iova: Iova,
        len: u32,
        intent: Intent,
    ) -> Access<Option<VolatileSlice<'k>>> {
        match self.run.slice(iova, len) {
            Some(slice) => Ok(Some(slice)),
            None => self.ask(dma, iova, len, intent),
        }
    }

    #[inline(never)]
    fn ask<D: Dma>(
        &mut self,
        dma: &mut D,
        iova: Iova,
        len: u32,
        intent: Intent,
    ) -> Access<Option<VolatileSlice<'k>>> {
        let run = dma.direct_run(iova);
        if let Some(run) = run.and_then(|run| MappedRun::new(self.keep, run)) {
            self.run = run;
            if let Some(slice) = run.slice(iova, len) {
                return Ok(Some(slice));
            }
        }
        let (hva, found) = dma.host(iova, len, intent)?;
        // Of memory that is not kept nothing is touched: `Dma` is a safe trait.
        Ok(match found == len {
            true => VolatileSlice::new(self.keep, hva, len),
            false => None,
        })
    }
}
