//! Register state in which the boot processor enters a kernel.
//!
//! * [`Entry::Linux64`]: Linux 64-bit boot protocol (Documentation/x86/boot.rst, "64-bit boot protocol"): long mode,
//!   first 4 GiB mapped one to one, flat segments 0x10 and 0x18, RSI = `boot_params`, interrupts off.
//! * [`Entry::Pvh`]: Xen's x86/HVM direct boot ABI: 32-bit protected mode, paging off, EBX = start info.
//!
//! Other processors wait for INIT/SIPI in KVM's local APIC and need nothing but CPUID and MSRs.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::kvm::{KvmError, refused};
use super::layout;

/// How and where a kernel is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Linux's 64-bit entry point at this guest-physical address.
    Linux64(u64),
    /// A PVH entry point at this guest-physical address.
    Pvh(u64),
}

const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const MSR_IA32_MISC_ENABLE: u32 = 0x1a0;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
/// Code: present, readable, accessed. Data: present, writable, accessed.
const CODE: u8 = 0xb;
const DATA: u8 = 0x3;
const TSS_BUSY: u8 = 0xb;

/// A flat segment, as cached by the processor.
fn segment(selector: u16, kind: u8, long: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: kind,
        present: 1,
        dpl: 0,
        db: u8::from(!long),
        s: 1,
        l: u8::from(long),
        g: 1,
        avl: 0,
        unusable: 0,
        padding: 0,
    }
}

/// The descriptor of a segment, as the GDT holds it (Intel SDM volume 3 §3.4.5).
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(segment.limit >> if segment.g == 1 { 12 } else { 0 });
    let base = segment.base;
    let flags = u64::from(segment.type_)
        | u64::from(segment.s) << 4
        | u64::from(segment.dpl) << 5
        | u64::from(segment.present) << 7
        | u64::from(segment.avl) << 12
        | u64::from(segment.l) << 13
        | u64::from(segment.db) << 14
        | u64::from(segment.g) << 15;
    (base & 0xff00_0000) << 32
        | (limit & 0xf_0000) << 32
        | flags << 40
        | (base & 0xff_ffff) << 16
        | limit & 0xffff
}

/// Segments 0x10 (code), 0x18 (data) and 0x20 (task state).
fn segments(entry: Entry) -> [kvm_segment; 3] {
    let long = matches!(entry, Entry::Linux64(_));
    let mut data = segment(0x18, DATA, false);
    data.db = 1;
    let task = kvm_segment {
        limit: 0x67,
        selector: 0x20,
        type_: TSS_BUSY,
        s: 0,
        db: 0,
        g: 0,
        ..data
    };
    [segment(0x10, CODE, long), data, task]
}

/// Writes the GDT and, for long mode, the page tables.
pub fn write_tables(
    ram: &GuestMemoryMmap,
    entry: Entry,
) -> Result<(), vm_memory::GuestMemoryError> {
    let mut gdt = [0u64; 5];
    for (slot, segment) in gdt[2..].iter_mut().zip(&segments(entry)) {
        *slot = descriptor(segment);
    }
    for (index, value) in (0u64..).zip(gdt) {
        ram.write_obj(value, GuestAddress(layout::BOOT_GDT + 8 * index))?;
    }
    if matches!(entry, Entry::Linux64(_)) {
        write_page_tables(ram)?;
    }
    Ok(())
}

/// PML4, PDPT and four directories of 2 MiB pages: 4 GiB one to one.
fn write_page_tables(ram: &GuestMemoryMmap) -> Result<(), vm_memory::GuestMemoryError> {
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

fn special(entry: Entry, sregs: &mut kvm_sregs) {
    let [code, data, task] = segments(entry);
    (sregs.cs, sregs.tr) = (code, task);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.gdt.base = layout::BOOT_GDT;
    sregs.gdt.limit = 5 * 8 - 1;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cr0 = CR0_PE | CR0_ET;
    if matches!(entry, Entry::Linux64(_)) {
        sregs.cr0 |= CR0_PG;
        sregs.cr3 = layout::BOOT_PAGE_TABLES;
        sregs.cr4 = CR4_PAE;
        sregs.efer = EFER_LME | EFER_LMA;
    }
}

/// Puts the boot processor at the kernel's door.
pub fn enter(vcpu: &VcpuFd, entry: Entry) -> Result<(), KvmError> {
    let mut sregs = vcpu
        .get_sregs()
        .map_err(refused("to tell special registers"))?;
    special(entry, &mut sregs);
    vcpu.set_sregs(&sregs)
        .map_err(refused("special registers"))?;
    let regs = match entry {
        Entry::Linux64(rip) => kvm_regs {
            rip,
            rsi: layout::BOOT_PARAMS,
            rsp: layout::BOOT_STACK,
            rbp: layout::BOOT_STACK,
            rflags: 2,
            ..Default::default()
        },
        Entry::Pvh(rip) => kvm_regs {
            rip,
            rbx: layout::BOOT_PVH,
            rflags: 2,
            ..Default::default()
        },
    };
    vcpu.set_regs(&regs).map_err(refused("general registers"))
}

/// What firmware would have set on every processor: fast strings, memory write-back by default.
pub fn set_msrs(vcpu: &VcpuFd) -> Result<(), KvmError> {
    let entry = |index, data| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let list = [
        entry(MSR_IA32_MISC_ENABLE, 1),
        // MTRRs enabled (11), default type write-back (6).
        entry(MSR_MTRR_DEF_TYPE, 1 << 11 | 6),
    ];
    let msrs = Msrs::from_entries(&list).expect("two entries are few enough");
    match vcpu.set_msrs(&msrs) {
        Ok(count) if count == list.len() => Ok(()),
        Ok(_) => Err(KvmError::Capability("MTRRs")),
        Err(error) => Err(refused("model-specific registers")(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_the_well_known_flat_ones() {
        let [code, data, task] = segments(Entry::Linux64(0));
        assert_eq!(descriptor(&code), 0x00af_9b00_0000_ffff);
        assert_eq!(descriptor(&data), 0x00cf_9300_0000_ffff);
        assert_eq!(descriptor(&task), 0x0000_8b00_0000_0067);
        let [code, ..] = segments(Entry::Pvh(0));
        assert_eq!(descriptor(&code), 0x00cf_9b00_0000_ffff);
    }

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
