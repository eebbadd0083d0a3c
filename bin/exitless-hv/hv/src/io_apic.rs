//! The I/O APIC (82093AA, §3), behind a page that the guest does not reach: what it writes there is
//! taken down here, and what of it may be goes to the chip.
//!
//! ```text
//!   written: SELECT ─▶ selects
//!            WINDOW of an entry ─▶ a `Redirection`, which policy checks ── redirect ─▶ the chip
//!            WINDOW of another register, EOI ─▶ the chip
//! ```

use eli::policy::Pin;

use crate::memory;

const PINS: u32 = 24;
const SELECT: u64 = 0;
const WINDOW: u64 = 0x10;
const EOI: u64 = 0x40;
const FIRST_ENTRY: u32 = 0x10;
/// The chip's own bits of an entry: a delivery is pending, a level waits for its end.
const STATUS: u32 = 1 << 12 | 1 << 14;

/// An entry that the guest wrote.
#[derive(Clone, Copy, Debug)]
pub struct Redirection {
    /// Its pin.
    pub pin: u32,
    /// The whole entry.
    pub entry: u64,
}

/// An I/O APIC.
pub struct IoApic {
    page: u64,
    select: u32,
    /// Entries as the guest wrote them.
    entries: [u64; PINS as usize],
}

impl IoApic {
    /// Takes the chip at this page, with every pin masked.
    ///
    /// # Safety
    /// One is there (ACPI says so).
    pub unsafe fn new(page: u64) -> Self {
        let chip = Self {
            page,
            select: 0,
            entries: [Pin::MASKED; PINS as usize],
        };
        chip.mask_all();
        chip
    }

    /// Returns the entries as the guest wrote them, by their pins.
    pub fn entries(&self) -> &[u64; PINS as usize] {
        &self.entries
    }

    fn read(&self, register: u32) -> u32 {
        // SAFETY: `new`'s caller: it is the chip, and the guest reaches it only through us.
        unsafe {
            memory::write32(self.page + SELECT, register);
            memory::read32(self.page + WINDOW)
        }
    }

    fn write(&self, register: u32, value: u32) {
        // SAFETY: as above; the value has been checked.
        unsafe {
            memory::write32(self.page + SELECT, register);
            memory::write32(self.page + WINDOW, value);
        }
    }

    /// Returns the pin of an entry that is selected, and which half of it.
    fn selected(&self) -> Option<(u32, u32)> {
        let at = self.select.checked_sub(FIRST_ENTRY)?;
        (at < 2 * PINS).then_some((at / 2, at % 2 * 32))
    }

    /// Offsets in its page, and the values that an access reads there: of an entry what the guest
    /// wrote, and the chip's status.
    pub fn shown(&self) -> [(u64, u32); 2] {
        let real = self.read(self.select);
        let window = match self.selected() {
            Some((pin, 0)) => self.entries[pin as usize] as u32 & !STATUS | real & STATUS,
            Some((pin, half)) => (self.entries[pin as usize] >> half) as u32,
            None => real,
        };
        [(SELECT, self.select), (WINDOW, window)]
    }

    /// Takes the guest's write of `value` at `offset`, a multiple of 16. An entry has not reached
    /// the chip yet.
    pub fn written(&mut self, offset: u64, value: u32) -> Option<Redirection> {
        match offset {
            SELECT => self.select = value & 0xff,
            // Identifier and arbitration; there are no others that are written.
            WINDOW if self.select < FIRST_ENTRY => self.write(self.select, value),
            WINDOW => {
                let (pin, half) = self.selected()?;
                let entry = &mut self.entries[pin as usize];
                *entry = *entry & !(0xffff_ffff << half) | u64::from(value) << half;
                return Some(Redirection { pin, entry: *entry });
            }
            // SAFETY: an end of interrupt for a pin; at worst the pin interrupts again.
            EOI => unsafe { memory::write32(self.page + EOI, value) },
            _ => {}
        }
        None
    }

    /// Masks every pin.
    pub fn mask_all(&self) {
        for pin in 0..PINS {
            self.write(FIRST_ENTRY + pin * 2, Pin::MASKED as u32);
        }
    }

    /// Gives the chip an entry that policy has checked: masked, changed, and then as it is to be.
    pub fn redirect(&self, to: Redirection) {
        let Redirection { pin, entry } = to;
        let low = FIRST_ENTRY + pin * 2;
        self.write(low, entry as u32 | Pin::MASKED as u32);
        self.write(low + 1, (entry >> 32) as u32);
        self.write(low, entry as u32);
    }
}
