//! Definitions of `include/uapi/linux/vfio.h`: ioctl numbers and their argument structures, in the
//! order of that file.

use std::marker::PhantomData;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// An ioctl: its name for error messages, its number, and its argument as a type parameter.
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
/// [`DmaMap`]. After the call a device can reach the memory, so the call is unsafe.
pub enum Reach {}
/// [`IommuType1Info`] or [`RegionInfo`] with capabilities behind it. Its first word is the length
/// of both.
pub enum InfoBuffer {}
/// [`IrqSet`] with file descriptors behind it.
pub enum Descriptors {}
/// No argument.
pub enum Nothing {}

pub const GET_API_VERSION: Call<Value> = call("VFIO_GET_API_VERSION", 0);
pub const CHECK_EXTENSION: Call<Value> = call("VFIO_CHECK_EXTENSION", 1);
pub const SET_IOMMU: Call<Value> = call("VFIO_SET_IOMMU", 2);
pub const GROUP_GET_STATUS: Call<GroupStatus> = call("VFIO_GROUP_GET_STATUS", 3);
pub const GROUP_SET_CONTAINER: Call<Descriptor> = call("VFIO_GROUP_SET_CONTAINER", 4);
pub const GROUP_UNSET_CONTAINER: Call<Nothing> = call("VFIO_GROUP_UNSET_CONTAINER", 5);
pub const GROUP_GET_DEVICE_FD: Call<Name> = call("VFIO_GROUP_GET_DEVICE_FD", 6);
pub const DEVICE_GET_INFO: Call<DeviceInfo> = call("VFIO_DEVICE_GET_INFO", 7);
pub const DEVICE_GET_REGION_INFO: Call<InfoBuffer> = call("VFIO_DEVICE_GET_REGION_INFO", 8);
pub const DEVICE_GET_IRQ_INFO: Call<IrqInfo> = call("VFIO_DEVICE_GET_IRQ_INFO", 9);
pub const DEVICE_SET_IRQS: Call<Descriptors> = call("VFIO_DEVICE_SET_IRQS", 10);
pub const DEVICE_RESET: Call<Nothing> = call("VFIO_DEVICE_RESET", 11);
pub const IOMMU_GET_INFO: Call<InfoBuffer> = call("VFIO_IOMMU_GET_INFO", 12);
pub const IOMMU_MAP_DMA: Call<Reach> = call("VFIO_IOMMU_MAP_DMA", 13);
pub const IOMMU_UNMAP_DMA: Call<DmaUnmap> = call("VFIO_IOMMU_UNMAP_DMA", 14);

/// Answer of `GET_API_VERSION`.
pub const API_VERSION: i32 = 0;
/// Type 1, version 2.
pub const TYPE1V2_IOMMU: u32 = 3;
/// Extension: DMA of every attached device is coherent with the processors' caches.
pub const DMA_CC_IOMMU: u32 = 4;

