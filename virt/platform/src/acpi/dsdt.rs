//! The DSDT's definition block.
//!
//! * `\_SB.PCI0`: PCI Express host bridge. `_CRS`: bus 0, ports CF8 to CFF (its own), all other
//!   ports, the memory window, and the window beyond 4 GiB where a function needs one. `_PRT`: the
//!   legacy pins that functions have, each wired to an I/O APIC input; absent where none has. No
//!   `_OSC`: the system asks for nothing more.
//! * `\_SB.PCI0.SLnn`: a slot whose function may be ejected. `_ADR`, `_SUN`: its number; `_EJ0`
//!   writes it to the ejection register. Linux registers a slot for each device with `_ADR` and
//!   `_EJ0` (`acpiphp`, which is built in where `CONFIG_HOTPLUG_PCI_ACPI` is set, and needs no
//!   `_OSC` on a root bus): `echo 0 > /sys/bus/pci/slots/N/power` detaches the driver and evaluates
//!   `_EJ0`. Without a `_STA`, Linux reads the function's vendor, which is all ones once the
//!   function is gone. Only removal is offered: the guest is not notified of an added function.
//! * `\_SB.MBRD`: ECAM as a motherboard resource, without which Linux distrusts MCFG.
//! * `\_SB.COM1`: 16550 at 3F8, I/O APIC pin 4, edge, active high.
//! * `\_SB.PWRB`: the power button, and `\_SB.GED`, the event device that reports it: a
//!   hardware-reduced platform has no fixed button and no general-purpose events (ACPI §5.6.9). I/O
//!   APIC pin 9, edge, active high; `_EVT` notifies the button that it was pressed.
//! * `\_SB.PEVT`: QEMU's pvpanic, by which Linux reports a panic (`pvpanic-mmio` binds to
//!   QEMU0001).
//! * `\_S5`: soft off by the sleep control register.

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, Field, FieldAccessType, FieldEntry,
    FieldLockRule, FieldUpdateRule, IO, Interrupt, Memory32Fixed, Method, Name, Notify, ONE,
    OpRegion, OpRegionSpace, Package, Path, ResourceTemplate, Scope, Store, ZERO,
};

use super::{PciResources, PinRoute};
use crate::layout;

/// Notification value for a power button that has been pressed (ACPI §5.6.6).
const PRESSED: u8 = 0x80;

fn pci_host_bridge(pci: &PciResources) -> Vec<u8> {
    let window_last = (layout::PCI_WINDOW_END - 1) as u32;
    let mut out = Vec::new();
    let bus = AddressSpace::new_bus_number(0u16, 0u16);
    let config = IO::new(layout::PCI_CONFIG_ADDRESS, layout::PCI_CONFIG_ADDRESS, 1, 8);
    let below = AddressSpace::new_io(0u16, layout::PCI_CONFIG_ADDRESS - 1, None);
    let above = AddressSpace::new_io(layout::PCI_CONFIG_DATA + 4, 0xffffu16, None);
    let low = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        layout::PCI_WINDOW as u32,
        window_last,
        None,
    );
    let high = (!pci.high.is_empty()).then(|| {
        let cacheable = AddressSpaceCacheable::NotCacheable;
        AddressSpace::new_memory(cacheable, true, pci.high.start, pci.high.end - 1, None)
    });
    let mut resources: Vec<&dyn Aml> = vec![&bus, &config, &below, &above, &low];
    resources.extend(high.as_ref().map(|high| high as &dyn Aml));
    let resources = ResourceTemplate::new(resources);
    let routes = (!pci.pins.is_empty()).then(|| Raw(routing_table(&pci.pins)));
    let (hid, cid) = (EISAName::new("PNP0A08"), EISAName::new("PNP0A03"));
    // Devices snoop the caches as CPUs do.
    let coherent = 1u8;
    let names: [(&str, &dyn Aml); 7] = [
        ("_HID", &hid),
        ("_CID", &cid),
        ("_UID", &ZERO),
        ("_SEG", &ZERO),
        ("_BBN", &ZERO),
        ("_CCA", &coherent),
        ("_CRS", &resources),
    ];
    let mut names: Vec<Name> = names
        .into_iter()
        .map(|(name, value)| Name::new(name.into(), value))
        .collect();
    names.extend(
        routes
            .as_ref()
            .map(|routes| Name::new("_PRT".into(), routes)),
    );
    let slots = Raw(ejectable_slots(&pci.ejectable));
    let mut children: Vec<&dyn Aml> = names.iter().map(|name| name as &dyn Aml).collect();
    children.push(&slots);
    Device::new("PCI0".into(), children).to_aml_bytes(&mut out);
    out
}

