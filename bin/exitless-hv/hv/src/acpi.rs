//! Firmware's tables (ACPI 6.5, §5.2): where power is switched off, where the HPET is, and what the
//! guest must not find there.
//!
//! The HPET and the IOMMU are ours, and cores beside the guest's are not its own: the tables of the
//! former are given another name, and the entries of the latter are marked not enabled, where they
//! lie. So is the table of configuration space in memory (MCFG), if the guest does not have that.

use eli::policy::ports::Firmware;
use eli::policy::{PROCESSORS_MAX, Processors};

use crate::acpi_words::{ITEMS_MAX, length, read32, read64};
use crate::memory;
use crate::remapping::firmware::Firmware as Remapping;

/// Contents of the tables.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    /// Ports of power management.
    pub ports: Firmware,
    /// Port and value by which ACPI is turned on, if it can be.
    pub turn_on: Option<(u16, u8)>,
    /// The HPET's registers.
    pub hpet: Option<u64>,
    /// The I/O APIC's.
    pub io_apic: Option<u64>,
    /// Processors beside this one: their APIC identifiers, and where their entries are.
    others: [Option<(u32, u64)>; OTHERS_MAX],
    /// The table that these are in.
    processors_table: Option<u64>,
    /// The APIC identifier of a processor that is not the guest's ([`divide`](Tables::divide)).
    pub watcher: Option<u32>,
    /// Firmware's description of the IOMMUs.
    pub remapping: Remapping,
    /// Windows of configuration space in memory.
    pub windows: [Option<core::ops::Range<u64>>; WINDOWS_MAX],
    /// Their table.
    windows_table: Option<u64>,
}

/// The most processors beside this one that are the guest's, and one more.
const OTHERS_MAX: usize = PROCESSORS_MAX;

/// The most windows of configuration space that are read: one for each segment.
const WINDOWS_MAX: usize = 4;

const HEADER: u64 = 36;

impl Tables {
    /// Reads firmware's tables, and hides them from the guest as far as they must be.
    ///
    /// # Safety
    /// The guest does not run yet; firmware's tables are what it says.
    pub unsafe fn find_and_hide(own: u32) -> Self {
        let mut tables = Self::default();
        // The root pointer is in the BIOS's last 128 KiB, at a multiple of 16.
        let is_root = |address: &u64| read64(*address) == u64::from_le_bytes(*b"RSD PTR ");
        let Some(root) = (0xe_0000..0x10_0000_u64).step_by(16).find(is_root) else {
            return tables;
        };
        let rsdt = u64::from(read32(root + 16));
        let count = (u64::from(length(rsdt)).saturating_sub(HEADER) / 4) as usize;
        for index in (0..count.min(ITEMS_MAX)).map(|index| index as u64) {
            let table = u64::from(read32(rsdt + HEADER + index * 4));
            match &read32(table).to_le_bytes() {
                b"FACP" => tables.fixed(table),
                b"HPET" => {
                    tables.hpet = Some(read64(table + 44));
                    // SAFETY: the caller's.
                    unsafe { hide(table) };
                }
                b"DMAR" => {
                    tables.remapping = Remapping::read(table);
                    // SAFETY: the caller's.
                    unsafe { hide(table) };
                }
                b"MCFG" => tables.windows(table),
                // SAFETY: the caller's.
                b"APIC" => unsafe { tables.processors(table, own) },
                _ => {}
            }
        }
        tables
    }

    /// Reads the table of windows of configuration space (PCI Firmware 3.3, §4.1.2).
    fn windows(&mut self, table: u64) {
        self.windows_table = Some(table);
        let (mut at, end) = (table + 44, table + u64::from(length(table)));
        for window in &mut self.windows {
            if at + 16 > end {
                break;
            }
            let base = read64(at);
            let [_, _, first, last] = read32(at + 8).to_le_bytes().map(u64::from);
            *window = Some(base + (first << 20)..base + ((last + 1) << 20));
            at += 16;
        }
    }

