//! Operations on memory alone.

use std::ops::Range;

use super::{Done, Worker};
use crate::memory::{Huge, Means, PAGE};
use crate::verify::content::{Base, Content, Patch};
use crate::verify::kinds::Phase;

impl Worker<'_> {
    pub(super) fn fill_page(&mut self, page: usize) {
        let content = self.new_of_page(page);
        content.render(self.shared.seed, self.memory.bytes_mut(page..page + 1));
        self.put_page(page, content);
    }

    /// Makes the next pages in order emptied ones, if there are any.
    fn skip_to_empty(&mut self) {
        if self.empty == 0 {
            return;
        }
        let is_empty = |page: &usize| self.pages[*page].content() == Content::ZERO;
        let mut in_order = (self.next_page..self.part.pages).chain(0..self.next_page);
        self.next_page = in_order.find(is_empty).expect("as counted");
    }

    pub(super) fn fill(&mut self) -> Done {
        if self.phase == Phase::Fill {
            self.skip_to_empty();
        }
        let pages = self.some_pages(32);
        pages.clone().for_each(|page| self.fill_page(page));
        Ok(pages.len())
    }

    pub(super) fn check(&mut self) -> Done {
        let start = self.any_page();
        let len = 1 + self.below(16);
        let pages = start..(start + len).min(self.part.pages);
        self.check_pages(pages.clone())?;
        Ok(pages.len())
    }

    /// Chooses a patch of some bytes on `content`; it begins and ends at a multiple of `align`, a
    /// power of two.
    pub(super) fn new_patch(&mut self, content: Content, align: usize) -> Patch {
        let units = PAGE / align;
        let start = self.below(units);
        // Short patches are as frequent as long ones.
        let most = [1, 8, 64, units][self.below(4)].min(units - start);
        let end = start + 1 + self.below(most);
        self.patch += 1;
        let patch = Patch::over(content.patch, start * align, end * align, self.patch);
        let (start, end) = (patch.start() / align, patch.end().div_ceil(align));
        Patch::over(None, start * align, end * align, self.patch)
    }

    pub(super) fn patch(&mut self) -> Done {
        let page = self.any_page();
        let mut content = self.pages[page].content();
        let patch = self.new_patch(content, 1);
        content.patch = Some(patch);
        let bytes = self.memory.bytes_mut(page..page + 1);
        patch.render(self.shared.seed, &mut bytes[patch.start()..patch.end()]);
        self.put_page(page, content);
        self.check_page(page)?;
        Ok(1)
    }

    pub(super) fn straddle(&mut self) -> Done {
        let pages = self.some_pages(4);
        let (first, last) = (pages.start, pages.end - 1);
        let (start, end) = (self.below(PAGE), 1 + self.below(PAGE));
        let mut len = 0;
        let mut at = 0;
        for page in pages.clone() {
            // A single page is overwritten from `start` to its end.
            let (start, end) = match page {
                page if page == first => (start, PAGE),
                page if page == last => (0, end),
                _ => (0, PAGE),
            };
            let mut content = self.pages[page].content();
            self.patch += 1;
            let patch = Patch::over(content.patch, start, end, self.patch);
            content.patch = Some(patch);
            if page == first {
                at = patch.start();
            }
            let size = patch.end() - patch.start();
            let data = &mut self.buffer.bytes_mut()[len..len + size];
            patch.render(self.shared.seed, data);
            len += size;
            self.put_page(page, content);
        }
        let means = self.means();
        let data = &self.buffer.bytes()[..len];
        self.memory.store(pages.clone(), at, data, means);
        self.check_pages(pages.clone())?;
        Ok(pages.len())
    }

    pub(super) fn zero(&mut self) -> Done {
        let pages = self.some_pages(16);
        let means = self.means();
        self.memory.set(pages.clone(), 0, means);
        self.emptied(pages)
    }

    /// Notes that pages read as zeros from now on; checks all of them, or one.
    fn emptied(&mut self, pages: Range<usize>) -> Done {
        self.put_pages(pages.clone(), Content::ZERO);
        if self.one_in(2) {
            self.check_pages(pages.clone())?;
        } else {
            let page = pages.start + self.below(pages.len());
            self.check_page(page)?;
        }
        Ok(pages.len())
    }

    pub(super) fn set(&mut self) -> Done {
        let pages = self.some_pages(8);
        let place = self.page_place(pages.start);
        let stamp = self.pages[pages.start].stamp(place);
        let seed = self.shared.seed;
        let means = self.means();
        let content = if means != Means::RepBytes && self.one_in(2) {
            self.memory.set(pages.clone(), stamp.word(seed), means);
            Base::Words(stamp)
        } else {
            let byte = stamp.byte(seed);
            match means {
                Means::Library => self.memory.bytes_mut(pages.clone()).fill(byte),
                _ => self
                    .memory
                    .set(pages.clone(), u64::from_le_bytes([byte; 8]), means),
            }
            Base::Bytes(stamp)
        };
        self.put_pages(pages.clone(), Content::whole(content));
        self.sometimes_check(pages.clone())?;
        Ok(pages.len())
    }

    /// Checks pages at once, or leaves them to a later check.
    pub(super) fn sometimes_check(&mut self, pages: Range<usize>) -> Result<(), String> {
        if self.one_in(2) {
            self.check_pages(pages)?;
        }
        Ok(())
    }

    pub(super) fn copy(&mut self) -> Done {
        let from = self.some_pages(8);
        let mut to = self.any_page();
        if from.start < to + from.len() && to < from.end {
            // Source and destination must not overlap: if need be the copy goes behind the source,
            // or to the first page.
            to = from.end % self.part.pages;
        }
        let len = from.len().min(self.memory.end_of_chunk(to) - to);
        let (from, to) = (from.start..from.start + len, to..to + len);
        let means = self.means();
        self.memory.copy(from.clone(), to.start, means);
        for (from, to) in from.zip(to.clone()) {
            self.put_page(to, self.pages[from].content());
        }
        self.sometimes_check(to)?;
        Ok(len)
    }

    pub(super) fn give_back(&mut self) -> Done {
        let pages = self.some_pages(64);
        self.memory
            .give_back(pages.clone())
            .map_err(|error| format!("MADV_DONTNEED: {error}"))?;
        self.emptied(pages)
    }

    pub(super) fn remap(&mut self) -> Done {
        let mut pages = self.some_pages(128);
        if self.one_in(2) {
            self.memory.replace(pages.clone())
        } else {
            let huge = if self.one_in(2) {
                Huge::Never
            } else {
                Huge::Maybe
            };
            pages = self.memory.chunk_of(pages.start);
            self.memory.remap(pages.start, huge)
        }
        .map_err(|error| format!("mmap of {} pages: {error}", pages.len()))?;
        self.emptied(pages)
    }
}
