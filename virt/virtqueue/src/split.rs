//! The split layout (virtio 1.2 §2.7): offsets of its fields, and arithmetic of its indices.

use crate::chain::{DESC_SIZE, Violation};
use crate::config::QueueConfig;

/// VIRTQ_AVAIL_F_NO_INTERRUPT (§2.7.6), in `avail.flags`.
pub const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// VIRTQ_USED_F_NO_NOTIFY (§2.7.8), in `used.flags`.
pub const USED_F_NO_NOTIFY: u16 = 1;

/// Offset of `flags` in both rings.
pub const FLAGS: u32 = 0;
/// Offset of `idx` in both rings.
pub const IDX: u32 = 2;
/// Offset of the first entry in both rings.
pub const RING: u32 = 4;

/// Reason why the configuration of a split queue is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// The size is zero, no power of two, or above the device's maximum.
    Size,
    /// An area is not aligned as the layout requires.
    Alignment,
}

/// Lengths and offsets of a queue's three areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Entries: a power of two.
    size: u16,
}

impl Layout {
    /// Checks the configuration of a queue of at most `max` entries, and returns its layout.
    ///
    /// # Errors
    /// The size or an alignment is invalid.
    pub fn new(config: &QueueConfig, max: u16) -> Result<Self, Unfit> {
        let QueueConfig {
            index: _,
            size,
            desc,
            avail,
            used,
        } = *config;
        if !size.is_power_of_two() || size > max {
            return Err(Unfit::Size);
        }
        if !desc.is_aligned(16) || !avail.is_aligned(2) || !used.is_aligned(4) {
            return Err(Unfit::Alignment);
        }
        Ok(Self { size })
    }

    // At most 32,768 entries: 512 KiB, 64 KiB and 256 KiB; none overflows.

    /// Bytes of the descriptor table.
    #[must_use]
    pub fn desc_len(self) -> u32 {
        u32::from(self.size) * DESC_SIZE
    }

    /// Bytes of the available ring: flags, idx, ring, `used_event`.
    #[must_use]
    pub fn avail_len(self) -> u32 {
        6 + 2 * u32::from(self.size)
    }

    /// Bytes of the used ring: flags, idx, ring of {id, len}, `avail_event`.
    #[must_use]
    pub fn used_len(self) -> u32 {
        6 + 8 * u32::from(self.size)
    }
}

/// Returns the number of chains from `next_avail` up to `idx`, the driver's index as it was read.
/// `outstanding` chains take up entries, too.
///
/// # Errors
/// The number exceeds the free entries of the ring.
#[inline(always)]
pub fn available(idx: u16, next_avail: u16, size: u16, outstanding: u16) -> Result<u16, Violation> {
    let count = idx.wrapping_sub(next_avail);
    if count > size.saturating_sub(outstanding) {
        return Err(Violation::AvailTooFar { idx, next_avail });
    }
    Ok(count)
}

/// Returns whether a driver whose `used_event` is `event` wants an interrupt when the used index
/// advances from `old` to `new` (§2.7.10, `vring_need_event`): whether the index passes the event.
#[inline(always)]
#[must_use]
pub const fn steps_over(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
