//! The guest's machine: what all of its processors have, and its cores share.
//!
//! **Ownership.** Three kinds of state, by who writes:
//!
//! * *Facts*: memory, options, the host's clock, where the device and the chips are. Written at the
//!   start, before another core has the machine, and never again; read by any core without a lock.
//! * *Behind a lock*: [`Chips`], devices whose state two processors' accesses must find whole, and
//!   [`Measurement`], windows. A section under either is a bounded number of accesses to registers:
//!   at most one write of the device's table (2,048 entries; 65 of QEMU's), or a wait for the IOMMU
//!   ([`remapping`](crate::remapping): a number of reads). No section enters the guest, waits for
//!   another core, or takes the other lock. So is the [block function](block); a section of its
//!   lock may wait for the I/O core, which takes none.
//! * *Counters*: one set for each processor, which its core alone adds to, and any core reads.
//! * *Mailboxes*: one for each processor, by which others ask its core for what only that may do
//!   ([`mailbox`]).
//!
//! A processor's own state is not here ([`Processor`](crate::vm::Processor)): its control block,
//! saved registers, nested tables and shadow, local APIC, mode machine and single step. Its core
//! alone has them, and changes them for others when they ask.
//!
//! `set_up` is before the first entry.

pub mod block;
pub mod chips;
pub mod mailbox;
pub mod measurement;
mod set_up;

use core::sync::atomic::{AtomicBool, Ordering};

use bare::processor;
use eli::defence::Defence;
use eli::policy::ports::Ports;
use eli::policy::{PROCESSORS_MAX, Processors};

use self::block::{Block, BlockAddress};
use self::chips::Chips;
use self::mailbox::Mailbox;
use self::measurement::{Account, Measurement, Time};
use crate::block_pages::BlockPage;
use crate::hpet::{Clock, Hpet};
use crate::lock::{Guard, Lock};
use crate::memory::{Guest, PAGE};
use crate::msix::Msix;
use crate::options::Options;
use crate::pages::Shared;
use crate::report::{Counters, Counts};

/// Ranges of addresses that are withheld from the guest.
const WITHHELD_MAX: usize = 8;

/// The machine.
pub struct Machine {
    options: Options,
    memory: Guest,
    /// The guest's processors: each is a core's own.
    processors: Processors,
    ports: Ports,
    hpet: Option<Hpet>,
    /// The assigned device's messages.
    msix: Option<Msix>,
    /// The page of the I/O APIC, if the guest does not reach it.
    io_apic: Option<u64>,
    /// The assigned device reaches the guest's memory alone.
    contains_dma: bool,
    /// Pages in whose place the guest sees nothing.
    nothing: [Option<core::ops::Range<u64>>; WITHHELD_MAX],
    /// Memory that the guest does not reach, beside the hypervisor's own.
    removed: [Option<core::ops::Range<u64>>; WITHHELD_MAX],
    pages: &'static mut Shared,
    /// Slot and base address of the block function, if there is one.
    block_place: Option<BlockAddress>,
    chips: Lock<Chips>,
    block: Lock<Option<Block>>,
    measurement: Lock<Measurement>,
    counters: [Counters; PROCESSORS_MAX],
    mailboxes: [Mailbox; PROCESSORS_MAX],
    is_over: AtomicBool,
}

impl Machine {
    /// Returns the command line.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Returns the guest's memory.
    pub fn memory(&self) -> &Guest {
        &self.memory
    }

    /// Returns whether a defence is on.
    pub fn defends(&self, defence: Defence) -> bool {
        self.options.defend.has(defence)
    }

    /// Returns whether the timers of its local APICs are the guest's own.
    pub fn assigns_timer(&self) -> bool {
        self.options.mode.assigns_timer()
    }

    /// Returns the guest's processors.
    pub fn processors(&self) -> &Processors {
        &self.processors
    }

    /// Returns the mailbox of processor `index`.
    pub fn mailbox(&self, index: usize) -> &Mailbox {
        &self.mailboxes[index]
    }

    /// Ends the guest, for a reason of the caller's. Returns whether it was not over before.
    pub fn end(&self) -> bool {
        // Relaxed: what is reported of the end is read from counters.
        !self.is_over.swap(true, Ordering::Relaxed)
    }

