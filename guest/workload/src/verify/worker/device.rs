//! Operations on blocks of the device, and transfers between blocks and pages.

use std::ops::Range;

use super::{BUFFER, Done, LEAST, Worker};
use crate::BLOCK;
use crate::device::Trim;
use crate::memory::PAGE;
use crate::verify::content::Content;
use crate::verify::shared::IoPath;

impl Worker<'_> {
    /// Writes pages to the same number of blocks, from `block` on.
    pub(super) fn store(
        &mut self,
        pages: Range<usize>,
        block: usize,
        way: IoPath,
    ) -> Result<(), String> {
        let at = self.number(block) * BLOCK as u64;
        self.shared
            .write(way, at, self.memory.bytes(pages.clone()))?;
        for (page, block) in pages.zip(block..) {
            self.put_block(block, self.pages[page].content());
        }
        Ok(())
    }

    /// Reads blocks into the same number of pages, from `page` on.
    pub(super) fn load(
        &mut self,
        blocks: Range<usize>,
        page: usize,
        way: IoPath,
    ) -> Result<(), String> {
        let at = self.number(blocks.start) * BLOCK as u64;
        let bytes = self.memory.bytes_mut(page..page + blocks.len());
        self.shared.read(way, at, bytes)?;
        for (block, page) in blocks.zip(page..) {
            self.put_page(page, self.blocks[block].content());
        }
        Ok(())
    }

    /// Writes new content to up to [`BUFFER`] blocks, from the worker's own buffer.
    pub(super) fn renew(&mut self, blocks: Range<usize>, way: IoPath) -> Result<(), String> {
        let at = self.number(blocks.start) * BLOCK as u64;
        for (index, block) in blocks.clone().enumerate() {
            let content = self.new_of_block(block);
            let data = &mut self.buffer.bytes_mut()[index * BLOCK..][..BLOCK];
            content.render(self.shared.seed, data);
            self.put_block(block, content);
        }
        let data = &self.buffer.bytes()[..blocks.len() * BLOCK];
        self.shared.write(way, at, data)
    }

    /// Writes new content to the blocks whose content is unknown.
    pub(super) fn make_known(&mut self, blocks: Range<usize>) -> Result<(), String> {
        for block in blocks {
            if !self.blocks[block].content().is_known() {
                let way = self.way();
                self.renew(block..block + 1, way)?;
            }
        }
        Ok(())
    }

    /// Chooses one to `max` pages, and the same number of blocks.
    fn some_of_both(&mut self, max: usize) -> (Range<usize>, Range<usize>) {
        let (pages, blocks) = (self.some_pages(max), self.some_blocks(max));
        let len = pages.len().min(blocks.len());
        // The remaining part of the longer range is chosen next.
        self.next_page = (pages.start + len) % self.part.pages;
        self.next_block = (blocks.start + len) % self.part.blocks;
        (
            pages.start..pages.start + len,
            blocks.start..blocks.start + len,
        )
    }

    /// Returns whether this I/O path is supported here, so that requests by it are counted as such.
    fn can(&self, way: IoPath) -> bool {
        way == IoPath::Cached || self.shared.has_direct()
    }

    pub(super) fn write(&mut self, way: IoPath) -> Done {
        if !self.can(way) {
            return Ok(0);
        }
        let (pages, blocks) = self.some_of_both(16);
        // Three times in four content that no other blocks have had; otherwise the pages' present
        // content.
        if !self.one_in(4) {
            for (page, block) in pages.clone().zip(blocks.clone()) {
                let content = self.new_of_block(block);
                content.render(self.shared.seed, self.memory.bytes_mut(page..page + 1));
                self.put_page(page, content);
            }
        }
        self.store(pages, blocks.start, way)?;
        if self.one_in(2) {
            let way = self.way();
            self.check_blocks(blocks.clone(), way)?;
        }
        Ok(blocks.len())
    }

    pub(super) fn read(&mut self, way: IoPath) -> Done {
        if !self.can(way) {
            return Ok(0);
        }
        let (pages, blocks) = self.some_of_both(16);
        self.make_known(blocks.clone())?;
        self.load(blocks, pages.start, way)?;
        self.sometimes_check(pages.clone())?;
        Ok(pages.len())
    }

    pub(super) fn read_twice(&mut self) -> Done {
        let blocks = self.some_blocks(8);
        self.make_known(blocks.clone())?;
        let ways = if self.one_in(2) {
            [IoPath::Cached, IoPath::Direct]
        } else {
            [IoPath::Direct, IoPath::Cached]
        };
        for way in ways {
            self.check_blocks(blocks.clone(), way)?;
        }
        Ok(blocks.len())
    }

    /// Chooses an I/O path for a part of a block. Returns it with the alignment that the part
    /// needs.
    fn way_of_part(&mut self) -> (IoPath, usize) {
        match self.way() {
            IoPath::Direct if self.shared.has_direct() && self.shared.sector < PAGE => {
                (IoPath::Direct, self.shared.sector)
            }
            _ => (IoPath::Cached, 1),
        }
    }

    pub(super) fn read_part(&mut self) -> Done {
        let block = self.any_block();
        self.make_known(block..block + 1)?;
        let (way, align) = self.way_of_part();
        // The range of a patch, at any aligned position in the buffer.
        let part = self.new_patch(Content::ZERO, align);
        let part = part.start()..part.end();
        let place = self.below(PAGE / align) * align;
        let at = self.number(block) * BLOCK as u64 + part.start as u64;
        let data = &mut self.buffer.bytes_mut()[place..place + part.len()];
        self.shared.read(way, at, data)?;
        self.check_in_buffer(block, part, place, way)?;
        Ok(1)
    }

    pub(super) fn write_part(&mut self) -> Done {
        let block = self.any_block();
        self.make_known(block..block + 1)?;
        let (way, align) = self.way_of_part();
        let mut content = self.blocks[block].content();
        let patch = self.new_patch(content, align);
        content.patch = Some(patch);
        let place = self.below(PAGE / align) * align;
        let at = self.number(block) * BLOCK as u64 + patch.start() as u64;
        let data = &mut self.buffer.bytes_mut()[place..place + patch.end() - patch.start()];
        patch.render(self.shared.seed, data);
        self.shared.write(way, at, data)?;
        self.put_block(block, content);
        let way = self.way();
        self.check_blocks(block..block + 1, way)?;
        Ok(1)
    }

    pub(super) fn read_many(&mut self) -> Done {
        let block = self.any_block();
        self.make_known(block..block + 1)?;
        let count = 8 + self.below(LEAST - 8);
        let pages: Vec<usize> = (0..count).map(|_| self.any_page()).collect();
        for page in &pages {
            let way = self.way();
            self.load(block..block + 1, *page, way)?;
        }
        for page in pages {
            self.check_page(page)?;
        }
        Ok(count)
    }

    pub(super) fn write_twice(&mut self) -> Done {
        let page = self.any_page();
        let blocks = [self.any_block(), self.any_block()];
        for block in blocks {
            let way = self.way();
            self.store(page..page + 1, block, way)?;
        }
        for block in blocks {
            let way = self.way();
            self.check_blocks(block..block + 1, way)?;
        }
        Ok(2)
    }

    pub(super) fn relay(&mut self) -> Done {
        let (page, from, to) = (self.any_page(), self.any_block(), self.any_block());
        self.make_known(from..from + 1)?;
        self.load(from..from + 1, page, IoPath::Direct)?;
        self.store(page..page + 1, to, IoPath::Direct)?;
        self.check_page(page)?;
        self.check_blocks(to..to + 1, IoPath::Direct)?;
        Ok(2)
    }

    pub(super) fn replace(&mut self) -> Done {
        let block = self.any_block();
        self.make_known(block..block + 1)?;
        let pages: [usize; 4] = std::array::from_fn(|_| self.any_page());
        for page in pages {
            self.load(block..block + 1, page, IoPath::Direct)?;
        }
        let way = self.way();
        self.renew(block..block + 1, way)?;
        for page in pages {
            self.check_page(page)?;
        }
        let way = self.way();
        self.check_blocks(block..block + 1, way)?;
        Ok(pages.len())
    }

    pub(super) fn discard(&mut self) -> Done {
        let blocks = self.some_blocks(32);
        self.trim(blocks, Trim::Discard, Content::UNKNOWN)
    }

    pub(super) fn zero_out(&mut self) -> Done {
        let blocks = self.some_blocks(BUFFER);
        let how = if self.one_in(2) {
            Trim::Zero
        } else {
            Trim::ZeroAndUnmap
        };
        let done = self.trim(blocks.clone(), how, Content::ZERO)?;
        if done > 0 && self.one_in(2) {
            let way = self.way();
            self.check_blocks(blocks, way)?;
        }
        Ok(done)
    }

    fn trim(&mut self, blocks: Range<usize>, how: Trim, after: Content) -> Done {
        let (number, count) = (self.number(blocks.start), blocks.len());
        if !self.shared.trim(number, count as u64, how)? {
            return Ok(0);
        }
        for block in blocks {
            self.put_block(block, after);
        }
        Ok(count)
    }

    pub(super) fn forget_blocks(&mut self, blocks: Range<usize>) -> Result<(), String> {
        let number = self.number(blocks.start);
        self.shared.forget(number, blocks.len() as u64)
    }

    pub(super) fn forget(&mut self) -> Done {
        let blocks = self.some_blocks(BUFFER);
        self.forget_blocks(blocks.clone())?;
        self.check_blocks(blocks.clone(), IoPath::Cached)?;
        Ok(blocks.len())
    }

    pub(super) fn drop_caches(&mut self) -> Done {
        if !self.shared.drop_caches()? {
            return Ok(0);
        }
        let blocks = self.some_blocks(BUFFER);
        self.check_blocks(blocks.clone(), IoPath::Cached)?;
        Ok(blocks.len())
    }
}