    /// Hides the windows of configuration space.
    ///
    /// # Safety
    /// As [`find_and_hide`](Self::find_and_hide).
    pub unsafe fn hide_windows(&self) {
        if let Some(table) = self.windows_table {
            // SAFETY: the caller's.
            unsafe { hide(table) };
        }
    }

    /// Reads the fixed table (§5.2.9).
    fn fixed(&mut self, table: u64) {
        let port = |at| read32(table + at) as u16;
        let byte = |at| read32(table + at) as u8;
        self.ports = Firmware {
            events: [56, 60].map(port),
            events_len: byte(88),
            control: [64, 68].map(port),
            timer: port(76),
            general: [80, 84].map(port),
            general_len: [92, 93].map(byte),
        };
        let (command, value) = (port(48), byte(52));
        self.turn_on = (command != 0 && value != 0).then_some((command, value));
    }

    /// # Safety
    /// As [`find_and_hide`](Self::find_and_hide).
    unsafe fn processors(&mut self, table: u64, own: u32) {
        let (mut at, end) = (table + 44, table + u64::from(length(table)));
        for _ in 0..ITEMS_MAX {
            if at + 2 > end {
                break;
            }
            let [kind, len, ..] = read32(at).to_le_bytes();
            match kind {
                // A local APIC: identifier, flags.
                0 => {
                    let id = u32::from(read32(at).to_le_bytes()[3]);
                    let flags = read32(at + 4);
                    if id != own && flags & 1 != 0 {
                        if let Some(slot) = self.others.iter_mut().find(|slot| slot.is_none()) {
                            *slot = Some((id, at));
                        }
                        // SAFETY: as for the HPET's table.
                        unsafe { memory::write32(at + 4, flags & !3) };
                    }
                }
                1 => self.io_apic = self.io_apic.or(Some(u64::from(read32(at + 4)))),
                _ => {}
            }
            at += u64::from(len.max(2));
        }
        self.processors_table = Some(table);
        // SAFETY: as above.
        unsafe { check(table) };
    }

    /// Divides the processors: this one, `own`, and as many others as make `cpus` are the guest's,
    /// which finds them in its table again; the next one watches. Returns the guest's.
    ///
    /// # Errors
    /// There are fewer: how many there are.
    ///
    /// # Safety
    /// As [`find_and_hide`](Self::find_and_hide).
    pub unsafe fn divide(&mut self, own: u32, cpus: usize) -> Result<Processors, usize> {
        let others = self.others.iter().flatten();
        let found = 1 + others.clone().count();
        // A guest with several has a core that watches them.
        if cpus > 1 && cpus >= found {
            return Err(found);
        }
        for (_, at) in others.clone().take(cpus - 1) {
            // SAFETY: the caller's: the entry is memory, and nothing reads it yet.
            unsafe { memory::write32(at + 4, read32(at + 4) | 1) };
        }
        if let Some(table) = self.processors_table {
            // SAFETY: the caller's.
            unsafe { check(table) };
        }
        let ids = others.map(|(id, _)| *id);
        self.watcher = ids.clone().nth(cpus - 1);
        Ok(Processors::new([own].into_iter().chain(ids.take(cpus - 1))))
    }
}

/// Gives a table another name, which nothing looks for.
///
/// # Safety
/// As [`Tables::find_and_hide`].
unsafe fn hide(table: u64) {
    // SAFETY: the caller's: the table is memory, and nothing reads it yet.
    unsafe {
        memory::write32(table, u32::from_le_bytes(*b"----"));
        check(table);
    }
}

/// Makes a table's bytes sum up to 0 again.
///
/// # Safety
/// As [`Tables::find_and_hide`].
unsafe fn check(table: u64) {
    const SUM: u64 = 9;
    // SAFETY: the caller's.
    let bytes = unsafe { memory::bytes(table, u64::from(length(table))) };
    let sum = bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    let slot = (table + SUM) as *mut u8;
    // SAFETY: the caller's; the slice above is not used any more.
    unsafe { slot.write(slot.read().wrapping_sub(sum)) };
}