    /// Returns whether the guest is over.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Ticks that the watchdog has made, if there is one.
    pub fn watchdog_ticks(&self) -> Option<u64> {
        self.hpet.as_ref()?.watchdog_ticks()
    }

    /// Returns the list of ports.
    pub fn ports(&self) -> &Ports {
        &self.ports
    }

    /// Returns the assigned device's messages.
    pub fn msix(&self) -> Option<Msix> {
        self.msix
    }

    /// Returns the page of the I/O APIC, if accesses to it exit.
    pub fn io_apic_page(&self) -> Option<u64> {
        self.io_apic
    }

    /// Returns whether the assigned device reaches the guest's memory alone.
    pub fn contains_dma(&self) -> bool {
        self.contains_dma
    }

    /// Returns the pages that all processors have.
    pub fn pages(&self) -> &Shared {
        self.pages
    }

    /// Returns the devices with a state, for as long as this is held.
    pub fn chips(&self) -> Guard<'_, Chips> {
        self.chips.lock()
    }

    /// Returns slot and base address of the block function, if there is one.
    pub fn block_place(&self) -> Option<BlockAddress> {
        self.block_place
    }

    /// Returns the guest's view of a page, if it is the block function's.
    pub fn block_page(&self, page: u64) -> Option<BlockPage> {
        debug_assert!(page.is_multiple_of(PAGE));
        let offset = self.block_place?.offset(page)?;
        Some(self.pages.block.at(offset))
    }

    /// Returns the block function's state, if there is one, for as long as this is held.
    pub fn block(&self) -> Guard<'_, Option<Block>> {
        self.block.lock()
    }

    /// Returns the counters of processor `index`.
    pub fn counters(&self, index: usize) -> &Counters {
        &self.counters[index]
    }

    /// Returns one of [`TOTALS`](crate::report::TOTALS), of all processors.
    pub fn total_of(&self, index: usize) -> u64 {
        self.counters
            .iter()
            .map(|counters| counters.total(index))
            .sum()
    }

    /// Returns the host's clock, if it has one.
    pub fn clock(&self) -> Option<Clock> {
        self.hpet.map(|hpet| hpet.clock())
    }

    /// Microseconds of the host's clock, if it has one.
    pub fn us(&self) -> Option<u64> {
        self.clock().map(Clock::microseconds)
    }

    /// Returns the milliseconds of the host's clock, if it has one.
    pub fn ms(&self) -> Option<u64> {
        self.clock().map(Clock::milliseconds)
    }

    /// Returns the host's time, if it has a clock.
    pub fn time(&self) -> Option<Time> {
        self.hpet.map(|hpet| Time {
            ms: hpet.clock().milliseconds(),
            ticks: hpet.ticks(),
        })
    }

    /// Sends a non-maskable interrupt at this time of the host's clock, at the first core.
    pub fn sample(&self, at_us: u64) {
        if let Some(hpet) = &self.hpet {
            hpet.sample(at_us);
        }
    }

    /// Takes notice that the guest is about to be entered.
    pub fn enter(&self) {
        self.measurement.lock().enter();
    }

    /// Windows of the run that have ended.
    pub fn windows(&self) -> u32 {
        self.measurement.lock().windows()
    }

    /// Begins a window.
    pub fn begin_window(&self) {
        let now = self.time().unwrap_or_default();
        let counts = self.counts();
        self.measurement
            .lock()
            .begin(counts, now, processor::cycles());
    }

    /// Ends a window. Returns its account.
    pub fn end_window(&self) -> Account {
        let counts = self.counts();
        self.measurement.lock().end(counts)
    }

    /// Returns the account of the whole run so far.
    pub fn total(&self) -> Account {
        let counts = self.counts();
        self.measurement.lock().total(counts)
    }

    /// Returns the counts of all processors, and the watching core's ticks.
    fn counts(&self) -> Counts {
        let all = self.counters.iter().map(Counters::read);
        let mut counts = all.fold(Counts::ZERO, |sum, counts| sum.plus(&counts));
        let taken = crate::core1::TAKEN.load(Ordering::Relaxed);
        counts.add(crate::report::Count::Ticks, taken);
        counts
    }
}
