//! A block device that attacks its guest on request, to show that the IOMMU stops it. For tests and demos only.
//!
//! The trigger is an ordinary request that starts at a chosen sector, which any user of the guest can
//! issue (`dd … skip=SECTOR`). The rogue access is made by the device, through its own view, while it
//! holds the request; then the request completes as it should.

use guest_mem::{Access, Dma, Iova, Stop};

use crate::ring::Segment;

/// What the device does wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Misbehave {
    /// Nothing.
    #[default]
    None,
    /// On a *read* that starts at the trigger sector: writes 8 bytes to an address nobody gave it.
    DmaUnmapped {
        /// The trigger.
        sector: u64,
        /// Where to.
        iova: Iova,
    },
    /// On a *write* that starts at the trigger sector: writes 8 bytes into the request's own data
    /// buffer, which the guest has mapped read-only for it.
    WriteToReadOnly {
        /// The trigger.
        sector: u64,
    },
}

/// What a rogue access writes.
pub const ROGUE_BYTES: [u8; 8] = [0xee; 8];

impl Misbehave {
    /// The address a request that starts at `sector` makes the device attack.
    pub(super) fn target(&self, sector: u64, write: bool, data: Option<&Segment>) -> Option<Iova> {
        match *self {
            Self::DmaUnmapped {
                sector: trigger,
                iova,
            } if trigger == sector && !write => Some(iova),
            Self::WriteToReadOnly { sector: trigger } if trigger == sector && write => {
                data.map(|segment| segment.iova)
            }
            _ => None,
        }
    }
}

/// Does it; answers whether the access was blocked.
pub(super) fn attack<D: Dma>(dma: &mut D, iova: Iova) -> Access<bool> {
    match dma.write(iova, &ROGUE_BYTES) {
        Ok(()) => Ok(false),
        Err(Stop::Fault(_)) => Ok(true),
        Err(pending) => Err(pending),
    }
}
