//! The guest-physical address map and the I/O ports of the machine: numbers only.
//!
//! ```text
//! 0000_0000 ── RAM (first MiB: boot structures, hole at A0000, ACPI tables at E0000) ── up to C000_0000
//! C000_0000 ── PCI memory window (BARs) ── E000_0000 ECAM of bus 0 (1 MiB)
//! FEC0_0000 IOAPIC ── FED9_0000 VT-d registers (two pages) ── FEE0_0000 local APICs ── FFFB_C000 KVM's own pages
//! 1_0000_0000 ── the rest of RAM
//! ```
//! All `_END` are exclusive; all sizes are bytes.

use std::ops::Range;

use guest_mem::SourceId;

/// End of RAM below 4 GiB; RAM beyond this size continues at [`HIGH_RAM`].
pub const LOW_RAM_END: u64 = 0xc000_0000;
/// Address at which RAM continues above the device hole.
pub const HIGH_RAM: u64 = 0x1_0000_0000;

/// PCI memory window: every BAR lies here.
pub const PCI_WINDOW: u64 = 0xc000_0000;
/// End of the PCI memory window.
pub const PCI_WINDOW_END: u64 = 0xe000_0000;
/// PCI memory window beyond 4 GiB, for machines with BARs that need it: the top eighth of the range
/// that 39 address bits reach. Not available on a host whose processor has fewer (CPUID
/// 8000_0008h).
pub const PCI_WINDOW_HIGH: Range<u64> = 0x70_0000_0000..0x80_0000_0000;
/// Enhanced configuration access (PCI Express base specification §7.2.2) of bus 0.
pub const ECAM: u64 = 0xe000_0000;
/// One bus: 32 devices of 8 functions of 4 KiB.
pub const ECAM_SIZE: u64 = 0x10_0000;
/// The requester of the I/O APIC's messages: it is on no PCI bus, so it has a bus number that no
/// function has.
pub const IOAPIC_SOURCE: SourceId = SourceId::new(0xff, 0, 0);
/// The I/O APIC's page.
pub const IOAPIC: u64 = 0xfec0_0000;
/// Bytes the I/O APIC decodes.
pub const IOAPIC_SIZE: u64 = 0x1000;
/// The VT-d unit's register page.
pub const VTD: u64 = 0xfed9_0000;
/// Bytes of a VT-d register page.
pub const VTD_SIZE: u64 = 0x1000;
/// The register page of a second unit, which assigned functions are under, directly behind the
/// first.
pub const VTD_ASSIGNED: u64 = VTD + VTD_SIZE;
/// Local APICs, inside KVM; also the address range of MSIs.
pub const LOCAL_APIC: u64 = 0xfee0_0000;
/// One page KVM needs on Intel hosts for real mode (`KVM_SET_IDENTITY_MAP_ADDR`).
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages KVM needs on Intel hosts for real mode (`KVM_SET_TSS_ADDR`).
pub const KVM_TSS: u64 = 0xfffb_d000;

/// Boot GDT.
pub const BOOT_GDT: u64 = 0x500;
/// PVH start info, memory map and module list (one page).
pub const BOOT_PVH: u64 = 0x6000;
/// Linux `boot_params`, the "zero page".
pub const BOOT_PARAMS: u64 = 0x7000;
/// Boot stack top (Linux sets its own at once).
pub const BOOT_STACK: u64 = 0x8ff0;
/// Boot page tables: PML4, PDPT and four page directories, six pages.
pub const BOOT_PAGE_TABLES: u64 = 0x9000;
/// The kernel command line.
pub const BOOT_CMDLINE: u64 = 0x2_0000;
/// Bytes kept for the command line with its terminator (Linux's own limit is 2048).
pub const BOOT_CMDLINE_SIZE: u64 = 0x1000;
/// End of conventional memory as reported to the guest (the traditional EBDA boundary).
pub const CONVENTIONAL_END: u64 = 0x9_fc00;
/// The root of the ACPI tables, in the area where an operating system looks for it.
pub const ACPI_RSDP: u64 = 0xe_0000;
/// End of the area for ACPI tables.
pub const ACPI_END: u64 = 0xf_0000;
/// Address at which a processor starts after a reset in real mode, F000:FFF0.
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// End of the memory below 1 MiB that the guest must not use.
pub const FIRMWARE_END: u64 = 0x10_0000;
/// Address from which kernels are loaded.
pub const KERNEL: u64 = 0x10_0000;

