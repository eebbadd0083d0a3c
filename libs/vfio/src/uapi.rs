//! What `include/uapi/linux/vfio.h` says: numbers of calls and the structures they take, in the order of that file.

use std::marker::PhantomData;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A call: its name for errors, its number, and in the type what its argument is.
pub struct Call<T> {
    pub name: &'static str,
    pub number: libc::c_ulong,
    argument: PhantomData<T>,
}

/// `_IO(';', 100 + nr)`: VFIO's numbers carry neither size nor direction.
const fn call<T>(name: &'static str, nr: libc::c_ulong) -> Call<T> {
    let number = (b';' as libc::c_ulong) << 8 | (100 + nr);
    Call {
        name,
        number,
        argument: PhantomData,
    }
}

/// The argument is a number, not a pointer.
pub enum Value {}
/// A file descriptor, by pointer.
pub enum Descriptor {}
/// A name that ends with a zero byte.
pub enum Name {}
/// [`DmaMap`], after which a device reaches memory: a call that is not safe with any argument.
pub enum Reach {}
/// [`IommuType1Info`] with capabilities behind it, as long as its first word says.
pub enum InfoBuffer {}

pub const GET_API_VERSION: Call<Value> = call("VFIO_GET_API_VERSION", 0);
pub const CHECK_EXTENSION: Call<Value> = call("VFIO_CHECK_EXTENSION", 1);
pub const SET_IOMMU: Call<Value> = call("VFIO_SET_IOMMU", 2);
pub const GROUP_GET_STATUS: Call<GroupStatus> = call("VFIO_GROUP_GET_STATUS", 3);
pub const GROUP_SET_CONTAINER: Call<Descriptor> = call("VFIO_GROUP_SET_CONTAINER", 4);
pub const GROUP_GET_DEVICE_FD: Call<Name> = call("VFIO_GROUP_GET_DEVICE_FD", 6);
pub const DEVICE_GET_INFO: Call<DeviceInfo> = call("VFIO_DEVICE_GET_INFO", 7);
pub const DEVICE_GET_REGION_INFO: Call<RegionInfo> = call("VFIO_DEVICE_GET_REGION_INFO", 8);
pub const DEVICE_RESET: Call<Value> = call("VFIO_DEVICE_RESET", 11);
pub const IOMMU_GET_INFO: Call<InfoBuffer> = call("VFIO_IOMMU_GET_INFO", 12);
pub const IOMMU_MAP_DMA: Call<Reach> = call("VFIO_IOMMU_MAP_DMA", 13);
pub const IOMMU_UNMAP_DMA: Call<DmaUnmap> = call("VFIO_IOMMU_UNMAP_DMA", 14);

/// What `GET_API_VERSION` answers.
pub const API_VERSION: i32 = 0;
/// Type 1, version 2.
pub const TYPE1V2_IOMMU: u32 = 3;

/// A structure that begins with its own length, which bounds what the kernel reads and writes of it.
pub trait Sized32: FromBytes + IntoBytes + Immutable + Sized {
    /// All zeroes but the length.
    fn zeroed() -> Self {
        let mut new = Self::new_zeroed();
        let len = u32::try_from(size_of::<Self>()).expect("a few words");
        new.as_mut_bytes()[..4].copy_from_slice(&len.to_ne_bytes());
        new
    }
}

macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident = $len:literal { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { pub argsz: u32, pub flags: u32, $(pub $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $len);
        impl Sized32 for $name {}
    )*};
}

structures! {
    /// `struct vfio_group_status`.
    GroupStatus = 8 {}
    /// `struct vfio_device_info` up to the number of interrupts.
    DeviceInfo = 16 { num_regions: u32, num_irqs: u32, }
    /// `struct vfio_region_info`.
    RegionInfo = 32 { index: u32, cap_offset: u32, size: u64, offset: u64, }
    /// `struct vfio_iommu_type1_info`.
    IommuType1Info = 24 { iova_pgsizes: u64, cap_offset: u32, pad: u32, }
    /// `struct vfio_iommu_type1_dma_map`.
    DmaMap = 32 { vaddr: u64, iova: u64, size: u64, }
    /// `struct vfio_iommu_type1_dma_unmap`.
    DmaUnmap = 24 { iova: u64, size: u64, }
}

/// Every device of the group is bound to VFIO or to nothing.
pub const GROUP_VIABLE: u32 = 1 << 0;
/// The device can be reset.
pub const DEVICE_CAN_RESET: u32 = 1 << 0;
/// The region can be mapped.
pub const REGION_CAN_MMAP: u32 = 1 << 2;
/// `PCI_CONFIG_REGION_INDEX`; BARs are 0 to 5.
pub const CONFIG_REGION: u32 = 7;
/// `iova_pgsizes` is set.
pub const INFO_PGSIZES: u32 = 1 << 0;
/// There are capabilities from `cap_offset` on.
pub const INFO_CAPS: u32 = 1 << 1;
/// A capability's id: ranges of allowed IOVAs.
pub const CAP_IOVA_RANGE: u16 = 1;
/// A capability's id: how many more mappings there may be.
pub const CAP_DMA_AVAIL: u16 = 3;
/// The device may read.
pub const MAP_READ: u32 = 1 << 0;
/// The device may write.
pub const MAP_WRITE: u32 = 1 << 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// By the header: `_IO(0x3b, 100 + n)`, and where fields lie.
    #[test]
    fn numbers_and_layouts_are_those_of_the_header() {
        assert_eq!(GET_API_VERSION.number, 0x3b64);
        assert_eq!(DEVICE_RESET.number, 0x3b6f);
        assert_eq!(IOMMU_MAP_DMA.number, 0x3b71);
        assert_eq!(IOMMU_UNMAP_DMA.number, 0x3b72);
        let map = DmaMap {
            flags: MAP_READ | MAP_WRITE,
            vaddr: 0x1122,
            iova: 0x3344,
            size: 0x5566,
            ..DmaMap::zeroed()
        };
        let words: Vec<u64> = map
            .as_bytes()
            .chunks(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")))
            .collect();
        assert_eq!(words, [0x3_0000_0020, 0x1122, 0x3344, 0x5566]);
        assert_eq!(RegionInfo::zeroed().argsz, 32);
    }
}
