//! One ring as the front end described it.

use super::{RequestError, SharedFd};
use crate::wire::{RequestId, VringAddr, feature};

/// Which kind of virtqueue (VIRTIO_F_RING_PACKED).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingLayout {
    /// Virtio 1.2 §2.7.
    Split,
    /// Virtio 1.2 §2.8.
    Packed,
}

/// Position of a ring, at which it starts or has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingBase {
    /// Split: the next entry of the available ring, modulo 2^16.
    Split(u16),
    /// Packed: positions in the descriptor ring with their wrap counters.
    ///
    /// On the wire each is 15 bits of position below the wrap counter: the available one in bits 0
    /// to 15, the used one above. Front ends that know only the lower half send 0 above; the used
    /// position is then the available one, since a stopped ring has nothing in flight.
    Packed {
        /// Next descriptor to take.
        avail: u16,
        /// Its wrap counter.
        avail_wrap: bool,
        /// Next descriptor to write back.
        used: u16,
        /// Its wrap counter.
        used_wrap: bool,
        /// The front end sent 0 for a ring that never stood anywhere: wrap counters of 0 would be
        /// wrong for a fresh ring (virtio 1.2 §2.8.1 starts them at 1), so they are 1 here.
        is_fresh: bool,
    },
}

const WRAP: u32 = 1 << 15;

impl RingBase {
    /// The number of GET_VRING_BASE's reply.
    pub const fn to_wire(self) -> u32 {
        match self {
            Self::Split(avail) => avail as u32,
            Self::Packed {
                avail,
                avail_wrap,
                used,
                used_wrap,
                is_fresh: _,
            } => {
                let low = (avail as u32 & !WRAP) | if avail_wrap { WRAP } else { 0 };
                let high = (used as u32 & !WRAP) | if used_wrap { WRAP } else { 0 };
                low | high << 16
            }
        }
    }

    /// Reads SET_VRING_BASE's number. `is_literal`: a 0 on a packed ring is a position we once
    /// gave.
    fn from_wire(num: u32, layout: RingLayout, is_literal: bool) -> Option<Self> {
        match layout {
            RingLayout::Split => u16::try_from(num).ok().map(Self::Split),
            RingLayout::Packed => {
                let is_fresh = num == 0 && !is_literal;
                let low = if is_fresh { WRAP } else { num & 0xffff };
                let high = if num >> 16 == 0 { low } else { num >> 16 };
                Some(Self::Packed {
                    avail: (low & !WRAP) as u16,
                    avail_wrap: low & WRAP != 0,
                    used: (high & !WRAP) as u16,
                    used_wrap: high & WRAP != 0,
                    is_fresh,
                })
            }
        }
    }
}

/// Means by which the guest announces that it added buffers.
#[derive(Clone, Debug)]
pub enum Kick {
    /// It writes this eventfd.
    Fd(SharedFd),
    /// It does not: the ring must be polled, and the thread that polls it may never sleep.
    Poll,
}

/// Complete configuration of a ring that starts; checked.
#[derive(Clone, Debug)]
pub struct RingConfig {
    /// Its index.
    pub index: u8,
    /// Split or packed.
    pub layout: RingLayout,
    /// Entries; a power of two where split.
    pub size: u16,
    /// Descriptor table or ring: a user address, or an IOVA with ACCESS_PLATFORM. Aligned, and no
    /// area runs over the end of the address space; whether they are in memory is not known here.
    pub desc: u64,
    /// Available ring or driver event suppression.
    pub avail: u64,
    /// Used ring or device event suppression.
    pub used: u64,
    /// Position at which to start.
    pub base: RingBase,
    /// Means by which the guest kicks.
    pub kick: Kick,
    /// Descriptor to signal when buffers were used; `None`: the guest polls, or has given none yet.
    pub call: Option<SharedFd>,
    /// Descriptor to signal when the ring breaks.
    pub err: Option<SharedFd>,
    /// Whether it may be served, or waits for [`Event::RingEnabled`](super::Event::RingEnabled).
    pub is_enabled: bool,
}

