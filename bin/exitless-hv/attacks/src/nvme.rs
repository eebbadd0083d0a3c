//! The least of an NVMe driver (NVM Express 1.4): two pairs of queues, Identify, reads and writes
//! of one block, and the first MSI-X entry. It polls.

use core::arch::asm;
use core::sync::atomic::{Ordering::SeqCst, fence};

use bare::pci;

use crate::tables::Page;
use crate::time;

/// Mass storage, NVM Express.
const CLASS: u32 = 0x01_0802;
/// PCI: the command's memory and bus master switches.
const COMMAND_ON: u32 = 6;
/// Switches of MSI-X.
const MSIX_ENABLE: u32 = 1 << 31;
const MSIX_MASKED: u32 = 1 << 30;
/// Registers: capabilities' high half, configuration, status, queue sizes, queue addresses, the
/// first doorbells.
const CAP_HIGH: u64 = 4;
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;
/// Configuration: on, entries of 64 and 16 bytes.
const CC_ON: u32 = 1 | 6 << 16 | 4 << 20;
const IDENTIFY: u64 = 6;
/// Admin commands that make a queue, and what they say: as long as the others, in one piece.
const MAKE_SUBMISSIONS: u64 = 1;
const MAKE_COMPLETIONS: u64 = 5;
const IN_ONE_PIECE: u64 = 1;
/// Commands of the second pair.
const WRITE: u64 = 1;
const READ: u64 = 2;
/// Identify: the controller.
const OF_CONTROLLER: u64 = 1;
/// Entries of either queue: a page holds the submissions.
const ENTRIES: u32 = 64;

static SUBMISSIONS: [Page; 2] = [Page::new(), Page::new()];
static COMPLETIONS: [Page; 2] = [Page::new(), Page::new()];
static BUFFER: Page = Page::new();

/// A pair of queues.
const ADMIN: usize = 0;
const DATA: usize = 1;

/// A controller with its admin queue.
pub struct Nvme {
    registers: u64,
    /// The first MSI-X entry.
    entry: u64,
    function: u16,
    capability: u8,
    /// Bytes from a doorbell to the next.
    stride: u64,
    /// Commands so far, of either pair.
    commands: [u32; 2],
}

