//! The guest of the soak, a queue submission in a loop in 64-bit user mode, and its memory.
//!
//! ```text
//! next:   counter += 1
//!         queue[tail] = IOTLB invalidate, global     the two descriptors Linux's qi_submit_sync
//!         queue[tail + 16] = WAIT, status = counter  writes
//!         tail = (tail + 32) mod 4096
//!         IQT = tail                                 one 32-bit store: the wake-up to be tested
//!         until status = counter: PAUSE              no timeout, as in Linux
//!         STOP set? store the counter at DONE        an address that only the host decodes
//!         15 times in 16: FLOOR + 0 … SPAN pauses    so that stores come before, while and after
//!                                                    the sidecore falls asleep
//! ```
//! Everything is mapped one to one, for user mode. Like a driver's `ioremap`, the register page is
//! uncached. There is no stack, no interrupt table and no segment but the processor's cached ones:
//! an exception ends the machine as a triple fault, with its registers.
//!
//! Layouts: Intel SDM volume 3 §4.5 (page tables), §8.7 (task state); VT-d specification §6.5.2
//! (descriptors).
//!
//! UNSAFETY: the program's bytes are read from this binary between two symbols; a loop of PAUSEs.

use std::arch::{asm, global_asm};
use std::slice;

use anyhow::{Context, Result};
use guest_mem::{Access, Gpa, PhysMem};
use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use vtd::spec::registers::IQT;

use platform::layout;

/// Bytes of RAM, from guest-physical 0: one large page.
pub const RAM_SIZE: u64 = 2 << 20;
/// The invalidation queue: one page, 256 descriptors.
pub const QUEUE: u64 = 0x2_0000;
/// Address that WAIT descriptors write the counter to, 32 bits.
pub const STATUS: u64 = 0x2_1000;
/// Three words of 32 bits from the host: STOP (not zero: end after the present submission), FLOOR
/// and SPAN in PAUSEs.
pub const CONTROL: u64 = 0x2_2000;
/// A page without a memory slot: the program's last store exits there.
pub const DONE: u64 = 0xfed8_0000;

const CODE: u64 = 0x1_0000;
/// PML4, PDPT, directory of the first GiB, directory of the fourth, table of the 2 MiB around the
/// registers.
const PAGE_TABLES: u64 = 0x1000;
const GDT: u64 = 0x8000;
const TASK: u64 = 0x9000;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
/// PWT and PCD: PAT entry 3, uncached.
const UNCACHED: u64 = 0b11 << 3;
const LARGE: u64 = 1 << 7;

// rcx counter, rdx tail, rdi queue, rsi address of IQT, rbx address of the status word (also in the
// descriptors), rbp CONTROL, r8 DONE, r10 state of the random numbers; rax, r9 scratch.
global_asm!(
    ".pushsection .rodata.exitless_soak, \"a\", @progbits",
    ".globl exitless_soak_start",
    ".globl exitless_soak_end",
    "exitless_soak_start:",
    "2:",
    "inc ecx",
    // IOTLB invalidate (type 2), granularity global (1, bits 5:4).
    "mov qword ptr [rdi + rdx], 0x12",
    "mov qword ptr [rdi + rdx + 8], 0",
    // WAIT (type 5) with SW (bit 5), status data in 63:32; then the status address.
    "mov rax, rcx",
    "shl rax, 32",
    "or rax, 0x25",
    "mov [rdi + rdx + 16], rax",
    "mov [rdi + rdx + 24], rbx",
    "add edx, 32",
    "and edx, 0xfff",
    "mov [rsi], edx",
    "3:",
    "pause",
    "cmp [rbx], ecx",
    "jne 3b",
    "cmp dword ptr [rbp], 0",
    "jne 5f",
    // A linear congruential generator (Numerical Recipes' constants): four bits decide whether to
    // wait at all, the high half times SPAN over 65536 is the length.
    "imul r10d, r10d, 1664525",
    "add r10d, 1013904223",
    "test r10d, 0xf000",
    "jz 2b",
    "mov eax, r10d",
    "shr eax, 16",
    "mov r9d, [rbp + 8]",
    "imul rax, r9",
    "shr rax, 16",
    "mov r9d, [rbp + 4]",
    "add rax, r9",
    "jz 2b",
    "4:",
    "pause",
    "dec rax",
    "jnz 4b",
    "jmp 2b",
    "5:",
    "mov [r8], ecx",
    "jmp 5b",
    "exitless_soak_end:",
    ".popsection",
);

unsafe extern "C" {
    #[link_name = "exitless_soak_start"]
    static START: u8;
    #[link_name = "exitless_soak_end"]
    static END: u8;
}

fn code() -> &'static [u8] {
    let (start, end) = (&raw const START, &raw const END);
    // SAFETY: both symbols are in one read-only section of this binary, START first, with nothing
    // between them but the program; only the addresses of the statics are used.
    unsafe { slice::from_raw_parts(start, end.addr() - start.addr()) }
}

/// Stores program, page tables and segments in RAM.
pub fn load(ram: &impl PhysMem) -> Result<()> {
    write(ram, CODE, code())?;
    let word = |at: u64, value: u64| write(ram, at, &value.to_le_bytes());
    let table = |n: u64| PAGE_TABLES + 0x1000 * n;
    let link = PRESENT | WRITABLE | USER;
    word(table(0), table(1) | link)?;
    word(table(1), table(2) | link)?;
    word(table(1) + 8 * 3, table(3) | link)?;
    word(table(2), link | LARGE)?;
    word(table(3) + 8 * (layout::VTD >> 21 & 0x1ff), table(4) | link)?;
    for page in [layout::VTD, DONE] {
        word(table(4) + 8 * (page >> 12 & 0x1ff), page | link | UNCACHED)?;
    }
    // The segments that the processor has cached, in case it (or KVM) reads the table.
    for (index, descriptor) in [
        (SELECTOR_CODE, 0x00af_fb00_0000_ffff_u64),
        (SELECTOR_DATA, 0x00cf_f300_0000_ffff),
        (SELECTOR_TASK, 0x0000_8b00_9000_0067),
    ] {
        word(GDT + u64::from(index & !7), descriptor)?;
    }
    Ok(())
}

