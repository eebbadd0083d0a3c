//! One of a ring's three areas, as cached pointers: one [`Window`] per 4 KiB page, made on first use and
//! translated again when the view's generation has moved.
//!
//! Common path: one comparison of generations, no translation, no lookup.

use guest_mem::{Access, Dma, DmaFault, Iova, PAGE_SIZE, Perm, Window};

const PAGE: u32 = PAGE_SIZE as u32;

/// A window and the generation under which it was last known to hold.
struct Page {
    window: Window,
    generation: u64,
}

/// A range of IOVA that is accessed over and over.
pub(super) struct Area {
    base: Iova,
    len: u32,
    /// Offset of `base` in its page.
    skew: u32,
    perm: Perm,
    /// Bound: 65,536 B table → 17 pages; 32768-entry used ring → 65.
    pages: Vec<Option<Page>>,
}

impl Area {
    /// `[base, base + len)`; `None` if that wraps or is empty.
    pub(super) fn new(base: Iova, len: u32, perm: Perm) -> Option<Self> {
        base.checked_add(u64::from(len.checked_sub(1)?))?;
        let skew = base.offset_in(PAGE_SIZE) as u32;
        let count = (skew + len).div_ceil(PAGE) as usize;
        let pages = (0..count).map(|_| None).collect();
        Some(Self {
            base,
            len,
            skew,
            perm,
            pages,
        })
    }

    /// First byte.
    pub(super) fn base(&self) -> Iova {
        self.base
    }

    /// The window that holds byte `offset`, and where in it. `offset` is below the length given to `new`.
    #[inline]
    pub(super) fn at<D: Dma>(&mut self, dma: &mut D, offset: u32) -> Access<(&Window, u32)> {
        debug_assert!(offset < self.len);
        let at = self.skew + offset;
        let index = (at / PAGE) as usize;
        let within = if index == 0 { offset } else { at % PAGE };
        let generation = dma.generation();
        let current = matches!(&self.pages[index], Some(page) if page.generation == generation);
        if !current {
            self.renew(dma, index, generation)?;
        }
        match &self.pages[index] {
            Some(page) => Ok((&page.window, within)),
            None => Err(DmaFault::BadRange.into()),
        }
    }

    /// Makes or refreshes the window of page `index`. On error the page has none.
    #[cold]
    fn renew<D: Dma>(&mut self, dma: &mut D, index: usize, generation: u64) -> Access<()> {
        let window = match self.pages[index].take() {
            Some(mut page) => {
                dma.refresh(&mut page.window)?;
                page.window
            }
            None => {
                let first = if index == 0 {
                    0
                } else {
                    index as u32 * PAGE - self.skew
                };
                let end = ((index as u32 + 1) * PAGE - self.skew).min(self.len);
                let start = self
                    .base
                    .checked_add(u64::from(first))
                    .ok_or(DmaFault::BadRange)?;
                dma.window(start, end - first, self.perm)?
            }
        };
        self.pages[index] = Some(Page { window, generation });
        Ok(())
    }
}
