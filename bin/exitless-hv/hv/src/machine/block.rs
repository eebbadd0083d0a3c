//! The block function (modes `elvis` and `poll`) as the guest's core has it: configuration space,
//! registers and message table, of which settings for the [I/O core](crate::io_core) are made.
//!
//! It is a function of no bus: an empty slot of the first one, which no access reaches, since
//! configuration space is mediated. Its base address lies below those that firmware has given,
//! where nothing is; its pages are the hypervisor's, by the nested page tables:
//!
//! | page | the guest |
//! |---|---|
//! | common configuration | exits at each access, and runs it on a page of its own |
//! | ISR, device's configuration, pending bits | reads; a write has no effect |
//! | doorbell | writes, without effect |
//! | message table | reads; a write exits, and is checked as an assigned device's |

use bare::pci;
use elvis::function::{self, Function, Written};
use elvis::messages::{self, ENTRIES};
use elvis::poller::Settings;
use elvis::registers::{self, Registers};

use crate::io_core;
use crate::memory::PAGE;

/// Slot and base address, which do not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockAddress {
    /// Bus << 8 | device << 3 | function.
    pub number: u16,
    /// Base address.
    pub base: u64,
}

impl BlockAddress {
    /// Finds an empty slot, and a base address below those of other functions; nothing of `taken`
    /// may be there.
    pub fn find(mut taken: impl Iterator<Item = (u64, u64)>) -> Option<Self> {
        const HEADER: u8 = 0x0c;
        /// End of the addresses that firmware's tables give to devices: the I/O APIC.
        const END: u64 = 0xfec0_0000;
        let slots = (1..32_u16).map(|device| device << 3);
        let number = slots
            .clone()
            .find(|number| pci::read(*number, 0) == u32::MAX)?;
        let functions = slots.flat_map(|slot| slot..slot + 8);
        let there = functions.filter(|number| pci::read(*number, 0) != u32::MAX);
        let plain = there.filter(|number| pci::read(*number, HEADER) >> 16 & 0x7f == 0);
        let bars = plain.flat_map(|number| (0..6).filter_map(move |bar| pci::memory(number, bar)));
        let below = bars.filter(|bar| *bar < END).min().unwrap_or(END);
        let base = below.checked_sub(Self::LEN)? & !(Self::LEN - 1);
        let is_free = taken.all(|(start, end)| end <= base || base + Self::LEN <= start);
        is_free.then_some(Self { number, base })
    }

    const LEN: u64 = function::BAR_LEN as u64;

    /// Returns the offset of `address` behind the base address.
    pub fn offset(&self, address: u64) -> Option<u64> {
        address.checked_sub(self.base).filter(|at| *at < Self::LEN)
    }

    /// Returns its pages.
    pub fn pages(&self) -> impl Iterator<Item = u64> + use<> {
        (self.base..self.base + Self::LEN).step_by(PAGE as usize)
    }
}

/// The function's state.
pub struct Block {
    function: Function,
    registers: Registers,
}

impl Block {
    /// Creates the state of a function which has been reset.
    pub fn new(place: BlockAddress) -> Self {
        Self {
            function: Function::new(place.base as u32),
            registers: Registers::default(),
        }
    }

    /// Reads configuration space.
    pub fn read(&self, register: u8) -> u32 {
        self.function.read(register)
    }

    /// Writes there.
    pub fn write(&mut self, register: u8, lanes: u32, value: u32) -> Written {
        self.function.write(register, lanes, value)
    }

    /// Returns the common configuration as the guest reads it.
    pub fn shown(&mut self) -> [u8; registers::LEN] {
        if io_core::has_stopped(self.registers.epoch()) {
            self.registers.set_needs_reset();
        }
        self.registers.shown()
    }

    /// Takes a write of the guest's at `offset` there, which has `bytes` now.
    pub fn written(&mut self, offset: usize, bytes: &[u8; registers::LEN]) {
        self.registers.written(offset, bytes);
    }

    /// Returns whether an entry of the message table sends.
    pub fn is_open(&self, entry: messages::Entry) -> bool {
        messages::is_open(entry, self.function.control()) && self.function.is_master()
    }

    /// Returns the settings for the I/O core, if the entries send these vectors.
    pub fn settings(&self, vectors: [Option<elvis::Vector>; ENTRIES]) -> Settings {
        let queue = self.registers.queue();
        Settings {
            epoch: self.registers.epoch(),
            queue: queue.filter(|_| self.function.is_master()),
            features: self.registers.features(),
            queue_entry: self.registers.queue_entry(),
            config_entry: self.registers.config_entry(),
            vectors,
        }
    }
}