/// COM1's first port.
pub const COM1: u16 = 0x3f8;
/// Ports of a 16550.
pub const COM1_PORTS: u16 = 8;
/// The I/O APIC pin of COM1.
pub const COM1_PIN: u8 = 4;
/// The I/O APIC pin that a press of the power button pulses: where the SCI would be, which a
/// hardware-reduced platform has not.
pub const POWER_BUTTON_PIN: u8 = 9;
/// Keyboard controller's command port: Linux's second way to reset.
pub const I8042_COMMAND: u16 = 0x64;
/// Marker port: a guest delimits measuring windows by writing here (1 begins, 2 ends, others are
/// tags).
pub const MARKER: u16 = 0xe0;
/// Port at which a guest reports that its kernel has panicked (QEMU's pvpanic), one byte.
pub const PANIC_NOTICE: u16 = 0x505;
/// ACPI sleep control register (FADT, hardware-reduced), one byte.
pub const SLEEP_CONTROL: u16 = 0x600;
/// ACPI sleep status register, one byte.
pub const SLEEP_STATUS: u16 = 0x601;
/// ACPI reset register, one byte.
pub const RESET: u16 = 0x602;
/// Port at which the guest ejects a PCI function: it writes the number of the slot, one byte.
pub const EJECT: u16 = 0x610;
/// Value that the guest writes to [`RESET`].
pub const RESET_VALUE: u8 = 0x0f;
/// The `SLP_TYP` of S5 in our DSDT.
pub const S5_SLEEP_TYPE: u8 = 5;
/// PCI configuration mechanism #1, address.
pub const PCI_CONFIG_ADDRESS: u16 = 0xcf8;
/// PCI configuration mechanism #1, data (four ports).
pub const PCI_CONFIG_DATA: u16 = 0xcfc;

/// Returns the RAM regions `(start, bytes)` of a machine with `memory` bytes: one, or two around
/// the device hole.
pub fn ram_regions(memory: u64) -> Vec<(u64, u64)> {
    if memory <= LOW_RAM_END {
        vec![(0, memory)]
    } else {
        vec![(0, LOW_RAM_END), (HIGH_RAM, memory - LOW_RAM_END)]
    }
}

/// Kinds of e820 entries (ACPI specification §15).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum E820Kind {
    /// Usable by the operating system.
    Ram = 1,
    /// Decoded by something else.
    Reserved = 2,
}

/// Returns the memory map that the guest is given: `(start, bytes, kind)`, sorted.
///
/// ECAM is in it as reserved, without which Linux refuses the MCFG table; the VT-d page is not,
/// since Linux claims that one itself.
pub fn e820(memory: u64) -> Vec<(u64, u64, E820Kind)> {
    let mut map = vec![
        (0, CONVENTIONAL_END, E820Kind::Ram),
        (ACPI_RSDP, FIRMWARE_END - ACPI_RSDP, E820Kind::Reserved),
    ];
    for (start, len) in ram_regions(memory) {
        let from = start.max(KERNEL);
        map.push((from, start + len - from, E820Kind::Ram));
    }
    map.push((ECAM, ECAM_SIZE, E820Kind::Reserved));
    map.sort_by_key(|entry| entry.0);
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_beyond_three_gib_continues_above_four() {
        assert_eq!(ram_regions(512 << 20), [(0, 512 << 20)]);
        assert_eq!(ram_regions(3 << 30), [(0, 3 << 30)]);
        assert_eq!(ram_regions(5 << 30), [(0, 3 << 30), (4 << 30, 2 << 30)]);
    }

    #[test]
    fn the_memory_map_is_sorted_disjoint_and_leaves_devices_out() {
        for memory in [64 << 20, 3 << 30, 9 << 30] {
            let map = e820(memory);
            for pair in map.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?} overlap");
            }
            for (start, len, kind) in map {
                if kind == E820Kind::Ram {
                    for device in [
                        PCI_WINDOW,
                        ECAM,
                        IOAPIC,
                        VTD,
                        VTD_ASSIGNED,
                        LOCAL_APIC,
                        KVM_TSS,
                        0xa_0000,
                    ] {
                        assert!(!(start..start + len).contains(&device));
                    }
                }
            }
        }
    }
}