/// A structure that begins with its own length, which bounds what the kernel reads and writes of
/// it.
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
    /// `struct vfio_irq_info`.
    IrqInfo = 16 { index: u32, count: u32, }
    /// `struct vfio_irq_set` without the data behind it.
    IrqSet = 20 { index: u32, start: u32, count: u32, }
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
/// The device is a PCI function.
pub const DEVICE_IS_PCI: u32 = 1 << 1;
/// The region can be read.
pub const REGION_CAN_READ: u32 = 1 << 0;
/// The region can be written.
pub const REGION_CAN_WRITE: u32 = 1 << 1;
/// The region can be mapped.
pub const REGION_CAN_MMAP: u32 = 1 << 2;
/// There are capabilities from `cap_offset` on.
pub const REGION_CAPS: u32 = 1 << 3;
/// Id of the region capability that lists the areas that can be mapped, where not all can.
pub const CAP_SPARSE_MMAP: u16 = 1;
/// Id of the region capability that allows the pages of the MSI-X table to be mapped as well.
pub const CAP_MSIX_MAPPABLE: u16 = 3;
/// The interrupts of this index can signal an eventfd.
pub const IRQ_EVENTFD: u32 = 1 << 0;
/// The interrupts of this index can be masked and unmasked.
pub const IRQ_MASKABLE: u32 = 1 << 1;
/// The kernel masks an interrupt when it has signalled it.
pub const IRQ_AUTOMASKED: u32 = 1 << 2;
/// No vectors can be added while some are enabled.
pub const IRQ_NORESIZE: u32 = 1 << 3;
/// No data follows [`IrqSet`].
pub const SET_DATA_NONE: u32 = 1 << 0;
/// File descriptors of eventfds follow [`IrqSet`], -1 for none.
pub const SET_DATA_EVENTFD: u32 = 1 << 2;
/// The call unmasks, or sets the eventfds that unmask.
pub const SET_ACTION_UNMASK: u32 = 1 << 4;
/// The call signals, or sets the eventfds to signal.
pub const SET_ACTION_TRIGGER: u32 = 1 << 5;
/// `PCI_CONFIG_REGION_INDEX`; BARs are 0 to 5.
pub const CONFIG_REGION: u32 = 7;
/// `iova_pgsizes` is set.
pub const INFO_PGSIZES: u32 = 1 << 0;
/// There are capabilities from `cap_offset` on.
pub const INFO_CAPS: u32 = 1 << 1;
/// Id of the capability that lists the allowed IOVA ranges.
pub const CAP_IOVA_RANGE: u16 = 1;
/// Id of the capability that has the number of further mappings allowed.
pub const CAP_DMA_AVAIL: u16 = 3;
/// The device may read the memory.
pub const MAP_READ: u32 = 1 << 0;
/// The device may write the memory.
pub const MAP_WRITE: u32 = 1 << 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers are `_IO(0x3b, 100 + n)`, and fields lie as in the header.
    #[test]
    fn numbers_and_layouts_are_those_of_the_header() {
        assert_eq!(GET_API_VERSION.number, 0x3b64);
        assert_eq!(GROUP_UNSET_CONTAINER.number, 0x3b69);
        assert_eq!(DEVICE_GET_INFO.number, 0x3b6b);
        assert_eq!(DEVICE_GET_REGION_INFO.number, 0x3b6c);
        assert_eq!(DEVICE_GET_IRQ_INFO.number, 0x3b6d);
        assert_eq!(DEVICE_SET_IRQS.number, 0x3b6e);
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
        let irqs = IrqSet {
            flags: SET_DATA_EVENTFD | SET_ACTION_TRIGGER,
            index: 2,
            start: 0x11,
            count: 0x22,
            ..IrqSet::zeroed()
        };
        assert_eq!(words32(irqs.as_bytes()), [20, 0x24, 2, 0x11, 0x22]);
        let off = SET_DATA_NONE | SET_ACTION_UNMASK;
        assert_eq!(off, 0x11, "bits 0 and 4");
    }

    fn words32(bytes: &[u8]) -> Vec<u32> {
        let (words, rest) = bytes.as_chunks();
        assert_eq!(rest, []);
        words.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    /// The header's offsets, field by field: each holds a value of its own.
    #[test]
    fn answers_of_the_kernel_are_read_field_by_field() {
        let bytes = [16, 0b1011, 3, 65].map(u32::to_le_bytes);
        let irqs = IrqInfo::read_from_bytes(bytes.as_flattened()).expect("16 bytes");
        assert_eq!((irqs.argsz, irqs.flags), (16, 0b1011));
        assert_eq!((irqs.index, irqs.count), (3, 65));
        let flags = IRQ_EVENTFD | IRQ_MASKABLE | IRQ_NORESIZE;
        assert_eq!(irqs.flags, flags);
        assert_eq!(IRQ_AUTOMASKED, 0b0100);

        let bytes = [32, 0xf, 5, 0x20, 0x4000, 1, 0x6000, 2].map(u32::to_le_bytes);
        let region = RegionInfo::read_from_bytes(bytes.as_flattened()).expect("32 bytes");
        assert_eq!((region.argsz, region.index), (32, 5));
        assert_eq!(region.cap_offset, 0x20);
        assert_eq!(region.size, 0x1_0000_4000);
        assert_eq!(region.offset, 0x2_0000_6000);
        let flags = REGION_CAN_READ | REGION_CAN_WRITE | REGION_CAN_MMAP | REGION_CAPS;
        assert_eq!(region.flags, flags);

        let bytes = [16, 0b11, 9, 5].map(u32::to_le_bytes);
        let device = DeviceInfo::read_from_bytes(bytes.as_flattened()).expect("16 bytes");
        assert_eq!(device.flags, DEVICE_CAN_RESET | DEVICE_IS_PCI);
        assert_eq!((device.num_regions, device.num_irqs), (9, 5));
    }
}
