//! Configuration spaces of two devices.

use assign::areas::Areas;
use assign::config::{Device, GuestConfig};

/// MSI-X vectors.
pub const VECTORS: u16 = 4;
/// Offsets in BAR 0, which has 16 KiB: of the MSI-X table, and of its pending bits. Registers are
/// all else, right behind the table as well.
pub const TABLE: u64 = 0x2000;
pub const PENDING: u64 = 0x3000;
const BARS: [u64; 6] = [0x4000, 0, 0, 0, 0, 0];
/// Capabilities.
pub const MSIX: u16 = 0x40;
pub const MSI: u16 = 0x60;
pub const EXPRESS: u16 = 0x80;

fn word(image: &mut [u8], at: u16, value: u32) {
    let at = usize::from(at);
    image[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// A drive: MSI-X, four vectors of MSI with masks, a reset of its own.
pub fn drive() -> (GuestConfig, Areas) {
    let mut image = [0; 4096];
    word(&mut image, 0x00, 0x0010_1b36);
    word(&mut image, 0x04, 0x0010_0000);
    word(&mut image, 0x08, 0x0108_0202);
    word(&mut image, 0x10, 0xfebf_0004);
    word(&mut image, 0x34, MSIX.into());
    let last = u32::from(VECTORS) - 1;
    word(&mut image, MSIX, last << 16 | u32::from(MSI) << 8 | 0x11);
    word(&mut image, MSIX + 4, TABLE as u32);
    word(&mut image, MSIX + 8, PENDING as u32);
    // Four vectors, 64 bits, masks.
    let control = 0x0184;
    word(
        &mut image,
        MSI,
        control << 16 | u32::from(EXPRESS) << 8 | 0x05,
    );
    word(&mut image, EXPRESS, 0x0002_0010);
    word(&mut image, EXPRESS + 4, 0x1000_8fe0);
    let device = Device {
        image: &image,
        bar_sizes: BARS,
        can_reset: true,
    };
    let config = GuestConfig::new(&device).expect("a device that can be assigned");
    assert!(config.msix().is_some() && config.msi().is_some());
    let areas = Areas::new(BARS, config.msix(), &Default::default());
    (config, areas)
}
