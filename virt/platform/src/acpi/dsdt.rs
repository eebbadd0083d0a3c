//! The DSDT's definition block.
//!
//! * `\_SB.PCI0`: PCI Express host bridge. `_CRS`: bus 0, ports CF8 to CFF (its own), all other ports, the
//!   memory window. No `_PRT`: no function has an interrupt pin. No `_OSC`: the system asks for nothing more.
//! * `\_SB.MBRD`: ECAM as a motherboard resource, without which Linux distrusts MCFG.
//! * `\_SB.COM1`: 16550 at 3F8, I/O APIC pin 4, edge, active high.
//! * `\_S5`: soft off by the sleep control register.

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Interrupt, Memory32Fixed, Name,
    Package, ResourceTemplate, Scope, ZERO,
};

use crate::layout;

fn pci_host_bridge() -> Vec<u8> {
    let window_last = (layout::PCI_WINDOW_END - 1) as u32;
    let mut out = Vec::new();
    Device::new(
        "PCI0".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0A08")),
            &Name::new("_CID".into(), &EISAName::new("PNP0A03")),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_SEG".into(), &ZERO),
            &Name::new("_BBN".into(), &ZERO),
            // Devices do not snoop less than CPUs do.
            &Name::new("_CCA".into(), &1u8),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![
                    &AddressSpace::new_bus_number(0u16, 0u16),
                    &IO::new(layout::PCI_CONFIG_ADDRESS, layout::PCI_CONFIG_ADDRESS, 1, 8),
                    &AddressSpace::new_io(0u16, layout::PCI_CONFIG_ADDRESS - 1, None),
                    &AddressSpace::new_io(layout::PCI_CONFIG_DATA + 4, 0xffffu16, None),
                    &AddressSpace::new_memory(
                        AddressSpaceCacheable::NotCacheable,
                        true,
                        layout::PCI_WINDOW as u32,
                        window_last,
                        None,
                    ),
                ]),
            ),
        ],
    )
    .to_aml_bytes(&mut out);
    out
}

/// AML made elsewhere.
struct Raw(Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}

/// The definition block, without the table header.
pub fn aml() -> Vec<u8> {
    let ecam = Memory32Fixed::new(true, layout::ECAM as u32, layout::ECAM_SIZE as u32);
    let mut out = Vec::new();
    Scope::new(
        "_SB_".into(),
        vec![
            &Raw(pci_host_bridge()),
            &Device::new(
                "MBRD".into(),
                vec![
                    &Name::new("_HID".into(), &EISAName::new("PNP0C02")),
                    &Name::new("_UID".into(), &ZERO),
                    &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ecam])),
                ],
            ),
            &Device::new(
                "COM1".into(),
                vec![
                    &Name::new("_HID".into(), &EISAName::new("PNP0501")),
                    &Name::new("_UID".into(), &ZERO),
                    &Name::new(
                        "_CRS".into(),
                        &ResourceTemplate::new(vec![
                            &IO::new(layout::COM1, layout::COM1, 0, layout::COM1_PORTS as u8),
                            &Interrupt::new(true, true, false, false, u32::from(layout::COM1_PIN)),
                        ]),
                    ),
                ],
            ),
        ],
    )
    .to_aml_bytes(&mut out);
    let sleep_type = layout::S5_SLEEP_TYPE;
    Name::new(
        "_S5_".into(),
        &Package::new(vec![&sleep_type, &ZERO, &ZERO, &ZERO]),
    )
    .to_aml_bytes(&mut out);
    out
}
