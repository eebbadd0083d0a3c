//! The ACPI DMAR table (VT-d specification §8.1 to §8.3), in which the guest finds the unit.
//!
//! One remapping unit per [`Drhd`]. The usual table is one unit with [`Drhd::include_all`] set: it
//! covers every function that no other unit names, and stands behind those that name some
//! ([`DmarConfig::with_unit_for`]), as the specification demands (§8.3). `flags` is 0: interrupt
//! remapping is not offered, so `INTR_REMAP` is clear and no I/O APIC scope is needed; [`Scope`] is
//! ready for one.
//!
//! ```
//! use vtd::dmar::{DmarConfig, build};
//! let table = build(&DmarConfig::single_unit(46, 0xfed9_0000));
//! assert_eq!(&table[..4], b"DMAR");
//! assert_eq!(table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
//! ```

use guest_mem::SourceId;

/// Content of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DmarConfig {
    /// Host address width in bits, 12 to 64: the physical addresses that tables may hold.
    pub host_address_width: u8,
    /// Remapping units: in each segment the one with `include_all` last.
    pub units: Vec<Drhd>,
    /// OEM ID, OEM table ID and creator ID of the header.
    pub oem: Oem,
}

/// Identification in an ACPI header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Oem {
    /// OEM ID.
    pub id: [u8; 6],
    /// OEM table ID.
    pub table_id: [u8; 8],
    /// Creator ID.
    pub creator: [u8; 4],
}

impl Default for Oem {
    fn default() -> Self {
        Self {
            id: *b"EXITLS",
            table_id: *b"EXITLESS",
            creator: *b"EXTL",
        }
    }
}

/// DMA Remapping Hardware Unit Definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drhd {
    /// `INCLUDE_PCI_ALL`: every function of the segment that no other unit names.
    pub include_all: bool,
    /// PCI segment.
    pub segment: u16,
    /// Guest-physical address of the register page, 4 KiB aligned; must not be RAM in the e820 map.
    pub base: u64,
    /// Devices under the unit. With `include_all` only I/O APICs and HPETs need to be named.
    pub scopes: Vec<Scope>,
}

/// Type of the device that a device scope names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ScopeType {
    /// A PCI function.
    Endpoint = 1,
    /// A PCI bridge and everything below.
    Bridge = 2,
    /// An I/O APIC; `enumeration_id` is its MADT ID.
    IoApic = 3,
    /// A timer block that sends MSIs; `enumeration_id` is its HPET number.
    Hpet = 4,
}

/// A device scope with a path of one step, which is all a machine with flat buses needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Type of the named device.
    pub kind: ScopeType,
    /// See [`ScopeType`]; 0 for PCI.
    pub enumeration_id: u8,
    /// Bus, device and function: of the device, or the requester ID of an I/O APIC or HPET.
    pub device: SourceId,
}

impl DmarConfig {
    /// Creates a configuration of one unit at `base` that covers every PCI function of segment 0.
    pub fn single_unit(host_address_width: u8, base: u64) -> Self {
        Self {
            host_address_width,
            units: vec![Drhd {
                include_all: true,
                segment: 0,
                base,
                scopes: Vec::new(),
            }],
            oem: Oem::default(),
        }
    }

    /// Adds a unit, at `base`, for these functions of segment 0, in front of the unit that covers
    /// the rest.
    pub fn with_unit_for(mut self, base: u64, functions: &[SourceId]) -> Self {
        let endpoint = |device: &SourceId| Scope {
            kind: ScopeType::Endpoint,
            enumeration_id: 0,
            device: *device,
        };
        let unit = Drhd {
            include_all: false,
            segment: 0,
            base,
            scopes: functions.iter().map(endpoint).collect(),
        };
        let covers_rest = |unit: &Drhd| unit.include_all && unit.segment == 0;
        let rest = self.units.iter().position(covers_rest);
        self.units.insert(rest.unwrap_or(self.units.len()), unit);
        self
    }

    /// The first unit that stands behind the one that covers the rest of its segment.
    fn misplaced(&self) -> Option<&Drhd> {
        let behind = self.units.iter().enumerate().skip(1);
        let mut misplaced = behind.filter(|(index, unit)| {
            let before = &self.units[..*index];
            before
                .iter()
                .any(|other| other.include_all && other.segment == unit.segment)
        });
        misplaced.next().map(|(_, unit)| unit)
    }
}

/// Length of the header with host address width, flags and reserved bytes.
const HEADER_LEN: usize = 48;
const CHECKSUM: usize = 9;
const DRHD_LEN: u16 = 16;
const SCOPE_LEN: u8 = 8;

/// The table's bytes, checksum included.
///
/// # Panics
/// If a host address width is not 12 to 64, a unit has so many scopes (8190) that its length does
/// not fit, or a unit stands behind the one that covers the rest of its segment: the table comes
/// from the VMM, not a guest.
pub fn build(config: &DmarConfig) -> Vec<u8> {
    if let Some(unit) = config.misplaced() {
        panic!(
            "the unit at {:#x} stands behind the one that covers the rest of segment {}",
            unit.base, unit.segment
        );
    }
    assert!(
        (12..=64).contains(&config.host_address_width),
        "host address width is {} bits",
        config.host_address_width
    );
    let mut table = Vec::with_capacity(HEADER_LEN + usize::from(DRHD_LEN) * config.units.len());
    table.extend_from_slice(b"DMAR");
    table.extend_from_slice(&[0; 4]); // length, below
    table.push(1); // revision
    table.push(0); // checksum, below
    table.extend_from_slice(&config.oem.id);
    table.extend_from_slice(&config.oem.table_id);
    table.extend_from_slice(&1u32.to_le_bytes()); // OEM revision
    table.extend_from_slice(&config.oem.creator);
    table.extend_from_slice(&1u32.to_le_bytes()); // creator revision
    table.push(config.host_address_width - 1);
    table.push(0); // flags: no interrupt remapping, no x2APIC opt-out, no DMA-control opt-in
    table.extend_from_slice(&[0; 10]);
    debug_assert_eq!(table.len(), HEADER_LEN);
    for unit in &config.units {
        append_unit(&mut table, unit);
    }
    let len = u32::try_from(table.len()).expect("a table of a few units fits 4 GiB");
    table[4..8].copy_from_slice(&len.to_le_bytes());
    let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    table[CHECKSUM] = sum.wrapping_neg();
    table
}

fn append_unit(table: &mut Vec<u8>, unit: &Drhd) {
    let len = usize::from(DRHD_LEN) + usize::from(SCOPE_LEN) * unit.scopes.len();
    let len = u16::try_from(len).expect("a unit has at most 8189 scopes");
    table.extend_from_slice(&0u16.to_le_bytes()); // type: DRHD
    table.extend_from_slice(&len.to_le_bytes());
    table.push(u8::from(unit.include_all));
    table.push(0); // size: one 4 KiB page
    table.extend_from_slice(&unit.segment.to_le_bytes());
    table.extend_from_slice(&unit.base.to_le_bytes());
    for scope in &unit.scopes {
        let devfn = scope.device.devfn();
        table.extend_from_slice(&[scope.kind as u8, SCOPE_LEN, 0, 0]);
        table.extend_from_slice(&[scope.enumeration_id, scope.device.bus()]);
        table.extend_from_slice(&[devfn >> 3, devfn & 7]);
    }
}

#[cfg(test)]
mod tests;
