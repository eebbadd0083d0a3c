//! Ioctl numbers and structures of `include/uapi/linux/vhost.h`, as far as they are used. The
//! numbers are those of x86-64 and of every other architecture with the generic ioctl encoding.

use std::marker::PhantomData;

/// An ioctl whose argument is a `T`.
pub struct Call<T> {
    pub number: libc::Ioctl,
    _argument: PhantomData<T>,
}

impl<T> Call<T> {
    /// Defines an ioctl whose argument the kernel reads.
    const fn write(number: u32) -> Self {
        Self::numbered(1, number)
    }

    /// Defines an ioctl whose argument the kernel fills in.
    const fn read(number: u32) -> Self {
        Self::numbered(2, number)
    }

    /// Defines an ioctl whose argument the kernel reads and fills in.
    const fn read_write(number: u32) -> Self {
        Self::numbered(3, number)
    }

    const fn numbered(direction: u32, number: u32) -> Self {
        let number = direction << 30 | (size_of::<T>() as u32) << 16 | 0xaf << 8 | number;
        Self {
            number: number as libc::Ioctl,
            _argument: PhantomData,
        }
    }
}

/// Plain data without padding: any bytes are a valid value, and all of its bytes are initialised.
///
/// # Safety
/// The type has these properties.
pub unsafe trait Plain: Copy {}

/// `struct vhost_vring_state`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RingState {
    pub index: u32,
    pub num: u32,
}

/// `struct vhost_vring_file`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RingFile {
    pub index: u32,
    /// −1: no descriptor.
    pub fd: i32,
}

/// `struct vhost_vring_addr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RingAddr {
    pub index: u32,
    pub flags: u32,
    pub desc: u64,
    pub used: u64,
    pub avail: u64,
    pub log: u64,
}

/// `struct vhost_memory_region`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryRegion {
    pub gpa: u64,
    pub len: u64,
    pub user_addr: u64,
    pub flags: u64,
}

/// Number of regions in the kernel's table. This project's machines have at most two.
pub const MAX_REGIONS: usize = 8;

/// `struct vhost_memory`, with room for its regions.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryTable {
    pub regions: u32,
    pub padding: u32,
    pub region: [MemoryRegion; MAX_REGIONS],
}

/// `struct vhost_memory` without its regions: the ioctl's number encodes this size.
pub struct MemoryHead(#[expect(dead_code, reason = "its size counts")] [u32; 2]);

/// `struct vhost_msg_v2` with a `struct vhost_iotlb_msg`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IotlbMsg {
    pub kind: u32,
    pub asid: u32,
    pub iova: u64,
    pub size: u64,
    pub user_addr: u64,
    pub perm: u8,
    pub what: u8,
    pub padding: [u8; 6],
    pub rest: [u64; 4],
}

// SAFETY: integers that follow each other without padding, by the sizes below.
unsafe impl Plain for u64 {}
// SAFETY: likewise.
unsafe impl Plain for RingState {}
// SAFETY: likewise.
unsafe impl Plain for RingFile {}
// SAFETY: likewise.
unsafe impl Plain for RingAddr {}
// SAFETY: likewise.
unsafe impl Plain for MemoryTable {}
// SAFETY: likewise.
unsafe impl Plain for IotlbMsg {}

const _: () = {
    assert!(size_of::<RingState>() == 8);
    assert!(size_of::<RingFile>() == 8);
    assert!(size_of::<RingAddr>() == 8 + 4 * 8);
    assert!(size_of::<MemoryTable>() == 8 + MAX_REGIONS * 32);
    assert!(size_of::<MemoryHead>() == 8);
    assert!(size_of::<IotlbMsg>() == 2 * 4 + 3 * 8 + 8 + 4 * 8);
};

pub const GET_FEATURES: Call<u64> = Call::read(0x00);
pub const SET_FEATURES: Call<u64> = Call::write(0x00);
/// `_IO(0xAF, 0x01)`: no argument.
pub const SET_OWNER: libc::Ioctl = 0xaf01;
pub const SET_MEM_TABLE: Call<MemoryHead> = Call::write(0x03);
pub const SET_VRING_NUM: Call<RingState> = Call::write(0x10);
pub const SET_VRING_ADDR: Call<RingAddr> = Call::write(0x11);
pub const SET_VRING_BASE: Call<RingState> = Call::write(0x12);
pub const GET_VRING_BASE: Call<RingState> = Call::read_write(0x12);
pub const SET_VRING_KICK: Call<RingFile> = Call::write(0x20);
pub const SET_VRING_CALL: Call<RingFile> = Call::write(0x21);
pub const SET_VRING_ERR: Call<RingFile> = Call::write(0x22);
pub const SET_BACKEND_FEATURES: Call<u64> = Call::write(0x25);
pub const GET_BACKEND_FEATURES: Call<u64> = Call::read(0x26);
pub const NET_SET_BACKEND: Call<RingFile> = Call::write(0x30);

/// `VHOST_BACKEND_F_IOTLB_MSG_V2`.
pub const BACKEND_IOTLB_MSG_V2: u64 = 1 << 1;
/// `VHOST_IOTLB_MSG_V2`.
pub const IOTLB_MSG_V2: u32 = 2;
/// `VHOST_IOTLB_MISS`, `_UPDATE`, `_INVALIDATE`.
pub const MISS: u8 = 1;
pub const UPDATE: u8 = 2;
pub const INVALIDATE: u8 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that a C compiler gives for the header on x86-64.
    #[test]
    fn the_numbers_are_the_headers() {
        let numbers = [
            (GET_FEATURES.number, 0x8008_af00_u64),
            (SET_FEATURES.number, 0x4008_af00),
            (SET_MEM_TABLE.number, 0x4008_af03),
            (SET_VRING_NUM.number, 0x4008_af10),
            (SET_VRING_ADDR.number, 0x4028_af11),
            (SET_VRING_BASE.number, 0x4008_af12),
            (GET_VRING_BASE.number, 0xc008_af12),
            (SET_VRING_KICK.number, 0x4008_af20),
            (SET_VRING_CALL.number, 0x4008_af21),
            (SET_VRING_ERR.number, 0x4008_af22),
            (SET_BACKEND_FEATURES.number, 0x4008_af25),
            (GET_BACKEND_FEATURES.number, 0x8008_af26),
            (NET_SET_BACKEND.number, 0x4008_af30),
        ];
        for (number, expected) in numbers {
            assert_eq!(number as u32, expected as u32, "{expected:#x}");
        }
    }
}