/// Stores bytes from the host in the guest's RAM.
fn write(ram: &impl PhysMem, at: u64, bytes: &[u8]) -> Result<()> {
    ready(ram.write(Gpa::new(at), bytes))
}

/// Returns the present counter: the value that the last WAIT wrote.
pub fn counter(ram: &impl PhysMem) -> Result<u32> {
    let mut bytes = [0; 4];
    ready(ram.read(Gpa::new(STATUS), &mut bytes))?;
    Ok(u32::from_le_bytes(bytes))
}

/// Makes the program end after its present submission.
pub fn stop(ram: &impl PhysMem) -> Result<()> {
    ready(ram.store_u32_release(Gpa::new(CONTROL), 1))
}

/// Sets the program's delay between two submissions: `floor` to `floor + span` PAUSEs.
pub fn set_delay(ram: &impl PhysMem, floor: u32, span: u32) -> Result<()> {
    ready(ram.store_u32_release(Gpa::new(CONTROL + 4), floor))?;
    ready(ram.store_u32_release(Gpa::new(CONTROL + 8), span))
}

/// Executes the program's waiting loop on the host, for `pauses` (at least 1) PAUSEs. In assembler
/// there as here, so that a debug build takes the same time.
pub fn pause(pauses: u32) {
    // SAFETY: changes its own register, and flags; ends when the register is 0.
    unsafe {
        asm!(
            "2:",
            "pause",
            "dec {left}",
            "jnz 2b",
            left = inout(reg) u64::from(pauses.max(1)) => _,
            options(nomem, nostack)
        );
    }
}

fn ready<T>(access: Access<T>) -> Result<T> {
    access
        .ok()
        .context("the payload's RAM is smaller than its layout")
}

const SELECTOR_DATA: u16 = 0x2b;
const SELECTOR_CODE: u16 = 0x33;
const SELECTOR_TASK: u16 = 0x40;

/// Sets up 64-bit user mode on the page tables of [`load`]; the rest of `sregs` keeps its reset
/// value.
pub fn special(sregs: &mut kvm_sregs) {
    const CR0_PE_MP_ET_NE_WP_AM_PG: u64 = 0x8005_0033;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LME_LMA: u64 = 1 << 8 | 1 << 10;
    let segment = |selector, type_, long: bool| kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 3,
        db: u8::from(!long),
        s: 1,
        l: u8::from(long),
        g: 1,
        ..Default::default()
    };
    // Code: readable, accessed. Data: writable, accessed.
    let data = segment(SELECTOR_DATA, 3, false);
    sregs.cs = segment(SELECTOR_CODE, 0xb, true);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        base: TASK,
        limit: 0x67,
        selector: SELECTOR_TASK,
        // A busy 64-bit task state segment.
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, SELECTOR_TASK + 15);
    (sregs.idt.base, sregs.idt.limit) = (0, 0);
    sregs.cr0 = CR0_PE_MP_ET_NE_WP_AM_PG;
    sregs.cr3 = PAGE_TABLES;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME_LMA;
}

/// Returns the registers at the program's start.
pub fn registers() -> kvm_regs {
    kvm_regs {
        rip: CODE,
        rflags: 2,
        rdi: QUEUE,
        rsi: layout::VTD + u64::from(IQT),
        rbx: STATUS,
        rbp: CONTROL,
        r8: DONE,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use guest_mem::GuestRam;
    use vtd::spec::invalidate::{Granularity, IotlbDescriptor, WaitDescriptor};

    use super::*;

    #[test]
    fn the_programs_constants_are_the_descriptors_of_the_specification() {
        let flush = IotlbDescriptor::new()
            .with_kind(2)
            .with_g(Granularity::GLOBAL);
        assert_eq!(flush.into_bits(), 0x12);
        let wait = WaitDescriptor::new()
            .with_kind(5)
            .with_sw(true)
            .with_data(7)
            .with_addr(STATUS >> 2);
        let words = u128::from(STATUS) << 64 | 7 << 32 | 0x25;
        assert_eq!(wait.into_bits(), words);
    }

    #[test]
    fn program_and_pages_are_where_the_page_tables_say() {
        let ram = GuestRam::new(&[(Gpa::new(0), RAM_SIZE)]).unwrap();
        load(&ram).unwrap();
        let word = |at: u64| ram.read_u64(Gpa::new(at)).unwrap();
        for page in [layout::VTD, DONE] {
            let mut table = PAGE_TABLES;
            for shift in [39, 30, 21] {
                let entry = word(table + 8 * (page >> shift & 0x1ff));
                assert_eq!(entry & 0xfff, 7);
                table = entry & !0xfff;
            }
            assert_eq!(word(table + 8 * (page >> 12 & 0x1ff)), page | 0x1f);
        }
        assert_eq!(word(word(word(PAGE_TABLES) & !0xfff) & !0xfff), 0x87);
        // inc ecx
        assert_eq!(word(CODE) & 0xffff, 0xc1ff);
        assert!((64..4096).contains(&code().len()));
    }
}
