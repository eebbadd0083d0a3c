//! One of a ring's areas, as cached pointers that are translated again when the view's generation
//! has moved.
//!
//! Where the whole area lies in one piece (memory without an IOMMU, large pages), it is one
//! [`Window`]; otherwise one per 4 KiB page, made on first use. The whole is tried only behind a
//! translation of its first byte that has succeeded, so that the attempt records no fault that the
//! access itself would not.
//!
//! Common path: one comparison of generations, no translation, no lookup.

use guest_mem::{Access, Dma, DmaFault, Iova, PAGE_SIZE, Pages, Perm, Window};

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
    whole: Option<Page>,
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
            whole: None,
            pages,
        })
    }

    /// First byte.
    pub(super) fn base(&self) -> Iova {
        self.base
    }

    /// The window that holds byte `offset`, and where in it. `offset` is below the length given to
    /// `new`.
    #[inline(always)]
    pub(super) fn at<D: Dma>(&mut self, dma: &mut D, offset: u32) -> Access<(&Window, u32)> {
        debug_assert!(offset < self.len);
        let generation = dma.generation();
        if self.whole(generation).is_none() {
            return self.at_page(dma, offset, generation);
        }
        match &self.whole {
            Some(whole) => Ok((&whole.window, offset)),
            None => Err(DmaFault::BadRange.into()),
        }
    }

    /// The two words at `offset`, relaxed.
    #[inline(always)]
    pub(super) fn load_pair<D: Dma>(&mut self, dma: &mut D, offset: u32) -> Access<(u64, u64)> {
        let (window, at) = self.at(dma, offset)?;
        Ok(window.load_pair_relaxed(at))
    }

    /// The whole area, if that is one window and current under `generation`: then an offset in the
    /// area is one in the window.
    #[inline(always)]
    pub(super) fn whole(&self, generation: u64) -> Option<&Window> {
        match &self.whole {
            Some(whole) if whole.generation == generation => Some(&whole.window),
            _ => None,
        }
    }

    /// The window that holds byte `offset`, if there is one that is current.
    pub(super) fn current(&self, offset: u32, generation: u64) -> Option<(&Window, u32)> {
        if let Some(whole) = self.whole(generation) {
            return Some((whole, offset));
        }
        let at = self.skew + offset;
        let index = (at / PAGE) as usize;
        match &self.pages[index] {
            Some(page) if page.generation == generation => {
                Some((&page.window, if index == 0 { offset } else { at % PAGE }))
            }
            _ => None,
        }
    }

    /// Those of `pages` that it reaches under `generation` without asking memory again.
    pub(super) fn in_use(&self, generation: u64, pages: &Pages) -> u32 {
        let held = self.pages.iter().chain([&self.whole]).flatten();
        let current = held.filter(|page| page.generation == generation);
        current.fold(0, |mask, page| mask | page.window.in_use(pages))
    }

    /// The window that [`at`](Self::at) made current under this generation, without asking again.
    #[inline]
    pub(super) fn held(&self, offset: u32, generation: u64) -> (&Window, u32) {
        self.current(offset, generation)
            .expect("made current by the caller")
    }

    #[cold]
    fn at_page<D: Dma>(
        &mut self,
        dma: &mut D,
        offset: u32,
        generation: u64,
    ) -> Access<(&Window, u32)> {
        let at = self.skew + offset;
        let index = (at / PAGE) as usize;
        let current = matches!(&self.pages[index], Some(page) if page.generation == generation);
        if !current {
            self.renew(dma, index, generation)?;
        }
        let within = if index == 0 { offset } else { at % PAGE };
        match (&self.whole, &self.pages[index]) {
            (Some(whole), _) if whole.generation == generation => Ok((&whole.window, offset)),
            (_, Some(page)) => Ok((&page.window, within)),
            (_, None) => Err(DmaFault::BadRange.into()),
        }
    }

    /// Makes or refreshes the window of page `index`; behind the first page, also the whole. On
    /// error the page has none.
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
        if index == 0 {
            self.whole = self.unite(dma, generation);
        }
        Ok(())
    }

    /// The whole as one window; the first page's is current.
    fn unite<D: Dma>(&mut self, dma: &mut D, generation: u64) -> Option<Page> {
        let window = match (self.whole.take(), &self.pages[..]) {
            (_, [Some(only)]) => only.window.clone(),
            (Some(mut whole), _) => {
                dma.refresh(&mut whole.window).ok()?;
                whole.window
            }
            (None, _) => dma.window(self.base, self.len, self.perm).ok()?,
        };
        Some(Page { window, generation })
    }
}
