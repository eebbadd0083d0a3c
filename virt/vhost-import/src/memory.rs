//! Guest RAM as it is described to the back end.
//!
//! A region's *user address* is a name that both sides of a socket agree upon, for ring addresses;
//! ours do not reveal where this process has mapped anything. Behind an IOMMU rings are at IOVAs,
//! as the driver has set them, and IOVAs translate to user addresses. The kernel's vhost needs the
//! addresses of this process instead; the binding ([`KernelBackEnd`](crate::KernelBackEnd)) knows
//! them.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;

use guest_mem::{Gpa, GuestRam, PhysMem};
use vhost_user::wire::{IotlbAccess, MemRegion};
use vio::QueueConfig;

/// User address of guest-physical address 0.
const USER_BASE: u64 = 1 << 44;

/// The user address of memory, as the other side of a socket knows it.
pub(crate) const fn user_addr(gpa: Gpa) -> u64 {
    USER_BASE + gpa.raw()
}

/// Guest RAM and its name for addresses.
#[derive(Clone, Debug)]
pub(crate) struct Memory(GuestRam);

/// A split ring, checked: without an IOMMU each of its parts lies in one region, and else none
/// wraps.
#[derive(Clone, Debug)]
pub(crate) struct RingPlace {
    pub index: u16,
    pub size: u16,
    /// As the driver says: IOVAs, which without an IOMMU are guest-physical addresses.
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
}

/// Position of a split ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Indices {
    pub avail: u16,
    pub used: u16,
}

/// Bytes of the parts of a split ring (virtio 1.2 §2.7; lengths with the event index words).
const fn lengths(size: u16) -> (u64, u64, u64) {
    let size = size as u64;
    (16 * size, 6 + 2 * size, 6 + 8 * size)
}

impl RingPlace {
    /// A ring at IOVAs, if none of its parts wraps.
    pub fn at_iovas(queue: &QueueConfig) -> Option<Self> {
        let (desc, avail, used) = (queue.desc.raw(), queue.avail.raw(), queue.used.raw());
        let (desc_len, avail_len, used_len) = lengths(queue.size);
        desc.checked_add(desc_len)?;
        avail.checked_add(avail_len)?;
        used.checked_add(used_len)?;
        Some(Self {
            index: queue.index,
            size: queue.size,
            desc,
            avail,
            used,
        })
    }

    /// Returns its parts at IOVAs: address, length, and the device's access.
    pub fn areas(&self) -> [(u64, u64, IotlbAccess); 3] {
        let (desc, avail, used) = lengths(self.size);
        [
            (self.desc, desc, IotlbAccess::Read),
            (self.avail, avail, IotlbAccess::Read),
            (self.used, used, IotlbAccess::Write),
        ]
    }

    /// Returns the address of the available ring's `idx`.
    pub const fn avail_idx(&self) -> u64 {
        self.avail + 2
    }

    /// Returns the address of the used ring's `idx`.
    pub const fn used_idx(&self) -> u64 {
        self.used + 2
    }
}

impl Memory {
    /// Memory that a process behind a socket can map.
    ///
    /// # Errors
    /// `Unsupported` for memory that has no file.
    pub fn shared(ram: GuestRam) -> io::Result<Self> {
        match ram.memfd() {
            Some(_) => Ok(Self(ram)),
            None => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Any memory.
    pub fn new(ram: GuestRam) -> Self {
        Self(ram)
    }

    pub fn regions(&self) -> Vec<MemRegion> {
        let region = |region: &guest_mem::Region| MemRegion {
            guest_addr: region.gpa.raw(),
            size: region.len,
            user_addr: user_addr(region.gpa),
            mmap_offset: region.fd_offset,
        };
        self.0.regions().iter().map(region).collect()
    }

    /// The memory file, of what is [`shared`](Self::shared).
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.memfd().expect("`shared` looked")
    }

    /// A ring at guest-physical addresses, if it lies in memory.
    pub fn place(&self, queue: &QueueConfig) -> Option<RingPlace> {
        let place = RingPlace::at_iovas(queue)?;
        let mut areas = place.areas().into_iter();
        areas
            .all(|(at, len, _)| self.is_ram(at, len))
            .then_some(place)
    }

    /// First and last address of the region that has `gpa`.
    pub fn region(&self, gpa: Gpa) -> Option<RangeInclusive<u64>> {
        let mut regions = self.0.regions().iter();
        let region =
            regions.find(|region| gpa.raw().wrapping_sub(region.gpa.raw()) < region.len)?;
        Some(region.gpa.raw()..=region.gpa.raw() + (region.len - 1))
    }

    fn is_ram(&self, at: u64, len: u64) -> bool {
        self.0.regions().iter().any(|region| {
            let inside = at.wrapping_sub(region.gpa.raw());
            inside < region.len && len <= region.len - inside
        })
    }

    /// Returns the positions of rings at guest-physical addresses.
    pub fn indices(&self, rings: &[RingPlace]) -> Vec<Indices> {
        let indices = |ring: &RingPlace| Indices {
            avail: self.word(Gpa::new(ring.avail_idx())),
            used: self.word(Gpa::new(ring.used_idx())),
        };
        rings.iter().map(indices).collect()
    }

    fn word(&self, at: Gpa) -> u16 {
        let mut bytes = [0; 2];
        self.0
            .read(at, &mut bytes)
            .expect("a ring's place was checked, and RAM does not go away");
        u16::from_le_bytes(bytes)
    }
}
