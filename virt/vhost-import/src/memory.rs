//! Guest RAM as it is told to the back end.
//!
//! A region's *user address* is a name both sides agree upon, for ring addresses; ours says nothing about where this
//! process has mapped anything.

use std::io;
use std::os::fd::BorrowedFd;

use guest_mem::{Gpa, GuestRam, PhysMem};
use vhost_user::wire::MemRegion;
use vio::QueueConfig;

/// User address of guest-physical address 0.
const USER_BASE: u64 = 1 << 44;

/// Guest RAM and its name for addresses.
#[derive(Clone, Debug)]
pub(crate) struct Memory(GuestRam);

/// A split ring, checked: each of its parts lies in one region.
#[derive(Clone, Debug)]
pub(crate) struct RingPlace {
    pub index: u16,
    pub size: u16,
    /// User addresses.
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
    /// Guest addresses of the two `idx` fields.
    avail_idx: Gpa,
    used_idx: Gpa,
}

impl Memory {
    /// # Errors
    /// `Unsupported` for memory that has no file.
    pub fn new(ram: GuestRam) -> io::Result<Self> {
        match ram.memfd() {
            Some(_) => Ok(Self(ram)),
            None => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    pub fn regions(&self) -> Vec<MemRegion> {
        let region = |region: &guest_mem::Region| MemRegion {
            guest_addr: region.gpa.raw(),
            size: region.len,
            user_addr: USER_BASE + region.gpa.raw(),
            mmap_offset: region.fd_offset,
        };
        self.0.regions().iter().map(region).collect()
    }

    /// The memory file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.memfd().expect("`new` looked")
    }

    /// A ring as the driver described it, if it lies in memory (virtio 1.2 §2.7; lengths with the event index words).
    pub fn place(&self, queue: &QueueConfig) -> Option<RingPlace> {
        let size = u64::from(queue.size);
        let user = |at: u64, len: u64| self.is_ram(at, len).then(|| USER_BASE + at);
        let (desc, avail, used) = (queue.desc.raw(), queue.avail.raw(), queue.used.raw());
        Some(RingPlace {
            index: queue.index,
            size: queue.size,
            desc: user(desc, 16 * size)?,
            avail: user(avail, 6 + 2 * size)?,
            used: user(used, 6 + 8 * size)?,
            avail_idx: Gpa::new(avail + 2),
            used_idx: Gpa::new(used + 2),
        })
    }

    fn is_ram(&self, at: u64, len: u64) -> bool {
        self.0.regions().iter().any(|region| {
            let inside = at.wrapping_sub(region.gpa.raw());
            inside < region.len && len <= region.len - inside
        })
    }

    /// The used ring's `idx`.
    pub fn used_idx(&self, ring: &RingPlace) -> u16 {
        self.word(ring.used_idx)
    }

    /// The available ring's `idx`.
    pub fn avail_idx(&self, ring: &RingPlace) -> u16 {
        self.word(ring.avail_idx)
    }

    fn word(&self, at: Gpa) -> u16 {
        let mut bytes = [0; 2];
        self.0
            .read(at, &mut bytes)
            .expect("a ring's place was checked, and RAM does not go away");
        u16::from_le_bytes(bytes)
    }
}
