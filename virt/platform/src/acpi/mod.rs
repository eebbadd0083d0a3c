//! ACPI tables of the machine (ACPI specification 6.5): a hardware-reduced platform.
//!
//! | table | content |
//! |---|---|
//! | RSDP, XSDT | the root, at [`layout::ACPI_RSDP`] |
//! | FADT | hardware-reduced: sleep control and status, reset register; no PIT, 8259, RTC, keyboard |
//! | MADT | a local APIC per vCPU, the I/O APIC (id 0, pins 0 to 23) |
//! | MCFG | ECAM of segment 0, bus 0 |
//! | others | complete tables from the owners of the hardware they describe: DMAR of an IOMMU |
//! | DSDT | PCI host bridge, COM1, power button, notice of a panic, `_S5`: see the module `dsdt` |
//!
//! [`build`] lays everything out behind the RSDP and returns one image, which the caller copies
//! into RAM. Left out: FACS, GPEs, sleep buttons, processors as namespace devices.

mod dsdt;
pub mod viot;

use std::ops::Range;

use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, sdt::Sdt};

use crate::layout;

const OEM: [u8; 6] = *b"EXITLS";
const OEM_TABLE: [u8; 8] = *b"EXITLESS";
const OEM_REVISION: u32 = 1;
/// Alignment of the tables, bytes.
const ALIGN: usize = 64;

/// FADT `IAPC_BOOT_ARCH`: VGA not present (2), no CMOS RTC (5).
const BOOT_ARCH: u16 = 1 << 2 | 1 << 5;

/// A legacy interrupt pin and the I/O APIC input that it is wired to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinRoute {
    /// The function's slot.
    pub slot: u8,
    /// 1 (INTA) to 4 (INTD).
    pub pin: u8,
    /// 0 to 23.
    pub input: u8,
}

/// Resources of the PCI bus that differ between machines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciResources {
    /// The memory window beyond 4 GiB; empty: none.
    pub high: Range<u64>,
    /// Legacy pins.
    pub pins: Vec<PinRoute>,
    /// Slots whose functions the guest may eject, by the register at [`layout::EJECT`].
    pub ejectable: Vec<u8>,
}

/// Parameters of the tables.
#[derive(Clone, Debug, Default)]
pub struct AcpiConfig {
    /// vCPUs, whose APIC ids are 0, 1, …
    pub cpus: u8,
    /// Further tables for the XSDT, which lists them last and in this order. Each is complete:
    /// header with signature, length and checksum, then the body.
    pub tables: Vec<Vec<u8>>,
    /// Resources of the PCI bus.
    pub pci: PciResources,
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut out = Vec::new();
    table.to_aml_bytes(&mut out);
    out
}

fn port(address: u16) -> GAS {
    GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        u64::from(address),
    )
}

fn dsdt(pci: &PciResources) -> Vec<u8> {
    let mut table = Sdt::new(*b"DSDT", 36, 2, OEM, OEM_TABLE, OEM_REVISION);
    table.append_slice(&dsdt::aml(pci));
    bytes(&table)
}

fn fadt(dsdt: u64) -> Vec<u8> {
    let mut table = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        // No fixed buttons: the one for power is a device of the DSDT, and there is none for sleep.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::Headless)
        .preferred_pm_profile(PmProfile::Unspecified);
    table.iapc_boot_arch = BOOT_ARCH.into();
    table.reset_reg = port(layout::RESET);
    table.reset_value = layout::RESET_VALUE;
    table.sleep_control_reg = port(layout::SLEEP_CONTROL);
    table.sleep_status_reg = port(layout::SLEEP_STATUS);
    bytes(&table.finalize())
}

fn madt(cpus: u8) -> Vec<u8> {
    let apics = LocalInterruptController::Address(layout::LOCAL_APIC as u32);
    let mut table = MADT::new(OEM, OEM_TABLE, OEM_REVISION, apics);
    for cpu in 0..cpus {
        table.add_structure(ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled));
    }
    table.add_structure(IoApic::new(0, layout::IOAPIC as u32, 0));
    bytes(&table)
}

fn mcfg() -> Vec<u8> {
    let mut table = MCFG::new(OEM, OEM_TABLE, OEM_REVISION);
    table.add_ecam(layout::ECAM, 0, 0, 0);
    bytes(&table)
}

/// The tables do not fit below 1 MiB: only giant [`AcpiConfig::tables`] could cause it.
#[derive(Debug, thiserror::Error)]
#[error("ACPI tables of {bytes} bytes do not fit their area of {room} bytes")]
pub struct TooLarge {
    bytes: usize,
    room: usize,
}

/// Length of the header that all tables listed in the XSDT begin with (§5.2.6).
const HEADER_LEN: usize = 36;

/// Returns whether the header's length is that of the table, and all bytes add up to 0.
fn is_complete(table: &[u8]) -> bool {
    let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    let len = u32::try_from(table.len()).unwrap_or(0).to_le_bytes();
    table.len() >= HEADER_LEN && table[4..8] == len && sum == 0
}

/// Returns all tables as one image for [`layout::ACPI_RSDP`].
///
/// # Errors
/// They do not fit.
///
/// # Panics
/// If one of [`AcpiConfig::tables`] is not complete: they come from the VMM, not a guest.
pub fn build(config: &AcpiConfig) -> Result<Vec<u8>, TooLarge> {
    let mut image = vec![0; Rsdp::len().next_multiple_of(ALIGN)];
    let mut place = |table: Vec<u8>| {
        let at = layout::ACPI_RSDP + image.len() as u64;
        image.extend_from_slice(&table);
        image.resize(image.len().next_multiple_of(ALIGN), 0);
        at
    };
    let dsdt = place(dsdt(&config.pci));
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    for table in [fadt(dsdt), madt(config.cpus), mcfg()]
        .into_iter()
        .chain(config.tables.iter().cloned())
    {
        assert!(is_complete(&table), "not an ACPI table: {table:x?}");
        xsdt.add_entry(place(table));
    }
    let xsdt = place(bytes(&xsdt));
    let rsdp = bytes(&Rsdp::new(OEM, xsdt));
    image[..rsdp.len()].copy_from_slice(&rsdp);
    let room = (layout::ACPI_END - layout::ACPI_RSDP) as usize;
    if image.len() > room {
        return Err(TooLarge {
            bytes: image.len(),
            room,
        });
    }
    Ok(image)
}

#[cfg(test)]
mod tests;
