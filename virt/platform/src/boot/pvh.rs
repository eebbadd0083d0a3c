//! PVH start info (Xen `public/arch-x86/hvm/start_info.h`, version 1): the structure to which EBX
//! points at an ELF kernel's entry.
//!
//! One page: start info, then the memory map, then the one module (the initrd).

use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::layout;

/// "xEn3" with bit 7 of the first byte set.
const MAGIC: u32 = 0x336e_c578;
const MEMORY_MAP: u64 = layout::BOOT_PVH + 0x100;
const MODULES: u64 = layout::BOOT_PVH + 0xe00;

macro_rules! wire {
    ($name:ident, $inner:ty) => {
        #[derive(Clone, Copy, Default)]
        #[repr(transparent)]
        struct $name($inner);
        // SAFETY: a transparent wrapper of integers only, without padding: any bytes are a value of
        // it.
        unsafe impl ByteValued for $name {}
    };
}
wire!(StartInfo, hvm_start_info);
wire!(MapEntry, hvm_memmap_table_entry);
wire!(Module, hvm_modlist_entry);

/// Writes the page. `initrd` is `(address, bytes)`.
pub fn write_start_info(
    ram: &GuestMemoryMmap,
    memory: u64,
    initrd: Option<(u64, u64)>,
) -> Result<(), GuestMemoryError> {
    let map = layout::e820(memory);
    let mut info = hvm_start_info {
        magic: MAGIC,
        version: 1,
        cmdline_paddr: layout::BOOT_CMDLINE,
        rsdp_paddr: layout::ACPI_RSDP,
        memmap_paddr: MEMORY_MAP,
        memmap_entries: map.len() as u32,
        ..Default::default()
    };
    for (index, (addr, size, kind)) in (0u64..).zip(map) {
        let entry = hvm_memmap_table_entry {
            addr,
            size,
            type_: kind as u32,
            reserved: 0,
        };
        let at = MEMORY_MAP + index * size_of::<MapEntry>() as u64;
        ram.write_obj(MapEntry(entry), GuestAddress(at))?;
    }
    if let Some((paddr, size)) = initrd {
        info.nr_modules = 1;
        info.modlist_paddr = MODULES;
        let module = hvm_modlist_entry {
            paddr,
            size,
            ..Default::default()
        };
        ram.write_obj(Module(module), GuestAddress(MODULES))?;
    }
    ram.write_obj(StartInfo(info), GuestAddress(layout::BOOT_PVH))
}
