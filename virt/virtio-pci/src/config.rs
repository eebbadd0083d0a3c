//! Configuration space of a virtio function: identification, and the capabilities that locate each
//! structure in the BAR (Virtio 1.2, §4.1.2 and §4.1.4).

use pci::bars::{BARS, BarKind};
use pci::config::{ConfigSpace, Identity};

/// Size of the BAR in bytes.
pub const BAR_SIZE: u64 = 0x8000;
/// Offset of the common configuration.
pub const COMMON: u64 = 0x0000;
/// Offset of the ISR status byte.
pub const ISR: u64 = 0x1000;
/// Offset of the device's own configuration.
pub const DEVICE: u64 = 0x2000;
/// Offset of the doorbells.
pub const NOTIFY: u64 = 0x3000;
/// Bytes between the doorbells of two queues.
pub const NOTIFY_STRIDE: u64 = 4;
/// Offset of the MSI-X table.
pub const MSIX_TABLE: u64 = 0x4000;
/// Offset of the MSI-X pending bits.
pub const MSIX_PENDING: u64 = 0x5000;

/// PCI vendor of virtio.
const VENDOR: u16 = 0x1af4;
/// PCI device-id of device type 0 (§4.1.2): modern devices add their type.
const DEVICE_BASE: u16 = 0x1040;
/// Vendor-specific capability id.
const CAPABILITY_VENDOR: u8 = 0x09;

/// `cfg_type` values (§4.1.4).
const COMMON_CFG: u8 = 1;
const NOTIFY_CFG: u8 = 2;
const ISR_CFG: u8 = 3;
const DEVICE_CFG: u8 = 4;
const PCI_CFG: u8 = 5;

/// Offsets in the PCI configuration access capability (§4.1.4.9), from its start.
const ACCESS_BAR: u16 = 4;
const ACCESS_OFFSET: u16 = 8;
const ACCESS_LENGTH: u16 = 12;
/// Offset of its data window.
pub const ACCESS_DATA: u16 = 16;

/// The one BAR that is implemented.
pub fn bar_kinds() -> [BarKind; BARS] {
    let mut kinds = [BarKind::Absent; BARS];
    kinds[0] = BarKind::Memory32(BAR_SIZE as u32);
    kinds
}

/// The configuration space, and where in it the configuration access capability lies.
pub fn space(device_type: u16, vectors: u16) -> (ConfigSpace, u16) {
    let identity = Identity {
        vendor: VENDOR,
        device: DEVICE_BASE + device_type,
        // 1: network controller, Ethernet; 2: mass storage, other; the rest: unclassified.
        class: match device_type {
            1 => 0x02_00_00,
            2 => 0x01_80_00,
            _ => 0xff_00_00,
        },
        revision: 1,
        subsystem_vendor: VENDOR,
        subsystem: DEVICE_BASE + device_type,
    };
    let mut config = ConfigSpace::new(&identity, bar_kinds());
    config.add_express_endpoint();
    config.add_msix(vectors, (0, MSIX_TABLE as u32), (0, MSIX_PENDING as u32));
    for (kind, offset, len) in [
        (COMMON_CFG, COMMON, 0x1000),
        (ISR_CFG, ISR, 0x1000),
        (DEVICE_CFG, DEVICE, 0x1000),
    ] {
        config.add_capability(CAPABILITY_VENDOR, &body(kind, offset, len));
    }
    let mut notify = body(NOTIFY_CFG, NOTIFY, 0x1000).to_vec();
    notify.extend((NOTIFY_STRIDE as u32).to_le_bytes());
    notify[0] += 4;
    config.add_capability(CAPABILITY_VENDOR, &notify);
    let mut access = body(PCI_CFG, 0, 0).to_vec();
    access.extend([0; 4]);
    access[0] += 4;
    let access = config.add_capability(CAPABILITY_VENDOR, &access);
    config.make_writable(access + ACCESS_BAR, &[0xff]);
    config.make_writable(access + ACCESS_OFFSET, &[0xff; 8]);
    (config, access)
}

/// `struct virtio_pci_cap` behind its id and link: length, type, BAR 0, id, padding, offset,
/// length.
fn body(kind: u8, offset: u64, len: u32) -> [u8; 14] {
    let mut body = [0; 14];
    body[0] = 16;
    body[1] = kind;
    body[6..10].copy_from_slice(&(offset as u32).to_le_bytes());
    body[10..14].copy_from_slice(&len.to_le_bytes());
    body
}

/// Returns the offset in BAR 0 and the length (1, 2 or 4 bytes, aligned) that the configuration
/// access window points at. `None` for any other target: such an access does nothing (§4.1.4.9.1
/// forbids it to the driver).
pub fn access_target(config: &ConfigSpace, access: u16) -> Option<(u64, usize)> {
    let word =
        |at: u16| u32::from_le_bytes(config.bytes(access + at, 4).try_into().expect("four bytes"));
    let (bar, offset, len) = (
        config.bytes(access + ACCESS_BAR, 1)[0],
        word(ACCESS_OFFSET),
        word(ACCESS_LENGTH),
    );
    let fits = u64::from(offset) + u64::from(len) <= BAR_SIZE;
    (bar == 0 && matches!(len, 1 | 2 | 4) && offset.is_multiple_of(len) && fits)
        .then_some((u64::from(offset), len as usize))
}

#[cfg(test)]
mod tests;
