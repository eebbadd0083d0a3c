//! Payloads as they lie in a message: machine byte order, no alignment (they are copied out).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::payload::MemRegion;

/// Section "Header": request, flags, size of the payload.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct HeaderRaw {
    pub request: u32,
    pub flags: u32,
    pub size: u32,
}
const _: () = assert!(size_of::<HeaderRaw>() == 12);

/// Section "A vring address description". The specification's table calls the second word "flags"
/// and shows a third, "size", that the C structure (`struct vhost_vring_addr`) does not have.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct VringAddrRaw {
    pub index: u32,
    pub flags: u32,
    pub desc: u64,
    pub used: u64,
    pub avail: u64,
    pub log: u64,
}
const _: () = assert!(size_of::<VringAddrRaw>() == 40);

/// Section "Memory regions description": the words before the regions.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct MemTableHead {
    pub regions: u32,
    pub padding: u32,
}
const _: () = assert!(size_of::<MemTableHead>() == 8);

/// Section "Single memory region description".
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct SingleRegionRaw {
    pub padding: u64,
    pub region: MemRegion,
}
const _: () = assert!(size_of::<SingleRegionRaw>() == 40);

/// Section "An IOTLB message", with the six bytes of padding that `struct vhost_iotlb_msg` ends in.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct IotlbRaw {
    pub iova: u64,
    pub size: u64,
    pub user_addr: u64,
    pub perm: u8,
    pub kind: u8,
    pub padding: [u8; 6],
}
const _: () = assert!(size_of::<IotlbRaw>() == 32);

/// Section "Virtio device config space": the words before the contents.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ConfigHead {
    pub offset: u32,
    pub size: u32,
    pub flags: u32,
}
const _: () = assert!(size_of::<ConfigHead>() == 12);

/// Section "Inflight description", with the four bytes of padding of the C structure.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InflightRaw {
    pub mmap_size: u64,
    pub mmap_offset: u64,
    pub queues: u16,
    pub queue_size: u16,
    pub padding: u32,
}
const _: () = assert!(size_of::<InflightRaw>() == 24);