/// A ring's part of the session.
#[derive(Clone, Debug, Default)]
pub(super) struct Ring {
    /// Entries; 0 before SET_VRING_NUM.
    pub size: u16,
    pub addr: Option<VringAddr>,
    /// As on the wire: what it means depends on the layout.
    pub base: u32,
    /// The last GET_VRING_BASE returned 0, so a 0 that comes back is meant literally.
    pub is_base_literal: bool,
    pub call: Option<SharedFd>,
    pub err: Option<SharedFd>,
    /// SET_VRING_ENABLE's last word.
    pub is_enabled: bool,
    pub is_running: bool,
}

pub(super) const fn layout(features: u64) -> RingLayout {
    if features & feature::RING_PACKED != 0 {
        RingLayout::Packed
    } else {
        RingLayout::Split
    }
}

/// Whether a ring whose enable flag is `flag` may be served: without bit 30 there is no such flag.
pub(super) const fn is_enabled(flag: bool, features: u64) -> bool {
    flag || features & feature::PROTOCOL_FEATURES == 0
}

/// SET_VRING_NUM's value for this layout.
pub(super) fn check_size(
    request: RequestId,
    index: u8,
    size: u32,
    layout: RingLayout,
    max: u16,
) -> Result<u16, RequestError> {
    let bad = RequestError::Ring {
        request,
        index,
        field: "num",
        value: size.into(),
    };
    match u16::try_from(size) {
        Ok(entries) if entries == 0 || entries > max => Err(bad),
        Ok(entries) if layout == RingLayout::Split && !entries.is_power_of_two() => Err(bad),
        Ok(entries) => Ok(entries),
        Err(_) => Err(bad),
    }
}

/// SET_VRING_BASE's value for this layout.
pub(super) fn check_base(
    request: RequestId,
    index: u8,
    ring: &Ring,
    layout: RingLayout,
) -> Result<RingBase, RequestError> {
    let bad = || RequestError::Ring {
        request,
        index,
        field: "base",
        value: ring.base.into(),
    };
    let base = RingBase::from_wire(ring.base, layout, ring.is_base_literal).ok_or_else(bad)?;
    if let RingBase::Packed { avail, used, .. } = base
        && ring.size != 0
        && (avail >= ring.size || used >= ring.size)
    {
        return Err(bad());
    }
    Ok(base)
}

/// Alignment, and overflow for a ring of `size` entries (virtio 1.2 §2.7, §2.8; sizes with the
/// event index words, which are there whether or not the feature is).
pub(super) fn check_addr(
    request: RequestId,
    index: u8,
    addr: &VringAddr,
    layout: RingLayout,
    size: u16,
) -> Result<(), RequestError> {
    let size = u64::from(size);
    let areas = match layout {
        RingLayout::Split => [
            ("descriptor", addr.desc, 16, 16 * size),
            ("available", addr.avail, 2, 6 + 2 * size),
            ("used", addr.used, 4, 6 + 8 * size),
        ],
        RingLayout::Packed => [
            ("descriptor", addr.desc, 16, 16 * size),
            ("available", addr.avail, 4, 4),
            ("used", addr.used, 4, 4),
        ],
    };
    for (field, value, align, len) in areas {
        if value % align != 0 || value.checked_add(len).is_none() {
            return Err(RequestError::Ring {
                request,
                index,
                field,
                value,
            });
        }
    }
    Ok(())
}

impl Ring {
    /// The description of a ring that is to start, checked against the features as they are now.
    pub fn start(
        &self,
        request: RequestId,
        index: u8,
        kick: Kick,
        features: u64,
        max: u16,
    ) -> Result<RingConfig, RequestError> {
        let missing = |missing| RequestError::RingIncomplete {
            request,
            index,
            missing,
        };
        let layout = layout(features);
        if self.size == 0 {
            return Err(missing("size"));
        }
        let size = check_size(request, index, self.size.into(), layout, max)?;
        let addr = self.addr.as_ref().ok_or_else(|| missing("addresses"))?;
        check_addr(request, index, addr, layout, size)?;
        Ok(RingConfig {
            index,
            layout,
            size,
            desc: addr.desc,
            avail: addr.avail,
            used: addr.used,
            base: check_base(request, index, self, layout)?,
            kick,
            call: self.call.clone(),
            err: self.err.clone(),
            is_enabled: is_enabled(self.is_enabled, features),
        })
    }
}
