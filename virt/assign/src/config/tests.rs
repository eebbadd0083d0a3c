mod capabilities;
mod golden;
mod images;
mod random;
mod writes;

use super::*;
use images::{EDU_BARS, Image, NVME_BARS, VIRTIO_NET_BARS, edu, nvme, virtio_net};

fn guest(image: &Image, bar_sizes: [u64; BARS], can_reset: bool) -> GuestConfig {
    let image = &image.0;
    let device = Device {
        image,
        bar_sizes,
        can_reset,
    };
    GuestConfig::new(&device).expect("assignable")
}

fn refusal(image: &Image, bar_sizes: [u64; BARS]) -> Refusal {
    let image = &image.0;
    let device = Device {
        image,
        bar_sizes,
        can_reset: true,
    };
    GuestConfig::new(&device).err().expect("refused")
}

fn edu_guest(image: &Image) -> GuestConfig {
    guest(image, EDU_BARS, false)
}

/// A read where nothing is pending.
fn read(guest: &GuestConfig, reg: u16) -> u32 {
    guest.read(reg, 4, |_| 0)
}

fn all(guest: &GuestConfig) -> Vec<u32> {
    (0..4096).step_by(4).map(|reg| read(guest, reg)).collect()
}

/// The bits of each word that a guest can change, found by writing.
fn writable(guest: &GuestConfig) -> Vec<(u16, u32)> {
    let mut bits = Vec::new();
    for reg in (0..4096).step_by(4) {
        let mut low = guest.clone();
        low.write(reg, 4, 0);
        let mut high = guest.clone();
        high.write(reg, 4, u32::MAX);
        let changed = read(&low, reg) ^ read(&high, reg);
        if changed != 0 {
            bits.push((reg, changed));
        }
    }
    bits
}

/// Id and offset of each capability in the guest's list, by a walk as a driver does it.
fn listed(guest: &GuestConfig, space: Space) -> Vec<(u16, u16)> {
    let mut found = Vec::new();
    let mut at = match space {
        Space::Standard if read(guest, 0x04) & 0x10_0000 == 0 => 0,
        Space::Standard => guest.read(0x34, 1, |_| 0) as u16,
        Space::Extended if read(guest, 0x100) == 0 => 0,
        Space::Extended => 0x100,
    };
    while at != 0 {
        let header = read(guest, at);
        let (id, next) = match space {
            Space::Standard => (header & 0xff, header >> 8 & 0xff),
            Space::Extended => (header & 0xffff, header >> 20),
        };
        assert_eq!(at % 4, 0);
        assert!(
            at >= if space == Space::Standard {
                0x40
            } else {
                0x100
            }
        );
        assert!(!found.contains(&(id as u16, at)), "the list loops");
        found.push((id as u16, at));
        at = next as u16;
    }
    found
}
