//! The block function, as the guest's processor accesses it
//! ([`Block`](crate::machine::block::Block)): its pages, its registers, and the vectors of its
//! messages, which are checked like an assigned device's.

use eli::VectorSet;
use eli::defence::Defence;
use eli::policy::{self, Message, config::Target};
use elvis::function::{self, Written};
use elvis::messages::{self, ENTRIES};
use elvis::registers;

use super::Processor;
use crate::block_pages::BlockPage;
use crate::io_core::{self, Completion};
use crate::log::Hex;
use crate::memory::{self, PAGE};
use crate::nested::Access;

impl Processor {
    /// Shows the guest the function's pages.
    pub(super) fn show_block(&mut self) {
        let pages = self.machine.block_place().map(|place| place.pages());
        for page in pages.into_iter().flatten() {
            self.protect_block(page);
        }
    }

    /// Maps a page as the guest has it between its accesses.
    pub(super) fn protect_block(&mut self, page: u64) {
        match self.machine.block_page(page) {
            Some(BlockPage::Registers) => self.map(page, page, Access::Nothing),
            Some(BlockPage::Still(real) | BlockPage::Table(real)) => {
                self.map(page, real, Access::Read);
            }
            Some(BlockPage::Doorbell(real)) => self.map(page, real, Access::All),
            None => {}
        }
    }

    /// Returns the page for an access of the guest's at `address`, if a protected one of the
    /// function's is there: with what it reads, and to be checked after a write.
    pub(super) fn block_shown(&mut self, address: u64) -> Option<u64> {
        let scratch = &mut self.pages.scratch;
        match self.machine.block_page(address & !(PAGE - 1))? {
            BlockPage::Registers => {
                let shown = self.machine.block().as_mut().map(|block| block.shown());
                scratch.0.fill(0);
                if let Some(shown) = shown {
                    scratch.0[..shown.len()].copy_from_slice(&shown);
                }
                Some(scratch.address())
            }
            BlockPage::Table(real) => Some(real),
            BlockPage::Still(real) => {
                // SAFETY: both are pages of the hypervisor's (`BlockPages::at`), and not the same;
                // the other core may change pending bits meanwhile.
                unsafe { memory::copy(real as *const u8, scratch.0.as_mut_ptr(), PAGE as usize) }
                Some(scratch.address())
            }
            BlockPage::Doorbell(_) => None,
        }
    }

    /// Ends an access, which has been made, to the page that it was shown.
    pub(super) fn end_block(&mut self, address: u64, is_write: bool) {
        match self.machine.block_page(address & !(PAGE - 1)) {
            Some(BlockPage::Registers) if is_write => {
                let offset = (address % PAGE) as usize;
                let mut bytes = [0; registers::LEN];
                bytes.copy_from_slice(&self.pages.scratch.0[..registers::LEN]);
                if let Some(block) = self.machine.block().as_mut() {
                    block.written(offset, &bytes);
                }
                self.block_changed();
            }
            Some(BlockPage::Table(_)) => self.block_changed(),
            _ => {}
        }
    }

    /// Reads its configuration space, if that is what is accessed.
    pub(super) fn block_read(&mut self, target: Target) -> Option<u32> {
        self.machine
            .block_place()
            .filter(|place| place.number == target.function)?;
        self.machine
            .block()
            .as_ref()
            .map(|block| block.read(target.register))
    }

    /// Writes there. Whether it is that which is accessed.
    pub(super) fn block_write(&mut self, target: Target, value: u32) -> bool {
        if self
            .machine
            .block_place()
            .is_none_or(|place| place.number != target.function)
        {
            return false;
        }
        let written = match self.machine.block().as_mut() {
            Some(block) => block.write(target.register, target.lanes(), value),
            None => Written::Nothing,
        };
        match written {
            Written::Nothing => {}
            Written::Changed => self.block_changed(),
            Written::Refused(what) => {
                let at = u64::from(target.function) << 8 | u64::from(target.register);
                self.refuse(what, &Hex(at));
            }
        }
        true
    }

    /// Has the I/O core go by what the guest has set up now.
    fn block_changed(&mut self) {
        let machine = self.machine;
        let (Some(completion), Some(clock)) =
            (machine.options().mode.completion(), machine.clock())
        else {
            return;
        };
        let guard = machine.block();
        let Some(block) = guard.as_ref() else {
            return;
        };
        let (mut vectors, mut send) = (VectorSet::EMPTY, [None; ENTRIES]);
        for (index, slot) in send.iter_mut().enumerate() {
            let entry = machine.pages().block.entry(index);
            let sent = Some(entry).filter(|entry| block.is_open(*entry));
            if let Some((guests, real)) = sent.and_then(|entry| self.block_message(entry)) {
                vectors.insert(guests);
                *slot = Some(match completion {
                    Completion::Direct => real,
                    Completion::Injected => guests,
                });
            }
        }
        // First what is to come may come, then it does.
        if self.interrupts.set_block(vectors) {
            self.assigned_changed();
        }
        if !io_core::ask(block.settings(send), clock) {
            self.stop("the I/O core does not answer");
        }
    }

    /// Returns the vector that an entry sends, as the guest has it and as it is at the real local
    /// APIC.
    fn block_message(&mut self, entry: messages::Entry) -> Option<(eli::Vector, eli::Vector)> {
        let message = Message {
            address: u64::from(entry[1]) << 32 | u64::from(entry[0]),
            data: entry[2],
        };
        match policy::message(message, self.machine.processors()) {
            // It has one processor.
            Ok((_, guests)) => {
                // Made by the host, so that they are of the guest's classes whatever is defended.
                let real = match self.defends(Defence::Messages) {
                    true => self.claim("the block function", guests)?,
                    false => Some(guests).filter(|vector| *vector < eli::hosts::CRITICAL)?,
                };
                Some((guests, real))
            }
            Err(why) => {
                self.refuse("a message of the block function's", &why);
                None
            }
        }
    }
}

const _: () = assert!(function::PAGE as u64 == PAGE, "a structure for each page");
