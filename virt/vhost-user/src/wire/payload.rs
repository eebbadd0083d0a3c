//! Payloads of requests and replies as a back end sees them, and two flags of the wire format.

use std::os::fd::OwnedFd;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of configuration space that GET_CONFIG and SET_CONFIG can access
/// (VHOST_USER_MAX_CONFIG_SIZE).
pub const MAX_CONFIG: u32 = 256;

/// Bit 8 of the kick, call and err payloads: there is no descriptor.
pub(super) const NOFD: u64 = 1 << 8;

/// `VHOST_VRING_F_LOG`, bit 0 of the flags of SET_VRING_ADDR. It has no meaning without
/// VHOST_F_LOG_ALL.
pub(super) const VRING_F_LOG: u32 = 1;

/// A ring's index with a number (section "A vring state description").
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// Ring.
    pub index: u32,
    /// Value, which depends on the request: number of entries, base, or 0 and 1.
    pub num: u32,
}
const _: () = assert!(size_of::<VringState>() == 8);

/// Addresses of a ring: user addresses, or IOVAs once ACCESS_PLATFORM is negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringAddr {
    /// Ring.
    pub index: u32,
    /// Descriptor table (split) or descriptor ring (packed).
    pub desc: u64,
    /// Available ring (split) or driver event suppression (packed).
    pub avail: u64,
    /// Used ring (split) or device event suppression (packed).
    pub used: u64,
}

/// A ring's eventfd, or its absence.
#[derive(Debug)]
pub struct VringFd {
    /// Ring.
    pub index: u8,
    /// `None` with the invalid-FD flag: poll instead of waiting (kick), or do not signal (call,
    /// err).
    pub fd: Option<OwnedFd>,
}

/// A region of guest memory as described on the wire (section "Memory regions description").
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemRegion {
    /// First guest-physical address.
    pub guest_addr: u64,
    /// Bytes.
    pub size: u64,
    /// User address of the region in the front end's process; ring addresses are user addresses.
    pub user_addr: u64,
    /// Its offset in the descriptor's file, in bytes.
    pub mmap_offset: u64,
}
const _: () = assert!(size_of::<MemRegion>() == 32);

/// Origin of a change of the configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigKind {
    /// The guest, flags 0: only writable fields.
    Writable,
    /// Live migration, flags 1: any field.
    Migration,
}

/// A piece of configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigAccess {
    /// First byte.
    pub offset: u32,
    /// Bytes; `offset + size` is at most [`MAX_CONFIG`].
    pub size: u32,
    /// Origin of the access.
    pub kind: ConfigKind,
}

/// Description of an inflight region, or the request to create one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inflight {
    /// Bytes of the region; 0 in a request to create one.
    pub mmap_size: u64,
    /// Its offset in the descriptor's file, in bytes.
    pub mmap_offset: u64,
    /// Rings it tracks.
    pub queues: u16,
    /// Entries of each.
    pub queue_size: u16,
}