/// Returns `_PRT` (ACPI §6.2.13): for each pin the function's address, the pin counted from 0, no
/// link device, the global interrupt.
fn routing_table(pins: &[PinRoute]) -> Vec<u8> {
    let entries: Vec<Raw> = pins
        .iter()
        .map(|route| {
            let address = u32::from(route.slot) << 16 | 0xffff;
            let (pin, input) = (route.pin - 1, u32::from(route.input));
            let mut entry = Vec::new();
            Package::new(vec![&address, &pin, &ZERO, &input]).to_aml_bytes(&mut entry);
            Raw(entry)
        })
        .collect();
    let mut out = Vec::new();
    let entries = entries.iter().map(|entry| entry as &dyn Aml).collect();
    Package::new(entries).to_aml_bytes(&mut out);
    out
}

/// Returns the ejection register (an operation region of one byte) and the slots that use it; empty
/// where there are none.
fn ejectable_slots(slots: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    if slots.is_empty() {
        return out;
    }
    OpRegion::new("EJRG".into(), OpRegionSpace::SystemIO, &layout::EJECT, &ONE)
        .to_aml_bytes(&mut out);
    Field::new(
        "EJRG".into(),
        FieldAccessType::Byte,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        vec![FieldEntry::Named(*b"EJSL", 8)],
    )
    .to_aml_bytes(&mut out);
    for slot in slots {
        let address = u32::from(*slot) << 16;
        Device::new(
            format!("SL{slot:02}").as_str().into(),
            vec![
                &Name::new("_ADR".into(), &address),
                &Name::new("_SUN".into(), slot),
                // Its argument is 1: eject.
                &Method::new(
                    "_EJ0".into(),
                    1,
                    true,
                    vec![&Store::new(&Path::new("EJSL"), slot)],
                ),
            ],
        )
        .to_aml_bytes(&mut out);
    }
    out
}

/// Returns the power button, and the generic event device whose one interrupt is the press.
fn power_button() -> Vec<u8> {
    let mut out = Vec::new();
    Device::new(
        "PWRB".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0C0C")),
            &Name::new("_UID".into(), &ZERO),
        ],
    )
    .to_aml_bytes(&mut out);
    let pin = u32::from(layout::POWER_BUTTON_PIN);
    Device::new(
        "GED_".into(),
        vec![
            &Name::new("_HID".into(), &"ACPI0013"),
            &Name::new("_UID".into(), &ZERO),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![&Interrupt::new(true, true, false, false, pin)]),
            ),
            // Its argument is the interrupt, of which there is one.
            &Method::new(
                "_EVT".into(),
                1,
                true,
                vec![&Notify::new(&Path::new("PWRB"), &PRESSED)],
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

/// Returns the definition block, without the table header.
pub fn aml(pci: &PciResources) -> Vec<u8> {
    let ecam = Memory32Fixed::new(true, layout::ECAM as u32, layout::ECAM_SIZE as u32);
    let mut out = Vec::new();
    Scope::new(
        "_SB_".into(),
        vec![
            &Raw(pci_host_bridge(pci)),
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
            &Raw(power_button()),
            &Device::new(
                "PEVT".into(),
                vec![
                    &Name::new("_HID".into(), &"QEMU0001"),
                    &Name::new("_UID".into(), &ZERO),
                    &Name::new(
                        "_CRS".into(),
                        &ResourceTemplate::new(vec![&IO::new(
                            layout::PANIC_NOTICE,
                            layout::PANIC_NOTICE,
                            1,
                            1,
                        )]),
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
