//! A guest of a few instructions in 64-bit user mode, for this crate's tests: software KVM runs it too.

use guest_mem::{Gpa, PhysMem};
use kvm_bindings::{kvm_segment, kvm_sregs};

/// Bytes of RAM, from guest-physical 0: one large page, mapped one to one.
pub const RAM_SIZE: u64 = 2 << 20;
/// Where the instructions are.
pub const CODE: u64 = 0x1_0000;

/// PML4, PDPT, and a directory for each GiB.
const PAGE_TABLES: u64 = 0x1000;
const TASK: u64 = 0x9000;

/// Puts `code` and page tables into RAM. The large pages (2 MiB, below 512 GiB) at the addresses `devices` are mapped one to one and
/// uncached, at most six GiB of them.
pub fn load(ram: &impl PhysMem, code: &[u8], devices: &[u64]) {
    const LINK: u64 = 0b111;
    const LARGE: u64 = 1 << 7;
    const UNCACHED: u64 = 0b11 << 3;
    let write = |at: u64, bytes: &[u8]| ram.write(Gpa::new(at), bytes).unwrap();
    let word = |at: u64, value: u64| write(at, &value.to_le_bytes());
    let table = |number: u64| PAGE_TABLES + 0x1000 * number;
    write(CODE, code);
    word(table(0), table(1) | LINK);
    let mut gibs = vec![0];
    word(table(1), table(2) | LINK);
    word(table(2), LINK | LARGE);
    for device in devices {
        let gib = device >> 30;
        let known = gibs.iter().position(|known| *known == gib);
        let index = known.unwrap_or_else(|| {
            gibs.push(gib);
            gibs.len() - 1
        });
        let directory = table(2 + index as u64);
        assert!(directory < TASK, "more GiB than there is room for");
        word(table(1) + 8 * gib, directory | LINK);
        word(
            directory + 8 * (device >> 21 & 0x1ff),
            device | LINK | LARGE | UNCACHED,
        );
    }
}

/// 64-bit user mode on the page tables of [`load`]; the rest of `sregs` stays as it is after reset.
pub fn user_mode(sregs: &mut kvm_sregs) {
    const CR0_PE_MP_ET_NE_WP_AM_PG: u64 = 0x8005_0033;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LME_LMA: u64 = 1 << 8 | 1 << 10;
    let segment = |selector, type_, is_long: bool| kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 3,
        db: u8::from(!is_long),
        s: 1,
        l: u8::from(is_long),
        g: 1,
        ..Default::default()
    };
    let data = segment(0x2b, 3, false);
    sregs.cs = segment(0x33, 0xb, true);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        base: TASK,
        limit: 0x67,
        selector: 0x40,
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    (sregs.idt.base, sregs.idt.limit) = (0, 0);
    sregs.cr0 = CR0_PE_MP_ET_NE_WP_AM_PG;
    sregs.cr3 = PAGE_TABLES;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME_LMA;
}
