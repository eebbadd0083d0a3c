//! Register state in which the boot processor enters a kernel.
//!
//! The data in RAM for it, and the protocols, are in [`platform::boot`]. Other processors wait for
//! INIT/SIPI in KVM's local APIC and need nothing but CPUID and MSRs.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;
use platform::boot::Entry;
use platform::layout;

use crate::vm::{KvmError, refused};

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

/// Returns a flat segment, as cached by the processor.
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

/// Sets the registers of the boot processor to enter the kernel at `entry`.
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

/// Sets the MSRs that firmware would have set on every processor: fast strings, memory write-back
/// by default.
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
    use platform::boot::gdt;

    use super::*;

    /// Returns the descriptor of a segment, as the GDT holds it (Intel SDM volume 3 §3.4.5).
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

    #[test]
    fn segments_are_what_the_table_in_ram_says() {
        for entry in [Entry::Linux64(0), Entry::Pvh(0)] {
            let segments = segments(entry).map(|segment| descriptor(&segment));
            assert_eq!(segments, gdt(entry)[2..]);
        }
    }
}
