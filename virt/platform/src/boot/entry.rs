//! Entry points of a kernel, and the structures in RAM that they need: segment descriptors and page
//! tables.
//!
//! * [`Entry::Linux64`]: Linux 64-bit boot protocol (Documentation/x86/boot.rst, "64-bit boot
//!   protocol"): long mode, first 4 GiB mapped one to one, flat segments 0x10 and 0x18, RSI =
//!   `boot_params`, interrupts off.
//! * [`Entry::Pvh`]: Xen's x86/HVM direct boot ABI: 32-bit protected mode, paging off, EBX = start
//!   info.
//!
//! The registers of each entry are set by the hypervisor.

use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::layout;

/// Entry point of a kernel and its protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Linux's 64-bit entry point at this guest-physical address.
    Linux64(u64),
    /// A PVH entry point at this guest-physical address.
    Pvh(u64),
}

/// Returns the table at [`layout::BOOT_GDT`] (Intel SDM volume 3 §3.4.5): null, unused, 0x10 flat
/// code, 0x18 flat data, 0x20 a busy task state of 0x68 bytes at 0. Code is 64-bit for
/// [`Entry::Linux64`], 32-bit for [`Entry::Pvh`].
pub fn gdt(entry: Entry) -> [u64; 5] {
    let code = match entry {
        Entry::Linux64(_) => 0x00af_9b00_0000_ffff,
        Entry::Pvh(_) => 0x00cf_9b00_0000_ffff,
    };
    [0, 0, code, 0x00cf_9300_0000_ffff, 0x0000_8b00_0000_0067]
}

/// Writes the GDT and, for long mode, the page tables.
pub(super) fn write_tables(ram: &GuestMemoryMmap, entry: Entry) -> Result<(), GuestMemoryError> {
    for (index, value) in (0u64..).zip(gdt(entry)) {
        ram.write_obj(value, GuestAddress(layout::BOOT_GDT + 8 * index))?;
    }
    if matches!(entry, Entry::Linux64(_)) {
        write_page_tables(ram)?;
    }
    Ok(())
}

/// Writes PML4, PDPT and four directories of 2 MiB pages: 4 GiB one to one.
fn write_page_tables(ram: &GuestMemoryMmap) -> Result<(), GuestMemoryError> {
    const PRESENT_WRITABLE: u64 = 0b11;
    const LARGE: u64 = 1 << 7;
    let page = |n: u64| layout::BOOT_PAGE_TABLES + 0x1000 * n;
    ram.write_obj(page(1) | PRESENT_WRITABLE, GuestAddress(page(0)))?;
    for gib in 0..4u64 {
        let directory = page(2 + gib);
        ram.write_obj(
            directory | PRESENT_WRITABLE,
            GuestAddress(page(1) + 8 * gib),
        )?;
        for index in 0..512u64 {
            let frame = gib << 30 | index << 21;
            ram.write_obj(
                frame | PRESENT_WRITABLE | LARGE,
                GuestAddress(directory + 8 * index),
            )?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_tables_map_four_gib_one_to_one() {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        write_tables(&ram, Entry::Linux64(0)).unwrap();
        let read = |at| ram.read_obj::<u64>(GuestAddress(at)).unwrap();
        for address in [0u64, 0x1234_5678, 0xfee0_0000, 0xffff_ffff] {
            let pml4e = read(layout::BOOT_PAGE_TABLES + 8 * (address >> 39));
            let pdpte = read((pml4e & !0xfff) + 8 * (address >> 30 & 0x1ff));
            let pde = read((pdpte & !0xfff) + 8 * (address >> 21 & 0x1ff));
            assert_eq!(pde, address & !0x1f_ffff | 0x83);
        }
    }
}
