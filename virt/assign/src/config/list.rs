//! Capability lists of a device, which may hold any bytes: a bounded walk, and its findings.

use super::seen::Space;

/// The conventional space.
pub const STANDARD_END: usize = 0x100;
const HEADER_END: usize = 0x40;
const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u8 = 1 << 4;
const POINTER: usize = 0x34;

/// A capability in a device's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Capability id.
    pub id: u16,
    /// Offset, a multiple of 4.
    pub at: usize,
    /// End of the bytes that it may have: where the next header behind it lies, or the end of the
    /// space.
    pub end: usize,
}

/// Reason why a list ended before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// A link points at a capability that was there already.
    #[error("loops back to {0:#x}")]
    Loop(usize),
    /// A link points into the header, or out of the space.
    #[error("points to {0:#x}, where no capability can be")]
    Outside(usize),
}

/// Walks the list in `space` of `image`. Each offset is visited once, so that no list is longer
/// than the space.
pub fn walk(image: &[u8], space: Space) -> (Vec<Listed>, Option<Broken>) {
    let (first, begin, end) = match space {
        Space::Standard if image[STATUS] & STATUS_CAPABILITIES == 0 => {
            (0, HEADER_END, STANDARD_END)
        }
        Space::Standard => (usize::from(image[POINTER]), HEADER_END, STANDARD_END),
        Space::Extended => (STANDARD_END, STANDARD_END, image.len()),
    };
    let mut found: Vec<Listed> = Vec::new();
    let mut next = first & !3;
    let mut broken = None;
    // A device without an extended space ends where it would begin.
    while next != 0 && !(space == Space::Extended && end == begin) {
        if next < begin || next + 4 > end {
            broken = Some(Broken::Outside(next));
            break;
        }
        if found.iter().any(|listed| listed.at == next) {
            broken = Some(Broken::Loop(next));
            break;
        }
        let at = next;
        let header = word(image, at);
        let id;
        (id, next) = match space {
            Space::Standard => (header & 0xff, usize::from(image[at + 1] & !3)),
            Space::Extended => (header & 0xffff, (header >> 20) as usize & !3),
        };
        // No capability at all, and a device that does not answer.
        if space == Space::Extended && (header == 0 || header == u32::MAX) {
            break;
        }
        let id = id as u16;
        found.push(Listed { id, at, end });
    }
    let starts: Vec<usize> = found.iter().map(|listed| listed.at).collect();
    for listed in &mut found {
        let behind = starts.iter().filter(|at| **at > listed.at);
        listed.end = behind.copied().min().unwrap_or(end);
    }
    (found, broken)
}

/// The 16 bits at `at`, which must be in the image.
pub fn half(image: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([image[at], image[at + 1]])
}

/// The 32 bits at `at`, which must be in the image.
pub fn word(image: &[u8], at: usize) -> u32 {
    u32::from(half(image, at + 2)) << 16 | u32::from(half(image, at))
}