impl Nvme {
    /// Finds the first controller, and starts it, with MSI-X on but masked.
    pub fn find() -> Result<Self, &'static str> {
        let function = pci::find(0..=u16::MAX, CLASS).ok_or("no NVMe function")?;
        let registers = pci::memory(function, 0).ok_or("no memory at BAR 0")?;
        let capability = pci::capability(function, pci::MSIX).ok_or("no MSI-X capability")?;
        let place = pci::read(function, capability + 4);
        let entry = pci::memory(function, place as u8 & 7)
            .ok_or("no memory at the MSI-X table's BAR")?
            + u64::from(place & !7);
        let command = pci::read(function, pci::COMMAND) & 0xffff | COMMAND_ON;
        // SAFETY: memory and bus master: its queues are pages that nothing else uses.
        unsafe { pci::write(function, pci::COMMAND, command) }
        let stride = 4 << (peek(registers + CAP_HIGH) & 0xf);
        let nvme = Self {
            registers,
            entry,
            function,
            capability,
            stride,
            commands: [0; 2],
        };
        nvme.start()?;
        Ok(nvme)
    }

    fn start(&self) -> Result<(), &'static str> {
        let is_ready = |ready| peek(self.registers + CSTS) & 1 == ready;
        poke(self.registers + CC, 0);
        if !time::until(5000, || is_ready(0)) {
            return Err("the controller does not stop");
        }
        // MSI-X comes before the queue: QEMU's controller reads its state when it makes one.
        self.set_msix(MSIX_ENABLE | MSIX_MASKED);
        poke(self.entry + 12, 1);
        poke(self.registers + AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1));
        for (register, page) in [(ASQ, &SUBMISSIONS[ADMIN]), (ACQ, &COMPLETIONS[ADMIN])] {
            poke(self.registers + register, page.address() as u32);
            poke(self.registers + register + 4, (page.address() >> 32) as u32);
        }
        poke(self.registers + CC, CC_ON);
        if !time::until(5000, || is_ready(1)) {
            return Err("the controller does not start");
        }
        Ok(())
    }

    /// Sets the first MSI-X entry, and unmasks it. The table is written by plain 32-bit moves only.
    pub fn set_interrupt(&self, address: u32, data: u32) {
        poke(self.entry, address);
        poke(self.entry + 4, 0);
        poke(self.entry + 8, data);
        poke(self.entry + 12, 0);
        self.set_msix(MSIX_ENABLE);
    }

    /// Masks the first entry, and turns MSI-X off.
    pub fn clear_interrupt(&self) {
        poke(self.entry + 12, 1);
        self.set_msix(0);
    }

    fn set_msix(&self, switches: u32) {
        let others = pci::read(self.function, self.capability) & !(MSIX_ENABLE | MSIX_MASKED);
        // SAFETY: it interrupts, or does not; all vectors have handlers.
        unsafe { pci::write(self.function, self.capability, others | switches) }
    }

    /// Returns the address of its registers.
    pub fn place(&self) -> u64 {
        self.registers
    }

    /// Moves its registers, and what is in the same window, by its first BAR.
    pub fn move_to(&mut self, place: u64) {
        const BAR: u8 = 0x10;
        for (register, half) in [(BAR, place as u32), (BAR + 4, (place >> 32) as u32)] {
            // SAFETY: what is there is no memory; the driver reaches its registers nowhere else
            // from now on.
            unsafe { pci::write(self.function, register, half) }
        }
        self.entry = self.entry - self.registers + place;
        self.registers = place;
    }

    /// Identifies the controller. Returns whether it did, within these milliseconds.
    pub fn identify(&mut self, milliseconds: u64) -> bool {
        self.identify_to(BUFFER.address(), milliseconds)
    }

    /// The same, with its 4 KiB written to this address.
    pub fn identify_to(&mut self, address: u64, milliseconds: u64) -> bool {
        let command = [IDENTIFY, 0, 0, address, 0, OF_CONTROLLER];
        self.run(ADMIN, command, milliseconds)
    }

    /// Makes the second pair of queues. Returns whether it is there.
    pub fn make_queues(&mut self) -> bool {
        let (number, len) = (DATA as u64, u64::from(ENTRIES - 1) << 16);
        let completions = [
            MAKE_COMPLETIONS,
            0,
            0,
            COMPLETIONS[DATA].address(),
            0,
            len | number,
            IN_ONE_PIECE,
        ];
        let submissions = [
            MAKE_SUBMISSIONS,
            0,
            0,
            SUBMISSIONS[DATA].address(),
            0,
            len | number,
            IN_ONE_PIECE | number << 16,
        ];
        // Of a command's words of 64 bits the sixth has its dwords 10 and 11.
        let make = |nvme: &mut Self, [a, b, c, d, e, f, g]: [u64; 7]| {
            nvme.run(ADMIN, [a, b, c, d, e, f | g << 32], 1000)
        };
        make(self, completions) && make(self, submissions)
    }

    /// Writes the first block from a page. Returns whether it did.
    pub fn write_block(&mut self, page: &Page) -> bool {
        self.run(DATA, [WRITE, 0, 0, page.address(), 0, 0], 1000)
    }

    /// Reads the first block to this address. Returns whether it did.
    pub fn read_block(&mut self, address: u64, milliseconds: u64) -> bool {
        self.run(DATA, [READ, 0, 0, address, 0, 0], milliseconds)
    }

    /// Runs a command of a pair: its first 48 bytes, without its identifier.
    fn run(&mut self, pair: usize, mut words: [u64; 6], milliseconds: u64) -> bool {
        /// Of the second pair's commands: the only namespace.
        const NAMESPACE: u64 = 1;
        let commands = &mut self.commands[pair];
        let (index, round) = (*commands % ENTRIES, *commands / ENTRIES);
        words[0] |= u64::from(index) << 16 | if pair == DATA { NAMESPACE << 32 } else { 0 };
        for at in 0..8 {
            let word = words.get(at).map_or(0, |word| *word);
            SUBMISSIONS[pair].set(8 * index as usize + at, word);
        }
        *commands += 1;
        let (next, doorbell) = (
            *commands % ENTRIES,
            DOORBELLS + 2 * self.stride * pair as u64,
        );
        fence(SeqCst);
        poke(self.registers + doorbell, next);

        // The last word of a completion: in bits 32 to 47 the command, then the phase, which is 1
        // in the first round.
        let last = || COMPLETIONS[pair].get(2 * index as usize + 1);
        let is_done = || last() >> 48 & 1 == u64::from(round + 1) & 1;
        if !time::until(milliseconds, is_done) {
            return false;
        }
        let is_good = last() >> 49 == 0 && last() >> 32 & 0xffff == u64::from(index);
        poke(self.registers + doorbell + self.stride, next);
        is_good
    }
}

fn peek(address: u64) -> u32 {
    let value;
    // SAFETY: the address is in a BAR of the driver's function, below 512 GiB, which is mapped as
    // it is.
    unsafe {
        asm!("mov {:e}, [{}]", out(reg) value, in(reg) address, options(nostack, preserves_flags))
    }
    value
}

fn poke(address: u64, value: u32) {
    // SAFETY: as above; the queues and the buffer whose addresses the device receives are pages
    // that nothing else uses.
    unsafe {
        asm!("mov [{}], {:e}", in(reg) address, in(reg) value, options(nostack, preserves_flags))
    }
}
