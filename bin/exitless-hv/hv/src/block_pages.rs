//! Pages behind the base address of the block function, which are the hypervisor's.

use elvis::function;
use elvis::messages::{self, ENTRIES};
use elvis::request;

use crate::io_core;
use crate::memory::Page;

/// The guest's view of a page of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockPage {
    /// Common configuration.
    Registers,
    /// Content that is only read, at this address.
    Still(u64),
    /// Message table, at this address.
    Table(u64),
    /// Memory to write to, at this address.
    Doorbell(u64),
}

/// Pages behind the base address. They stay where they are.
pub struct BlockPages {
    table: Page,
    config: Page,
    zeroes: Page,
    doorbell: Page,
}

impl BlockPages {
    /// Of a function without a disk.
    pub const ZERO: Self = Self {
        table: Page::ZERO,
        config: Page::ZERO,
        zeroes: Page::ZERO,
        doorbell: Page::ZERO,
    };

    /// Sets them to those of a function that has been reset, with a disk of so many bytes.
    pub fn init(&mut self, disk_len: usize) {
        let config = request::config(disk_len);
        self.config.0[..config.len()].copy_from_slice(&config);
        (0..ENTRIES).for_each(|index| messages::put(&mut self.table.0, index, messages::NONE));
    }

    /// Returns entry `index` of the message table, as the guest wrote it.
    pub fn entry(&self, index: usize) -> messages::Entry {
        messages::entry(&self.table.0, index)
    }

    /// Returns the page at `offset` of the base address.
    pub fn at(&self, offset: u64) -> BlockPage {
        match offset as u32 & !(function::PAGE - 1) {
            function::COMMON => BlockPage::Registers,
            function::DEVICE => BlockPage::Still(self.config.address()),
            function::NOTIFY => BlockPage::Doorbell(self.doorbell.address()),
            function::TABLE => BlockPage::Table(self.table.address()),
            function::PENDING => BlockPage::Still(io_core::PENDING.address()),
            _ => BlockPage::Still(self.zeroes.address()),
        }
    }
}
